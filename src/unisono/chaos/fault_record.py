"""Records of injected faults, for tables and files."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.chaos.fault_schedule import Fault, FaultKind, Moment, Strike

_WHAT = {
    FaultKind.KILL: "worker {victim} was killed",
    FaultKind.FREEZE: "worker {victim} was frozen for {seconds:.1f} s",
    FaultKind.PARTITION: "the link of worker {victim} was cut for {seconds:.1f} s",
    FaultKind.JOIN: "another worker was started",
    FaultKind.DRAIN: "worker {victim} was asked to leave",
    FaultKind.COORDINATOR: "the coordinator was killed",
}


@dataclass(frozen=True)
class FaultRecord:
    """One injected fault.

    Args:
        at_seconds: when the fault was injected, in seconds since the start of the run.
        step: the number of steps taken before the fault.
        kind: the kind of the fault.
        moment: the activity of the run during which the fault was injected.
        victim: the name of the worker that was hit; empty if the fault hits no worker.
        words: the fault as a sentence.
    """

    at_seconds: float
    step: int
    kind: FaultKind
    moment: Moment
    victim: str
    words: str

    @staticmethod
    def of(strike: Strike, at_seconds: float, step: int, more: str = "") -> FaultRecord:
        """The record of `strike`; the text `more` is appended to the sentence."""
        what = _describe(strike.fault, strike.victim)
        when = f" {strike.moment.value}" if strike.moment.value else ""
        words = f"{what}{when}" + (f": {more}" if more else "")
        return FaultRecord(at_seconds, step, strike.fault.kind, strike.moment, strike.victim, words)


def _describe(fault: Fault, victim: str) -> str:
    return _WHAT[fault.kind].format(victim=victim, seconds=fault.seconds)
