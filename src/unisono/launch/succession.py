"""What the end of one worker's process means for the others: for most runs the end, for some only another process."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unisono.backoff import Backoff
from unisono.launch.failure import Failure
from unisono.launch.stopping import STOP, STOP_ALL

_IN_ONE_PLACE = 3  # processes that may die there in a row, without a new step
_APART = Backoff(first_seconds=1.0, factor=2.0, longest_seconds=60.0)
_SETTLED_SECONDS = 30.0  # whoever lived as long did not die of its start


@dataclass(frozen=True)
class Verdict:
    """What is done about a worker that has ended.

    Args:
        words: for people; empty says nothing.
        cause: the run has failed, for this reason.
        another_in_seconds: another process takes its place then.
    """

    words: str = ""
    cause: Failure | None = None
    another_in_seconds: float | None = None


class Succession(Protocol):
    """Decides for all workers of a launcher, which it knows by their places, 0, 1, ..."""

    stop: signal.Signals
    """Asks a worker to come to a step boundary and return."""

    def name(self, place: int) -> str:
        """Of the process that is about to be started there."""

    def heard(self, message: Mapping[str, Any]) -> None:
        """A worker reported it."""

    def began(self, place: int, pid: int) -> None:
        """The process there is running."""

    def ended(self, place: int) -> None:
        """The process there is no more, for whatever reason."""

    def returned(self, place: int, result: Any, others: int) -> Verdict:
        """It was done, and came to `result`; of `others` there are processes yet."""

    def lost(self, what: Failure, others: int, lived_seconds: float) -> Verdict:
        """It died while the run went on."""

    def over(self, results: Sequence[Any]) -> bool:
        """Whether `results` are all that the run was for."""

    def lacking(self, results: Sequence[Any]) -> str:
        """All have ended, and none failed: why `results` are none of a run all the same."""


class Together:
    """All begin, none is replaced, and every one is needed to the end."""

    stop = STOP

    def name(self, place: int) -> str:
        """See `Succession`."""
        return ""

    def heard(self, message: Mapping[str, Any]) -> None:
        """See `Succession`."""

    def began(self, place: int, pid: int) -> None:
        """See `Succession`."""

    def ended(self, place: int) -> None:
        """See `Succession`."""

    def returned(self, place: int, result: Any, others: int) -> Verdict:
        """See `Succession`."""
        return Verdict()

    def lost(self, what: Failure, others: int, lived_seconds: float) -> Verdict:
        """See `Succession`."""
        return Verdict(cause=what)

    def over(self, results: Sequence[Any]) -> bool:
        """See `Succession`."""
        return False

    def lacking(self, results: Sequence[Any]) -> str:
        """See `Succession`."""
        return ""


class Present(Protocol):
    """Is told of processes, by the names of their workers.

    Attributes:
        furthest: steps that any worker of the run has done, of this launcher or another one, as far as is known.
    """

    @property
    def furthest(self) -> int: ...
    def began(self, worker: str, pid: int) -> None: ...
    def ended(self, worker: str) -> None: ...


class Replaced:
    """Whoever dies is replaced, as long as that leads to new steps; whoever returns None has left; the first other
    result ends the run.

    A run fails when three processes in one place, or twice as many as there are places, died in a row without any new
    step. Where others take steps meanwhile, processes follow each other in a place more slowly each time: the third is
    started one second after the second was, at the earliest, the next two seconds after the third, and so on.

    Args:
        places: number of processes at a time.
        present: told the name of each process that has begun, and of each that has ended.
        prefix: of all names.
    """

    stop = STOP_ALL

    def __init__(self, places: int, present: Present, prefix: str = "") -> None:
        self._places, self._present, self._prefix = places, present, prefix
        self._lives: Counter[int] = Counter()
        self._short: Counter[int] = Counter()  # lives in a row that were
        self._furthest = 0
        self._fruitless: list[Failure] = []  # since the furthest step

    def name(self, place: int) -> str:
        """See `Succession`."""
        self._lives[place] += 1
        return self._name(place)

    def heard(self, message: Mapping[str, Any]) -> None:
        """See `Succession`."""
        if message.get("kind") == "progress":
            self._reach(message["step"])

    def began(self, place: int, pid: int) -> None:
        """See `Succession`."""
        self._present.began(self._name(place), pid)

    def ended(self, place: int) -> None:
        """See `Succession`."""
        self._present.ended(self._name(place))

    def returned(self, place: int, result: Any, others: int) -> Verdict:
        """See `Succession`."""
        return Verdict(f"worker {self._name(place)} has left: {_on(others)}")

    def lost(self, what: Failure, others: int, lived_seconds: float) -> Verdict:
        """See `Succession`."""
        self._reach(self._present.furthest)  # steps are told to the launcher of worker 0, which may be another one
        self._fruitless.append(what)
        self._short[what.rank] = self._short[what.rank] + 1 if lived_seconds < _SETTLED_SECONDS else 0
        here = sum(each.rank == what.rank for each in self._fruitless)
        if here >= _IN_ONE_PLACE or len(self._fruitless) >= max(2 * self._places, _IN_ONE_PLACE):
            return Verdict(cause=self._fruitless[0])
        pause = round(max(0.0, self._apart_seconds(what.rank) - lived_seconds), 1)
        said = f"worker {self._name(what.rank)} {_was(what.reason)}: {_on(others)}, another one is started"
        return Verdict(said + (f" in {pause:g} s" if pause else ""), another_in_seconds=pause)

    def over(self, results: Sequence[Any]) -> bool:
        """See `Succession`."""
        return any(result is not None for result in results)

    def lacking(self, results: Sequence[Any]) -> str:
        """See `Succession`."""
        return "" if self.over(results) else "every worker was asked to leave before the run was over"

    def _reach(self, step: int) -> None:
        if step > self._furthest:
            self._furthest = step
            self._fruitless.clear()

    def _name(self, place: int) -> str:
        life = self._lives[place]
        return f"{self._prefix}{place}" + (f".{life}" if life > 1 else "")

    def _apart_seconds(self, place: int) -> float:
        """Between the start of the process that has ended there, and that of the next."""
        short = self._short[place]
        return _APART.seconds(short - 2) if short > 1 else 0.0


class Joined(Replaced):
    """As `Replaced`, of one launcher among several: the others may go on without its workers, which leave when it is
    asked to end."""

    stop = STOP

    def lacking(self, results: Sequence[Any]) -> str:
        """See `Succession`."""
        return ""


class EachToItsEnd:
    """As `inner`, of workers that each have an end of their own to come to: a script goes on after its loop. Once the
    loop is over nobody is replaced any more, as nobody would hand over a state. When all for whom it is over have come
    to their ends, the others, who are frozen or came too late, are not waited for any longer."""

    def __init__(self, inner: Replaced) -> None:
        self._inner = inner
        self._past_loop: set[int] = set()  # places
        self._ending = False
        self.stop = inner.stop

    def name(self, place: int) -> str:
        """See `Succession`."""
        self._past_loop.discard(place)
        return self._inner.name(place)

    def heard(self, message: Mapping[str, Any]) -> None:
        """See `Succession`."""
        if message.get("kind") == "over":
            self._past_loop.add(message["place"])
            self._ending = True
        self._inner.heard(message)

    def began(self, place: int, pid: int) -> None:
        """See `Succession`."""
        self._inner.began(place, pid)

    def ended(self, place: int) -> None:
        """See `Succession`."""
        self._inner.ended(place)

    def returned(self, place: int, result: Any, others: int) -> Verdict:
        """See `Succession`."""
        if result is None:
            return self._inner.returned(place, result, others)
        self._ending = True
        return Verdict()

    def lost(self, what: Failure, others: int, lived_seconds: float) -> Verdict:
        """See `Succession`."""
        return Verdict(cause=what) if self._ending else self._inner.lost(what, others, lived_seconds)

    def over(self, results: Sequence[Any]) -> bool:
        """See `Succession`."""
        return bool(self._past_loop) and all(results[place] is not None for place in self._past_loop)

    def lacking(self, results: Sequence[Any]) -> str:
        """See `Succession`."""
        return self._inner.lacking(results)


def _was(reason: str) -> str:
    return f"was {reason}" if reason.startswith("killed") else reason


def _on(others: int) -> str:
    return f"{others} go on" if others > 1 else "1 goes on" if others else "nobody is left here"
