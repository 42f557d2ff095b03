"""What holds a step up, in words: who has not arrived, where, doing what, since when, and what to do about it.

Nothing here has a clock: what members said last comes with its age.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from unisono.observe.activity import Activity, Phase

GRACE_SECONDS = 0.5  # beyond the deadline; what is over by then is not worth a line
_NAMED = 4  # workers, of those that are to be named together


class Liveness(Enum):
    """Whether a worker is there."""

    HEARD = "heard"
    SILENT = "silent"  # for longer than it ever is
    GONE = "gone"  # its process has ended


@dataclass(frozen=True)
class MemberStatus:
    """A member of a view, as last heard.

    Args:
        worker: its name, by which its launcher and its log call it.
        silent_seconds: since then.
    """

    worker: str
    presence: Liveness
    silent_seconds: float
    doing: Activity

    @property
    def arrived(self) -> bool:
        """Whether it is where all are to meet, or on its way to the next."""
        return self.presence is Liveness.HEARD and self.doing.waits

    @property
    def name(self) -> str:
        """For people."""
        return f"worker {self.worker}"


@dataclass(frozen=True)
class Stall:
    """A step that takes too long.

    Args:
        step: from 0.
        seconds: since the last one was done.
        usual_seconds: between two.
    """

    step: int
    seconds: float
    usual_seconds: float


@dataclass(frozen=True)
class Finding:
    """What holds a step up.

    Args:
        worker: whose name it is about; empty: nobody's more than the others'.
        words: a sentence or two.
    """

    worker: str
    words: str


def diagnose(stuck: Stall, members: Sequence[MemberStatus]) -> list[Finding]:
    """What holds `stuck` up: one finding for each worker that has not arrived where others wait."""
    absent = [seen for seen in members if not seen.arrived]
    waiting = [seen for seen in members if seen.arrived]
    if not absent:
        return [_all_wait(stuck, waiting)]
    where = _where(waiting)
    late = _late(stuck)
    found = [Finding(seen.worker, f"{late}: {_absent(seen)}{where}. {advice(seen)}") for seen in absent[:_NAMED]]
    if len(absent) > _NAMED:
        found.append(Finding("", f"{len(absent) - _NAMED} more workers have not arrived either"))
    return found


def of_oneself(stuck: Stall, doing: Activity) -> str:
    """What holds a worker up that knows only of itself."""
    ranks = ", ".join(map(str, doing.missing))
    missed = f", to which worker{'s' * (len(doing.missing) > 1)} {ranks} did not come," if ranks else ""
    what = "Look at the logs of those it waits for, and at the network." if doing.waits else _ADVICE[doing.phase]
    since = _seconds(doing.since_seconds)
    return f"{_late(stuck)}: this worker {doing.words}{missed} since {since}{doing.where}. {what}"


def advice(seen: MemberStatus) -> str:
    """What to do about a worker that has not arrived."""
    if seen.presence is Liveness.GONE:
        return "Its own log tells how it ended; the others go on without it where they may."
    if seen.presence is Liveness.SILENT:
        return (
            "Its process is stopped, or starved of memory or time, or its host or its link is away: see to those; the "
            "others go on without it where they may."
        )
    return _ADVICE[seen.doing.phase]


_ADVICE = {
    Phase.START: "Look at what the task does before its first step; a model that is compiled takes long once.",
    Phase.COMPUTE: "Look at that line: a lock, a loop, an input far larger than others? Or at what else its host does.",
    Phase.COMMUNICATION: "Look at its link.",
    Phase.DATA: "Look at the data set's code and where its files lie; Processes(n) in --load fetches beside training.",
    Phase.CHECKPOINT: "Look at the disk of the run's directory: is it full, or slow?",
    Phase.EVALUATION: "Look at the evaluation's code and data; it may simply be long: --evaluate-every.",
    Phase.RECOVERY: "It takes over the state from others: look at its link if that takes long.",
    Phase.LOST: "It computes again what was not kept.",
    Phase.IDLE: "It does not train: look at its log.",
}


def _all_wait(stuck: Stall, waiting: Sequence[MemberStatus]) -> Finding:
    """Everybody waits, and nothing moves."""
    places = Counter(seen.doing.waits_for for seen in waiting)
    (usual, _), *_ = places.most_common(1)
    if len(places) == 1:
        where = next((seen.doing.where for seen in waiting if seen.doing.line), "")
        return Finding(
            "", f"{_late(stuck)}: all {len(waiting)} workers wait for {usual or 'each other'}{where}, and nothing "
            "arrives. Look at the network between them.")  # fmt: skip
    odd = [seen.worker for seen in waiting if seen.doing.waits_for != usual]
    told = "; ".join(f"{seen.name} {seen.doing.words}{seen.doing.where}" for seen in waiting[: 2 * _NAMED])
    return Finding(
        odd[0] if len(odd) == 1 and len(waiting) > 2 else "",
        f"{_late(stuck)}: workers wait for different things: {told}. One of them left out what all have to do: look "
        "for a branch that depends on the worker or its data.")  # fmt: skip


def _late(stuck: Stall) -> str:
    if stuck.seconds <= stuck.usual_seconds:  # somebody's end was seen at once
        return f"step {stuck.step} cannot be done"
    return f"step {stuck.step} is not done after {_seconds(stuck.seconds)} (usually {_seconds(stuck.usual_seconds)})"


def _absent(seen: MemberStatus) -> str:
    doing = seen.doing
    last = f"when last heard of, it {doing.words}{doing.where}"
    if seen.presence is Liveness.GONE:
        return f"{seen.name} is gone, its process has ended; {last}"
    if seen.presence is Liveness.SILENT:
        return f"{seen.name} is frozen or cut off, nothing was heard of it for {_seconds(seen.silent_seconds)}; {last}"
    since = _seconds(doing.since_seconds + seen.silent_seconds)
    return f"{seen.name} has not arrived, it {doing.words} since {since}{doing.where}"


def _where(waiting: Sequence[MemberStatus]) -> str:
    """Who waits for those that have not arrived, and in what."""
    if not waiting:
        return ""
    (operation, _), *_ = Counter(seen.doing.waits_for for seen in waiting).most_common(1)
    line = next((seen.doing.where for seen in waiting if seen.doing.waits_for == operation and seen.doing.line), "")
    names = ", ".join(seen.worker for seen in waiting[:_NAMED]) + ", …" * (len(waiting) > _NAMED)
    who = f"worker {names} waits" if len(waiting) == 1 else f"workers {names} wait"
    return f"; {who} for it in {operation or 'a meeting'}{line}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
