"""The loop over views that `unisono train` and custom loops go through: here the loss of a worker is handled.

next view ─► Attempt ─┬─ finished ──────────────────────────────────► end of the run
   ▲                  ├─ the view ends after a step of all ─► end_view ─┐
   │                  └─ a worker is lost ─► roll back ─────► end_view ─┤
   └────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self, TypeVar

from unisono.elastic.session import Session
from unisono.elastic.state_transfer import Progress
from unisono.errors import CommunicationError, PeerLost
from unisono.observe import ActivityTracker
from unisono.observe.activity import Phase

T = TypeVar("T")


class Restorable(Protocol):
    """What a loop over views needs of the state that is trained; `TrainingState` is one.

    Attributes:
        progress: the steps that it holds.
        joined: whether this is a state of the run.
    """

    progress: Progress
    joined: bool

    def roll_back(self) -> None:
        """Go back to the last commit."""

    def digest(self) -> str:
        """The digest of the state."""


def attempts(
    session: Session, state: Restorable, tracker: ActivityTracker, release: Callable[[], None] = lambda: None
) -> Iterator[Attempt]:
    """One `Attempt` per view, until the run is finished or this worker has left it.

    Args:
        release: frees what belongs to a view, after it has ended and before `state` is rolled back.
    """
    while session.next_view():
        attempt = Attempt(session, state, tracker, release)
        yield attempt
        if attempt.finished:
            return


class Attempt:
    """Training within one view: a context. A `CommunicationError` inside rolls the state back and ends the view.

    Attributes:
        finished: all steps are taken.
        lost: a worker was lost, and the view is over.
    """

    def __init__(
        self, session: Session, state: Restorable, tracker: ActivityTracker, release: Callable[[], None]
    ) -> None:
        self._session, self._state, self._tracker, self._release = session, state, tracker, release
        self._error: CommunicationError | None = None
        self.finished = False

    @property
    def lost(self) -> bool:
        return self._error is not None

    def joined(self) -> None:
        """This worker is connected to all members, and has the state that the view starts from."""
        start, self._state.joined = self._session.view.start, True
        # The coordinator's count of steps does not decrease when training rolls back.
        self._session.joined(start.step if start.view else self._state.progress.steps, start.digest)

    def finish(self) -> None:
        """All steps are taken: the run finishes when the context ends."""
        self.finished = True

    def unless_lost(self, call: Callable[[], T]) -> T | None:
        """``call()``; None if a worker is lost in it, or was before.

        For calls of a custom loop, which no `PeerLost` may end: the view ends later, when the context does.

        Raises:
            PeerLost: the run cannot recover from it, or is finished.
        """
        if self.lost:
            return None
        try:
            return call()
        except PeerLost as error:
            if self.finished or not self._session.elastic:
                raise
            self.fail(error)
            return None

    def fail(self, error: CommunicationError) -> None:
        """A worker was lost: the view ends when the context does."""
        self._error = self._error or error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is None and self.finished:
            self._session.finish()
            return False
        if error is not None and not isinstance(error, CommunicationError):
            return False
        self._error = self._error or error
        self._release()
        self._tracker.set_phase(Phase.RECOVERY)
        if self._error is not None:
            self._tracker.discard()
            self._state.roll_back()
        # Raises where there is no recovery.
        self._session.end_view(self._state.digest() if self._session.elastic else "", self._error)
        return True
