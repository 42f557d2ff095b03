"""What delays a step, as text: which worker has not arrived, at which line, doing what, how long, and what to do.

Nothing here has a clock: reports of members come with their age.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from unisono.observe.activity import Activity, Phase

_NAMED = 4  # workers that a text names together


class Liveness(Enum):
    """Whether a worker is alive, as far as the coordinator knows."""

    RESPONSIVE = "responsive"
    UNRESPONSIVE = "unresponsive"  # its heartbeat is overdue
    EXITED = "exited"  # its process has exited


@dataclass(frozen=True)
class MemberStatus:
    """A member of a view, as of its last report.

    Args:
        worker: the worker's name, as in its launcher's messages and its log.
        age_seconds: the time since its last report.
        activity: what it was doing then.
    """

    worker: str
    liveness: Liveness
    age_seconds: float
    activity: Activity

    @property
    def arrived(self) -> bool:
        """Whether the member has reached an operation in which it waits for others."""
        return self.liveness is Liveness.RESPONSIVE and self.activity.is_waiting

    @property
    def name(self) -> str:
        """The worker, as a sentence calls it."""
        return f"worker {self.worker}"


@dataclass(frozen=True)
class Stall:
    """A step that takes too long.

    Args:
        step: the number of the step, from 0.
        seconds: the time since the last step was done.
        usual_seconds: the usual time between two steps.
    """

    step: int
    seconds: float
    usual_seconds: float


@dataclass(frozen=True)
class Finding:
    """A cause of a stall.

    Args:
        worker: the name of the worker that causes it; empty if no single worker does.
        text: a sentence or two for a person.
    """

    worker: str
    text: str


def diagnose(stall: Stall, members: Sequence[MemberStatus]) -> list[Finding]:
    """Causes of `stall`: one for each member for which others wait."""
    absent = [member for member in members if not member.arrived]
    waiting = [member for member in members if member.arrived]
    if not absent:
        return [_all_wait(stall, waiting)]
    operation = _operation(waiting)
    late = _late(stall)
    findings = [
        Finding(member.worker, f"{late}: {_absent(member)}{operation}. {advice(member)}") for member in absent[:_NAMED]
    ]
    if len(absent) > _NAMED:
        findings.append(Finding("", f"{len(absent) - _NAMED} more workers have not arrived either"))
    return findings


def own_stall(stall: Stall, activity: Activity) -> str:
    """The cause of a stall, as seen by a worker that knows only its own activity."""
    ranks = ", ".join(map(str, activity.missing))
    have = "workers {} have" if len(activity.missing) > 1 else "worker {} has"
    missing = f", which {have.format(ranks)} not started," if ranks else ""
    waits = "Look at the logs of the workers that it waits for, and at the network."
    tip = waits if activity.is_waiting else _ADVICE[activity.phase]
    seconds = _seconds(activity.since_seconds)
    return (
        f"{_late(stall)}: this worker has been {activity.description}{missing} for {seconds}{activity.location}. {tip}"
    )


def advice(member: MemberStatus) -> str:
    """What to do about a worker that has not arrived."""
    if member.liveness is Liveness.EXITED:
        return "See its own log for the reason; if the run is elastic, the others continue without it."
    if member.liveness is Liveness.UNRESPONSIVE:
        return (
            "Its process is stopped, or lacks memory or processor time, or its host or link is down: check these; if "
            "the run is elastic, the others continue without it."
        )
    return _ADVICE[member.activity.phase]


_ADVICE = {
    Phase.START: "Look at what the task does before its first step; compiling a model takes long once.",
    Phase.COMPUTE: "Look at that line: a lock, a loop, an input far larger than others? Or at what else its host does.",
    Phase.COMMUNICATION: "Look at its network link.",
    Phase.DATA: "Look at the data set's code and the disk of its files; Processes(n) in --load loads during training.",
    Phase.CHECKPOINT: "Look at the disk of the run directory: is it full, or slow?",
    Phase.EVALUATION: "Look at the evaluation's code and data; it may simply be long: --evaluate-every.",
    Phase.RECOVERY: "It receives the state from others: look at its network link if that takes long.",
    Phase.LOST: "It repeats steps that were rolled back.",
    Phase.IDLE: "It does not train: look at its log.",
}


def _all_wait(stall: Stall, waiting: Sequence[MemberStatus]) -> Finding:
    """The finding if all members wait, and none has yet to arrive."""
    operations = Counter(member.activity.waits_for for member in waiting)
    (usual, _), *_ = operations.most_common(1)
    if len(operations) == 1:
        location = next((member.activity.location for member in waiting if member.activity.line), "")
        return Finding(
            "", f"{_late(stall)}: all {len(waiting)} workers wait for {usual or 'each other'}{location}, and "
            "nothing arrives. Look at the network between them.")  # fmt: skip
    odd = [member.worker for member in waiting if member.activity.waits_for != usual]
    named = "; ".join(
        f"{member.name} is {member.activity.description}{member.activity.location}" for member in waiting[: 2 * _NAMED]
    )
    return Finding(
        odd[0] if len(odd) == 1 and len(waiting) > 2 else "",
        f"{_late(stall)}: workers wait for different operations: {named}. One of them skipped an operation that all "
        "must start: look for a branch that depends on the worker or its data.")  # fmt: skip


def _late(stall: Stall) -> str:
    if stall.seconds <= stall.usual_seconds:  # the exit of a worker was noticed at once
        return f"step {stall.step} cannot complete"
    return f"step {stall.step} is not done after {_seconds(stall.seconds)} (usually {_seconds(stall.usual_seconds)})"


def _absent(member: MemberStatus) -> str:
    activity = member.activity
    last = f"last reported: {activity.description}{activity.location}"
    if member.liveness is Liveness.EXITED:
        return f"the process of {member.name} has exited; {last}"
    if member.liveness is Liveness.UNRESPONSIVE:
        return f"{member.name} is frozen or cut off, without a report for {_seconds(member.age_seconds)}; {last}"
    seconds = _seconds(activity.since_seconds + member.age_seconds)
    return f"{member.name} has not arrived, {activity.description} for {seconds}{activity.location}"


def _operation(waiting: Sequence[MemberStatus]) -> str:
    """The members that wait for those that have not arrived, and in which operation."""
    if not waiting:
        return ""
    (operation, _), *_ = Counter(member.activity.waits_for for member in waiting).most_common(1)
    locations = (m.activity.location for m in waiting if m.activity.waits_for == operation and m.activity.line)
    names = ", ".join(member.worker for member in waiting[:_NAMED]) + ", …" * (len(waiting) > _NAMED)
    wait = f"worker {names} waits" if len(waiting) == 1 else f"workers {names} wait"
    return f"; {wait} for it in {operation or 'a rendezvous'}{next(locations, '')}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
