"""A worker's half of the membership protocol: which view the worker trains in, and when it stops."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.membership.protocol import Heartbeat, StateVersion, View, ViewStatus, ViewUpdate, WorkerAddress


@dataclass(frozen=True)
class AbortView:
    """Abort all operations in flight in the group of the view whose number is `view`."""

    view: int


@dataclass(frozen=True)
class JoinView:
    """Connect to the other members of `view` and receive the state that the view starts from; then call `Agent.joined`,
    or `Agent.fail_view` if members are missing."""

    view: View


@dataclass(frozen=True)
class Exit:
    """The worker may exit: the others continue without it, or the training is complete."""


Action = AbortView | JoinView | Exit


class Agent:
    """The state machine of one worker's membership. Its methods return the actions that the worker is to take.

    The caller sends a heartbeat after `joined`, `end_view`, `fail_view`, `request_leave` and `finish`.

    A worker is in a view from `JoinView` until `end_view`, `fail_view` or `finish` is called, whatever the coordinator
    sends meanwhile. So the worker's state version is final once the view has ended here. The worker never joins a view
    again that it has ended, so what the coordinator concludes from this version remains true.

    Args:
        worker: the worker's name, which no other process ever has.
        version: the version of the state that the worker starts with.
        address: the worker's address.

    Attributes:
        view: the view that the worker is in; its number is 0 while the worker is in none.
        working: whether the view's group is connected, and the worker has the state.
    """

    def __init__(self, worker: str, version: StateVersion, address: WorkerAddress = WorkerAddress()) -> None:
        self.worker, self.address = worker, address
        self._set_version(version)
        self.view = View()
        self.working = False
        self._update = ViewUpdate(View(), ViewStatus.ABORTED)
        self._ended = self._failed = 0
        self._count = 0
        self._unreachable: tuple[str, ...] = ()
        self._leaving = self._finished = self._aborted = False

    def heartbeat(self) -> Heartbeat:
        """The next heartbeat."""
        self._count += 1
        active_view = self.view.number if self.working else 0
        return Heartbeat(
            self.worker, self._count, active_view, self._ended, self.version, self._unreachable, self._leaving,
            self._finished, self.address, self._failed)  # fmt: skip

    @property
    def version(self) -> StateVersion:
        """The version of the worker's state."""
        return StateVersion(self._state_view, self._steps, self._digest)

    @property
    def votes_to_end(self) -> bool:
        """Whether this worker asks, with its next step, that the view ends after that step."""
        ending = self._update.status in (ViewStatus.ENDING_AT_BOUNDARY, ViewStatus.FINISHED)
        return ending and self.view.number == self._update.view.number

    @property
    def changes_view(self) -> bool:
        """Whether the worker has to stop at once, or to connect a group, and has not reported yet that it did so. Until
        then the coordinator hardly has news for it."""
        return self._aborted or (self.view.number > 0 and not self.working)

    @property
    def is_leaving(self) -> bool:
        """Whether this worker asked to leave."""
        return self._leaving

    def receive(self, update: ViewUpdate) -> list[Action]:
        """Process an update of the coordinator; updates may be late, duplicated or out of order."""
        if _order(update) < _order(self._update):
            return []
        self._update = update
        return self._actions()

    def joined(self, number: int, step: int, digest: str) -> None:
        """Note that the group of view `number` is connected, and this worker has the state that the view starts from.

        Args:
            step: the number of steps in that state.
            digest: the digest of that state.
        """
        if number == self.view.number:
            self._set_version(StateVersion(number, step, digest))
            self.working = True

    def add_steps(self, number: int, digest: str = "", steps: int = 1) -> None:
        """Note that `steps` more steps of view `number` are in the state.

        This is called in every step, so it does nothing else.
        """
        if number == self.view.number and self.working:
            self._steps += steps
            self._digest = digest

    def end_view(self, number: int, digest: str | None = None) -> list[Action]:
        """Note that view `number` has ended after a step that all its members took.

        Args:
            digest: the digest of the state as it is now; None: the digest has not changed.
        """
        if number != self.view.number:
            return []
        if digest is not None:
            self._digest = digest
        return self._end(number)

    def fail_view(self, number: int, unreachable: tuple[str, ...] = (), digest: str | None = None) -> list[Action]:
        """Note that the group of view `number` has failed: a member is lost, or members did not connect.

        Args:
            unreachable: the members that did not connect.
            digest: as for `end_view`.
        """
        if number == self.view.number:
            self._unreachable, self._failed = unreachable, number
        return self.end_view(number, digest)

    def request_leave(self) -> list[Action]:
        """Ask to leave after a step that all members take. The next update decides whether the worker may exit at once:
        the latest update was sent before this request."""
        self._leaving = True
        return []

    def finish(self) -> list[Action]:
        """Note that the training is complete, and that its result is stored."""
        self._finished = True
        return self._end(self.view.number) if self.view.number else self._actions()

    def _set_version(self, version: StateVersion) -> None:
        self._state_view, self._steps, self._digest = version.view, version.step, version.digest

    def _end(self, number: int) -> list[Action]:
        self._ended = max(self._ended, number)
        self.view, self.working, self._aborted = View(), False, False
        return self._actions()

    def _actions(self) -> list[Action]:
        view, status = self._update.view, self._update.status
        is_member = self.worker in view.members
        if self.view.number:
            if status is ViewStatus.FINISHED:  # others may still need this group for their last messages
                return []
            past = view.number > self.view.number or status.stops_at_once
            if not past or self._aborted:
                return []
            self._aborted = True
            return [AbortView(self.view.number)]
        if status is ViewStatus.FINISHED or self._finished:
            return [Exit()]
        if status.stops_at_once or not is_member:
            self._ended = max(self._ended, view.number)
        if self._leaving and (status is ViewStatus.BELOW_MINIMUM or (not is_member and view.number)):
            return [Exit()]
        if view.number <= self._ended:
            return []
        self.view, self._unreachable = view, ()
        return [JoinView(view)]


def _order(update: ViewUpdate) -> tuple[int, int]:
    return update.view.number, _STATUS_ORDER[update.status]


_STATUS_ORDER = {status: order for order, status in enumerate(ViewStatus)}  # a view passes through them in this order
