"""Which faults befall a run, and when: arithmetic on a seed, for made-up runs and for real ones alike."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

_EARLIEST, _LATEST = 0.05, 0.8  # share of a run in which faults begin, so that they have time to do harm
_LATEST_JOIN = 0.4  # who comes later meets nobody
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 3.0  # that something that passes lasts


class FaultKind(Enum):
    """What befalls a run."""

    KILL = "kill"
    FREEZE = "freeze"
    PARTITION = "partition"
    JOIN = "join"
    DRAIN = "drain"
    COORDINATOR = "coordinator"


class Moment(Enum):
    """What the run is to be doing just then."""

    ANY = ""
    SAVING = "while a checkpoint is written"
    GIVING = "while it hands state over"
    TAKING = "while it is given state"


@dataclass(frozen=True)
class Fault:
    """One of them.

    Args:
        after: share of the run's steps that are done by then, 0 to 1.
        whom: 0 to 1; picks among those that may be hit.
        seconds: how long it lasts, where it passes; else until whoever takes the victim's place is started.
    """

    kind: FaultKind
    after: float
    moment: Moment = Moment.ANY
    whom: float = 0.0
    seconds: float = 1.0


@dataclass(frozen=True)
class FaultSchedule:
    """What befalls one run, in order.

    Args:
        seed: of which all of it follows, together with how many faults of each kind were wanted.
    """

    seed: int
    faults: tuple[Fault, ...]

    def count(self, kind: FaultKind) -> int:
        """How many there are of that kind."""
        return sum(fault.kind is kind for fault in self.faults)


_AIMS = (Moment.SAVING, Moment.TAKING, Moment.GIVING, Moment.ANY)  # of the first kills, then again from the first


def draw(seed: int, wanted: Mapping[FaultKind, int]) -> FaultSchedule:
    """A schedule with so many faults of each kind."""
    chance = random.Random(f"chaos {seed}")
    found = [_drawn(chance, kind, number) for kind in FaultKind for number in range(wanted.get(kind, 0))]
    return FaultSchedule(seed, tuple(sorted(found, key=lambda fault: fault.after)))


def _drawn(chance: random.Random, kind: FaultKind, number: int) -> Fault:
    after = chance.uniform(_EARLIEST, _LATEST_JOIN if kind is FaultKind.JOIN else _LATEST)
    aim = _AIMS[number % len(_AIMS)] if kind is FaultKind.KILL else Moment.ANY
    return Fault(kind, after, aim, chance.random(), chance.uniform(_LEAST_SECONDS, _MOST_SECONDS))


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment, as far as faults are concerned. Workers by name.

    Args:
        share: of its steps that are done, 0 to 1.
        saving: whether a checkpoint is being written.
        able: those that train together now, and can be heard.
        givers: of them, those whose state others are being given.
        takers: those others.
        apart: of the able ones, those whose link can be cut.
    """

    share: float
    saving: bool = False
    trainable: tuple[str, ...] = ()
    senders: tuple[str, ...] = ()
    receivers: tuple[str, ...] = ()
    cuttable: tuple[str, ...] = ()


_WAITED = 0.2  # share of the run for which a fault waits for its moment


@dataclass(frozen=True)
class Strike:
    """A fault whose moment has come.

    Args:
        victim: the worker's name; empty where it is none.
        moment: that there really was.
    """

    fault: Fault
    victim: str
    moment: Moment


class Pending:
    """The faults of a schedule that have not come yet.

    At least one worker is always left that can be heard and has all that was done, since nothing could survive the end
    of all; a fault that would hit the last one waits.
    """

    def __init__(self, schedule: FaultSchedule) -> None:
        self.faults: Sequence[Fault] = schedule.faults

    def due(self, seen: RunStatus) -> Iterator[Strike]:
        """Those whose moment this is: at most one that takes somebody away, as it is another moment then."""
        for fault in [fault for fault in self.faults if fault.after <= seen.share]:
            found = aim(fault, seen)
            if found is None:
                continue
            self.faults = [other for other in self.faults if other is not fault]
            yield found
            if found.victim:
                return


def aim(fault: Fault, seen: RunStatus) -> Strike | None:
    """Whom `fault` hits, if this is its moment."""
    if fault.kind in (FaultKind.JOIN, FaultKind.COORDINATOR):
        return Strike(fault, "", Moment.ANY)
    moment = fault.moment if seen.share < fault.after + _WAITED else Moment.ANY
    targets = _targets(fault.kind, moment, seen)
    hit = [worker for worker in targets if set(seen.trainable) - {worker}]
    return Strike(fault, hit[int(fault.whom * len(hit))], moment) if hit else None


def _targets(kind: FaultKind, moment: Moment, seen: RunStatus) -> Sequence[str]:
    if kind is FaultKind.PARTITION:
        return seen.cuttable
    if moment is Moment.SAVING:
        return seen.trainable if seen.saving else ()
    if moment is Moment.GIVING:
        return seen.senders if seen.receivers else ()
    return seen.receivers if moment is Moment.TAKING else seen.trainable
