"""What the end of one worker's process means for the others: for most runs the end, for some only another process."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

from unisono.errors import RunFailed
from unisono.launch.failure import Failure
from unisono.launch.stop_request import STOP, STOP_ALL
from unisono.membership.protocol import StepCount
from unisono.system.backoff import Backoff

_IN_ONE_PLACE = 3  # processes that may die there in a row without a step between them
_IN_VAIN = 10  # processes that may die there in a row, where steps were taken between them, but none beyond before
_APART = Backoff(first_seconds=1.0, factor=2.0, longest_seconds=60.0)
_SETTLED_SECONDS = 30.0  # whoever lived as long did not die of its start


@dataclass(frozen=True)
class RestartVerdict:
    """What is done about a worker that has ended.

    Args:
        words: for people; empty says nothing.
        cause: the run has failed, for this reason.
        another_in_seconds: another process takes its place then.
    """

    words: str = ""
    cause: Failure | None = None
    another_in_seconds: float | None = None


class RestartPolicy(Protocol):
    """Decides for all workers of a launcher, which it knows by their places, 0, 1, ..."""

    stop: signal.Signals
    """Asks a worker to come to a step boundary and return."""

    def name(self, place: int) -> str:
        """Of the process that is about to be started there."""

    def heard(self, message: Mapping[str, Any]) -> RestartVerdict:
        """A worker reported it."""

    def began(self, place: int, pid: int) -> None:
        """The process there is running."""

    def ended(self, place: int) -> None:
        """The process there is no more, for whatever reason."""

    def returned(self, place: int, result: Any, others: int) -> RestartVerdict:
        """It was done, and came to `result`; of `others` there are processes yet."""

    def lost(self, what: Failure, others: int, lived_seconds: float) -> RestartVerdict:
        """It died while the run went on."""

    def over(self, results: Sequence[Any]) -> bool:
        """Whether `results` are all that the run was for."""

    def lacking(self, results: Sequence[Any]) -> str:
        """All have ended, and none failed: why `results` are none of a run all the same.

        Raises:
            RunFailed: others go on with what a worker has left.
        """


class NoRestart:
    """All begin, none is replaced, and every one is needed to the end."""

    stop = STOP

    def name(self, place: int) -> str:
        """See `RestartPolicy`."""
        return ""

    def heard(self, message: Mapping[str, Any]) -> RestartVerdict:
        """See `RestartPolicy`."""
        return RestartVerdict()

    def began(self, place: int, pid: int) -> None:
        """See `RestartPolicy`."""

    def ended(self, place: int) -> None:
        """See `RestartPolicy`."""

    def returned(self, place: int, result: Any, others: int) -> RestartVerdict:
        """See `RestartPolicy`."""
        return RestartVerdict()

    def lost(self, what: Failure, others: int, lived_seconds: float) -> RestartVerdict:
        """See `RestartPolicy`."""
        return RestartVerdict(cause=what)

    def over(self, results: Sequence[Any]) -> bool:
        """See `RestartPolicy`."""
        return False

    def lacking(self, results: Sequence[Any]) -> str:
        """See `RestartPolicy`."""
        return ""


class Present(Protocol):
    """Is told of processes, by the names of their workers.

    Attributes:
        count: of the steps of all workers of the run, of this launcher or another one, as far as is known.
    """

    @property
    def count(self) -> StepCount: ...
    def latest(self) -> StepCount:
        """As `count`, asked for now, which takes a while: who has survived a loss has said by then what it has done."""

    def goes_on(self, without: Set[str]) -> bool:
        """Whether others take a step without these workers, which have ended; takes a while."""

    def began(self, worker: str, pid: int) -> None: ...
    def ended(self, worker: str) -> None: ...


class RestartFailed:
    """Whoever dies is replaced, as long as that is of use; whoever returns None has left; the first other result ends
    the run.

    A run fails, and says why, when three processes in one place, or twice as many as there are places, died in a row
    without a step between them, be it one that a worker took by itself, or one that was lost again. Where all steps
    were lost again, ten in one place are the limit.

    Where others take steps meanwhile, processes follow each other in a place more slowly each time: the third is
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
        self._count = StepCount()
        self._without_step: list[Failure] = []  # since the last step
        self._in_vain: list[Failure] = []  # since a step beyond all before

    def name(self, place: int) -> str:
        """See `RestartPolicy`."""
        self._lives[place] += 1
        return self._name(place)

    def heard(self, message: Mapping[str, Any]) -> RestartVerdict:
        """See `RestartPolicy`."""
        if message.get("kind") == "step":
            self._without_step.clear()
        return RestartVerdict()

    def began(self, place: int, pid: int) -> None:
        """See `RestartPolicy`."""
        self._present.began(self._name(place), pid)

    def ended(self, place: int) -> None:
        """See `RestartPolicy`."""
        self._present.ended(self._name(place))

    def goes_on(self, without: Set[str]) -> bool:
        """See `Present`."""
        return self._present.goes_on(without)

    def returned(self, place: int, result: Any, others: int) -> RestartVerdict:
        """See `RestartPolicy`."""
        return RestartVerdict(f"worker {self._name(place)} has left: {_on(others)}")

    def lost(self, what: Failure, others: int, lived_seconds: float) -> RestartVerdict:
        """See `RestartPolicy`."""
        if what.unlike:
            return self._refused(what, others)
        self._look(self._present.count)
        self._without_step.append(what)
        self._in_vain.append(what)
        self._short[what.rank] = self._short[what.rank] + 1 if lived_seconds < _SETTLED_SECONDS else 0
        if cause := self._given_up(what):
            return RestartVerdict(cause=cause)
        pause = round(max(0.0, self._apart_seconds(what.rank) - lived_seconds), 1)
        said = f"worker {self._name(what.rank)} {_was(what.reason)}: {_on(others)}, another one is started"
        return RestartVerdict(said + (f" in {pause:g} s" if pause else ""), another_in_seconds=pause)

    def over(self, results: Sequence[Any]) -> bool:
        """See `RestartPolicy`."""
        return any(result is not None for result in results)

    def lacking(self, results: Sequence[Any]) -> str:
        """See `RestartPolicy`."""
        return "" if self.over(results) else "every worker was asked to leave before the run was over"

    def _refused(self, what: Failure, others: int) -> RestartVerdict:
        """A replacement found other files than its predecessor, on which the others may still depend."""
        if self._lives[what.rank] == 1 or not others:
            return RestartVerdict(cause=what)
        return RestartVerdict(
            f"worker {self._name(what.rank)} cannot take part, {_on(others)} without it: {what.error()}"
        )

    def _look(self, count: StepCount) -> None:
        if count.taken > self._count.taken:
            self._without_step.clear()
        if count.furthest > self._count.furthest:
            self._in_vain.clear()
        self._count = StepCount(count.taken, max(count.furthest, self._count.furthest))

    def _given_up(self, what: Failure) -> Failure | None:
        """Why nobody takes the place of what has died; None if somebody does."""
        found = self._exceeded(what.rank)
        if found is None:
            return None
        self._look(self._present.latest())  # what was known may be some seconds old
        return self._exceeded(what.rank)

    def _exceeded(self, place: int) -> Failure | None:
        """Of the deaths that are more than a limit allows, the first, with the limit in words."""
        here, in_all = _of(place, self._without_step), max(2 * self._places, _IN_ONE_PLACE)
        if len(here) >= _IN_ONE_PLACE:
            return _first(here, f"of worker {place} were lost in a row {WITHOUT_STEP}")
        if len(self._without_step) >= in_all:
            return _first(self._without_step, f"of {self._places} workers were lost in a row {WITHOUT_STEP}")
        if len(here := _of(place, self._in_vain)) >= _IN_VAIN:
            return _first(here, f"of worker {place} were lost in a row with no step beyond step {self._count.furthest}")
        return None

    def _name(self, place: int) -> str:
        life = self._lives[place]
        return f"{self._prefix}{place}" + (f".{life}" if life > 1 else "")

    def _apart_seconds(self, place: int) -> float:
        """Between the start of the process that has ended there, and that of the next."""
        short = self._short[place]
        return _APART.seconds(short - 2) if short > 1 else 0.0


class JoinedLauncher(RestartFailed):
    """As `RestartFailed`, of one launcher among several: the others may go on without its workers, which leave when it
    is asked to end."""

    stop = STOP

    def lacking(self, results: Sequence[Any]) -> str:
        """See `RestartPolicy`."""
        return ""


class IndependentExit:
    """As `inner`, of workers that each have an end of their own to come to: a script goes on after its loop. Once the
    loop is over nobody is replaced any more, as nobody would hand over a state. When all for whom it is over have come
    to their ends, the others, who are frozen or came too late, are not waited for any longer. A script that ends inside
    the loop ends it for all: the run fails if the others take a step without that worker.

    Args:
        together: places whose first processes meet before the loop: as long as one of them has yet to come to the loop,
            all others are needed, and cannot be replaced.
    """

    def __init__(self, inner: RestartFailed, together: Iterable[int] = ()) -> None:
        self._inner = inner
        self._before_loop = set(together)
        self._in_loop: set[int] = set()
        self._past_loop: set[int] = set()
        self._ended_in_loop: dict[int, str] = {}  # how
        self._names: dict[int, str] = {}
        self._ours: set[str] = set()  # all names so far
        self._ending = False
        self.stop = inner.stop

    def name(self, place: int) -> str:
        """See `RestartPolicy`."""
        for places in (self._in_loop, self._past_loop):
            places.discard(place)
        self._names[place] = self._inner.name(place)
        self._ours.add(self._names[place])
        return self._names[place]

    def heard(self, message: Mapping[str, Any]) -> RestartVerdict:
        """See `RestartPolicy`."""
        match message.get("kind"):
            case "loop":
                self._before_loop.discard(message["place"])
                self._in_loop.add(message["place"])
            case "over":
                self._in_loop.discard(message["place"])
                self._past_loop.add(message["place"])
                self._ending = True
            case "ended" if message["place"] in self._in_loop:
                self._ended_in_loop[message["place"]] = message["text"]
            case "step" if cause := self._deserted(message["members"]):
                return RestartVerdict(cause=cause)
        return self._inner.heard(message)

    def began(self, place: int, pid: int) -> None:
        """See `RestartPolicy`."""
        self._inner.began(place, pid)

    def ended(self, place: int) -> None:
        """See `RestartPolicy`."""
        self._inner.ended(place)

    def returned(self, place: int, result: Any, others: int) -> RestartVerdict:
        """See `RestartPolicy`."""
        if result is None:
            return self._inner.returned(place, result, others)
        self._ending = True
        return RestartVerdict()

    def lost(self, what: Failure, others: int, lived_seconds: float) -> RestartVerdict:
        """See `RestartPolicy`."""
        if self._ending:
            return RestartVerdict(cause=replace(what, reason=f"{what.reason}, {AFTER_LOOP}"))
        needed = what.rank in self._before_loop and len(self._before_loop) > 1
        self._before_loop.discard(what.rank)
        if needed:
            return RestartVerdict(cause=replace(what, reason=f"{what.reason}, {BEFORE_LOOP}"))
        return self._inner.lost(what, others, lived_seconds)

    def over(self, results: Sequence[Any]) -> bool:
        """See `RestartPolicy`."""
        return bool(self._past_loop) and all(results[place] is not None for place in self._past_loop)

    def lacking(self, results: Sequence[Any]) -> str:
        """See `RestartPolicy`."""
        if self._ended_in_loop and not self._past_loop and self._inner.goes_on(self._ours):
            place, how = next(iter(self._ended_in_loop.items()))
            raise RunFailed(self._deserter(place, how))
        return self._inner.lacking(results)

    def _deserted(self, members: Sequence[str]) -> Failure | None:
        """Why a step that `members` took fails the run: a script ended inside the loop, which others go on with."""
        for place, how in self._ended_in_loop.items():
            if self._names[place] not in members:
                words = self._deserter(place, how)
                return Failure(place, time.monotonic(), words, said=("RunFailed", [words]))
        return None

    def _deserter(self, place: int, how: str) -> str:
        return f"worker {self._names[place]}: {how}, {IN_LOOP}"


WITHOUT_STEP = "without a step in between"
BEFORE_LOOP = "before its loop over world.steps began: only in there a lost worker is replaced"
IN_LOOP = "inside its loop over world.steps, which the others went on with"
AFTER_LOOP = "when the loop over world.steps was over: nobody is replaced any more"


def _of(place: int, failures: Sequence[Failure]) -> list[Failure]:
    return [each for each in failures if each.rank == place]


def _first(failures: Sequence[Failure], words: str) -> Failure:
    """Of as many as the limit is, which is said in words."""
    first = failures[0]
    return replace(first, reason=f"{first.reason}; {len(failures)} processes {words} (the limit is {len(failures)})")


def _was(reason: str) -> str:
    return f"was {reason}" if reason.startswith("killed") else reason


def _on(others: int) -> str:
    return f"{others} go on" if others > 1 else "1 goes on" if others else "nobody is left here"
