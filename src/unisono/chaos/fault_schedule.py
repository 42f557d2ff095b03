"""Which faults are injected into a run, and when: arithmetic on a seed, for virtual and real runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

_EARLIEST, _LATEST = 0.05, 0.8  # the part of a run in which faults begin, so that their effects fall within the run
_LATEST_JOIN = 0.4  # a later worker would join after the end
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 3.0  # durations of temporary faults


class FaultKind(Enum):
    """Kinds of faults."""

    KILL = "kill"
    FREEZE = "freeze"
    PARTITION = "partition"
    JOIN = "join"
    DRAIN = "drain"
    COORDINATOR = "coordinator"


class Moment(Enum):
    """The activity of the run during which a fault is injected."""

    ANY = ""
    SAVING = "while a checkpoint is written"
    GIVING = "while it hands state over"
    TAKING = "while it is given state"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        after: the share of the run's steps, 0 to 1, after which the fault is injected.
        moment: the activity of the run for which the fault then waits.
        whom: 0 to 1; selects one of the possible victims.
        seconds: the duration of a temporary fault; for a permanent fault, the time until a replacement starts.
    """

    kind: FaultKind
    after: float
    moment: Moment = Moment.ANY
    whom: float = 0.0
    seconds: float = 1.0


@dataclass(frozen=True)
class FaultSchedule:
    """The faults of one run, in the order in which they are injected.

    Args:
        seed: determines the schedule, together with the wanted number of faults of each kind.
    """

    seed: int
    faults: tuple[Fault, ...]

    def count(self, kind: FaultKind) -> int:
        """The number of faults of this `kind`."""
        return sum(fault.kind is kind for fault in self.faults)


_AIMS = (Moment.SAVING, Moment.TAKING, Moment.GIVING, Moment.ANY)  # the moments of kills, used in turn


def draw(seed: int, wanted: Mapping[FaultKind, int]) -> FaultSchedule:
    """A schedule with the wanted number of faults of each kind."""
    chance = random.Random(f"chaos {seed}")
    found = [_drawn(chance, kind, number) for kind in FaultKind for number in range(wanted.get(kind, 0))]
    return FaultSchedule(seed, tuple(sorted(found, key=lambda fault: fault.after)))


def _drawn(chance: random.Random, kind: FaultKind, number: int) -> Fault:
    after = chance.uniform(_EARLIEST, _LATEST_JOIN if kind is FaultKind.JOIN else _LATEST)
    aim = _AIMS[number % len(_AIMS)] if kind is FaultKind.KILL else Moment.ANY
    return Fault(kind, after, aim, chance.random(), chance.uniform(_LEAST_SECONDS, _MOST_SECONDS))


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, as far as the selection of victims needs it. Workers are given by name.

    Args:
        share: the share of the run's steps that is taken, 0 to 1.
        saving: whether a checkpoint is being written.
        trainable: workers that have the state of the current view, and are reachable.
        senders: the trainable workers that send their state to others.
        receivers: the workers that receive this state.
        cuttable: the trainable workers whose link can be cut.
    """

    share: float
    saving: bool = False
    trainable: tuple[str, ...] = ()
    senders: tuple[str, ...] = ()
    receivers: tuple[str, ...] = ()
    cuttable: tuple[str, ...] = ()


_WAITED = 0.2  # share of the run for which a fault waits for its activity


@dataclass(frozen=True)
class Strike:
    """A fault that is to be injected now.

    Args:
        victim: the name of the worker to hit; empty if the fault hits no worker.
        moment: the activity of the run now, or `Moment.ANY` if the fault has stopped waiting for one.
    """

    fault: Fault
    victim: str
    moment: Moment


class Pending:
    """The faults of a schedule that are not yet injected.

    At least one reachable worker with the newest state always remains, as a run cannot survive the loss of all of them.
    A fault that would hit the last of them waits.
    """

    def __init__(self, schedule: FaultSchedule) -> None:
        self.faults: Sequence[Fault] = schedule.faults

    def due(self, status: RunStatus) -> Iterator[Strike]:
        """Yield the faults to be injected now; at most one hits a worker, as `status` is outdated after that."""
        for fault in [fault for fault in self.faults if fault.after <= status.share]:
            strike = aim(fault, status)
            if strike is None:
                continue
            self.faults = [other for other in self.faults if other is not fault]
            yield strike
            if strike.victim:
                return


def aim(fault: Fault, status: RunStatus) -> Strike | None:
    """`fault` with its victim; None if the fault must wait."""
    if fault.kind in (FaultKind.JOIN, FaultKind.COORDINATOR):
        return Strike(fault, "", Moment.ANY)
    moment = fault.moment if status.share < fault.after + _WAITED else Moment.ANY
    targets = _targets(fault.kind, moment, status)
    hit = [worker for worker in targets if set(status.trainable) - {worker}]
    return Strike(fault, hit[int(fault.whom * len(hit))], moment) if hit else None


def _targets(kind: FaultKind, moment: Moment, status: RunStatus) -> Sequence[str]:
    if kind is FaultKind.PARTITION:
        return status.cuttable
    if moment is Moment.SAVING:
        return status.trainable if status.saving else ()
    if moment is Moment.GIVING:
        return status.senders if status.receivers else ()
    return status.receivers if moment is Moment.TAKING else status.trainable
