"""A worker's half of the protocol: which view it works in, and when it stops."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.membership.values import Beat, Over, Standing, View, Word


@dataclass(frozen=True)
class Abort:
    """Break off whatever is under way in the group of the view of this number."""

    view: int


@dataclass(frozen=True)
class Meet:
    """Find the other members of `view`, take the state that it starts from, and say so by `Agent.met`, or by
    `Agent.broken` if they are not all there."""

    view: View


@dataclass(frozen=True)
class Exit:
    """The others go on without this worker, which may end."""


Action = Abort | Meet | Exit


class Agent:
    """What one worker knows and says. Calls return what is to be done, and are followed by a beat.

    A view is entered once, and never again once it has `ended` here: what the coordinator concludes from that stays
    true.

    Args:
        worker: its name, which no other process ever has.
        standing: of the state that it starts with.
    """

    def __init__(self, worker: str, standing: Standing) -> None:
        self.worker, self.standing = worker, standing
        self.view = View()  # that it works in, or is about to
        self.working = False
        self._ended = 0
        self._count = 0
        self._missed: tuple[str, ...] = ()
        self._leaving = False
        self._over = Over.NO

    def beat(self) -> Beat:
        """All that the coordinator is to know."""
        self._count += 1
        works_in = self.view.number if self.working else 0
        return Beat(self.worker, self._count, works_in, self._ended, self.standing, self._missed, self._leaving)

    @property
    def votes(self) -> bool:
        """Whether this worker says, with its next step, that the view should end after it."""
        return self._over is Over.AT_A_BOUNDARY

    def hear(self, word: Word) -> list[Action]:
        """The coordinator said `word`; words may come late, twice, or not in order."""
        number, mine = word.view.number, self.worker in word.view.members
        if self._leaving and not mine and number >= max(self._ended, 1):
            return [*self._end(number), Exit()]
        if number <= self._ended or number < self.view.number:
            return []
        if number == self.view.number:
            self._over = word.over
            return self._end(number) if word.over is Over.NOW else []
        actions = self._end(number - 1)
        if word.over is Over.NOW or not mine:
            self._ended = number
            return actions
        self.view, self._over, self._missed = word.view, word.over, ()
        return [*actions, Meet(word.view)]

    def met(self, number: int, step: int, digest: str) -> None:
        """The group of view `number` is there, and this worker has the state that it starts from."""
        if number == self.view.number:
            self.standing = Standing(number, step, digest)
            self.working = True

    def done(self, number: int, digest: str, *, boundary: bool) -> None:
        """One more step of view `number` is in the state; with `boundary`, one with which some voted to end."""
        if number == self.view.number and self.working:
            self.standing = Standing(number, self.standing.step + 1, digest)
            if boundary:
                self._leave(number)

    def broken(self, number: int, missed: tuple[str, ...] = ()) -> list[Action]:
        """The group of view `number` does not work, or was never complete: `missed` were not there."""
        if number != self.view.number:
            return []
        self._missed = missed
        return self._end(number)

    def leave(self) -> None:
        """This worker is to go, after a step that all take."""
        self._leaving = True

    def _end(self, number: int) -> list[Action]:
        """Out of all views up to `number`, whatever is under way."""
        left = self.view.number
        self._leave(number)
        return [Abort(left)] if left and self.view.number == 0 else []

    def _leave(self, number: int) -> None:
        self._ended = max(self._ended, number)
        self.view, self.working, self._over = View(), False, Over.NO
