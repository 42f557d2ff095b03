"""A worker's half of the protocol: which view it works in, and when it stops."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.membership.protocol import Heartbeat, StateVersion, View, ViewStatus, ViewUpdate, WorkerAddress


@dataclass(frozen=True)
class AbortView:
    """Break off whatever is under way in the group of the view of this number."""

    view: int


@dataclass(frozen=True)
class JoinView:
    """Find the other members of `view`, take the state that it starts from, and say so by `Agent.met`, or by
    `Agent.broken` if they are not all there."""

    view: View


@dataclass(frozen=True)
class Exit:
    """The others go on without this worker, or there is nothing more to do: it may end."""


Action = AbortView | JoinView | Exit


class Agent:
    """What one worker knows and says. Calls return what is to be done, and are followed by a beat.

    Whoever trains is inside a view from `JoinView` until it says that it stopped, by `broken`;
    nothing that is heard meanwhile changes that, so a standing is final once its view has ended here. A view that has
    ended is never entered again: what the coordinator concludes from a standing stays true.

    Args:
        worker: its name, which no other process ever has.
        standing: of the state that it starts with.
        place: where it is.
    """

    def __init__(self, worker: str, standing: StateVersion, place: WorkerAddress = WorkerAddress()) -> None:
        self.worker, self.place = worker, place
        self._stand(standing)
        self.view = View()  # that it is inside
        self.working = False
        self._word = ViewUpdate(View(), ViewStatus.NOW)
        self._ended = self._broke = 0
        self._count = 0
        self._missed: tuple[str, ...] = ()
        self._leaving = self._finished = self._aborted = False

    def beat(self) -> Heartbeat:
        """All that the coordinator is to know."""
        self._count += 1
        works_in = self.view.number if self.working else 0
        return Heartbeat(
            self.worker, self._count, works_in, self._ended, self.standing, self._missed, self._leaving,
            self._finished, self.place, self._broke)  # fmt: skip

    @property
    def standing(self) -> StateVersion:
        """Of its state, as far as it was told."""
        return StateVersion(self._reached_in, self._steps, self._digest)

    @property
    def votes(self) -> bool:
        """Whether this worker says, with its next step, that the view should end after it."""
        over = self._word.over in (ViewStatus.AT_A_BOUNDARY, ViewStatus.FOR_EVER)
        return over and self.view.number == self._word.view.number

    @property
    def turning(self) -> bool:
        """Whether it is to stop at once, or to meet a group, and has not said that it did: there is hardly any news
        for it until then."""
        return self._aborted or (self.view.number > 0 and not self.working)

    @property
    def leaving(self) -> bool:
        """Whether this worker asked to go."""
        return self._leaving

    def hear(self, word: ViewUpdate) -> list[Action]:
        """The coordinator said `word`; words may come late, twice, or not in order."""
        if (word.view.number, _AGE[word.over]) < (self._word.view.number, _AGE[self._word.over]):
            return []
        self._word = word
        return self._next()

    def met(self, number: int, step: int, digest: str) -> None:
        """The group of view `number` is there, and this worker has the state that it starts from."""
        if number == self.view.number:
            self._stand(StateVersion(number, step, digest))
            self.working = True

    def done(self, number: int, digest: str = "", steps: int = 1) -> None:
        """So many more steps of view `number` are in the state. It is told so with every step, and makes nothing of
        it."""
        if number == self.view.number and self.working:
            self._steps += steps
            self._digest = digest

    def part(self, number: int, digest: str | None = None) -> list[Action]:
        """The members of view `number` part, after a step that all have taken. `digest`, where it is given, is that of
        the state as it now is."""
        if number != self.view.number:
            return []
        if digest is not None:
            self._digest = digest
        return self._stopped(number)

    def broken(self, number: int, missed: tuple[str, ...] = (), digest: str | None = None) -> list[Action]:
        """The group of view `number` does not work any more: one is lost, or it was never complete: `missed` were not
        there. `digest` as for `part`."""
        if number == self.view.number:
            self._missed, self._broke = missed, number
        return self.part(number, digest)

    def leave(self) -> list[Action]:
        """This worker is to go, after a step that all take. Whether it may go at once, the next word says: the last
        one was said without regard to this."""
        self._leaving = True
        return []

    def finish(self) -> list[Action]:
        """All that was to be trained is, and the result lies where it belongs."""
        self._finished = True
        return self._stopped(self.view.number) if self.view.number else self._next()

    def _stand(self, standing: StateVersion) -> None:
        self._reached_in, self._steps, self._digest = standing.view, standing.step, standing.digest

    def _stopped(self, number: int) -> list[Action]:
        self._ended = max(self._ended, number)
        self.view, self.working, self._aborted = View(), False, False
        return self._next()

    def _next(self) -> list[Action]:
        view, over = self._word.view, self._word.over
        mine = self.worker in view.members
        if self.view.number:
            if over is ViewStatus.FOR_EVER:  # others may still need this group for their last words
                return []
            past = view.number > self.view.number or over.at_once
            if not past or self._aborted:
                return []
            self._aborted = True
            return [AbortView(self.view.number)]
        if over is ViewStatus.FOR_EVER or self._finished:
            return [Exit()]
        if over.at_once or not mine:
            self._ended = max(self._ended, view.number)
        if self._leaving and (over is ViewStatus.WITH_TOO_FEW or (not mine and view.number)):
            return [Exit()]
        if view.number <= self._ended:
            return []
        self.view, self._missed = view, ()
        return [JoinView(view)]


_AGE = {over: age for age, over in enumerate(ViewStatus)}  # a view goes through them in this order
