"""What a worker is doing, in the words that it has for itself, its coordinator and its log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LONGEST_WORDS = 300  # characters of what a worker says of one thing
MOST_MISSING = 16  # workers that one names as missing


class Phase(Enum):
    """What a moment of a worker's life goes into; always exactly one."""

    START = "start"  # until the first step: imports, the model, the data set, meeting the others
    COMPUTE = "compute"
    COMMUNICATION = "communication"  # that nothing else goes on beside: it waits for others
    DATA = "data"  # it waits for its next batch
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    RECOVERY = "recovery"  # after a view has ended: meeting again, taking over state
    LOST = "lost work"  # spent on steps that were not kept
    IDLE = "idle"

    __hash__ = object.__hash__  # there is one of each; Enum's own is slow, and phases are looked up in every step


@dataclass(frozen=True)
class Activity:
    """What one worker is doing at a moment.

    Args:
        step: that it is in, from 0.
        micro_batch: that it computed last in it; -1: none yet.
        since_seconds: how long it has been in `phase`.
        waits_for: the operation that it waits for; empty: it waits for none.
        missing: workers that have not come to it, where that can be told.
        line: the innermost line of the user's own code that it is on; empty: it is on none, or has been in
            `phase` for a moment only.
    """

    phase: Phase = Phase.START
    step: int = 0
    micro_batch: int = -1
    since_seconds: float = 0.0
    waits_for: str = ""
    missing: tuple[int, ...] = ()
    line: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is for others to go on."""
        return bool(self.waits_for) or self.phase is Phase.COMMUNICATION

    @property
    def words(self) -> str:
        """``computes``, ``waits for sum (gradients, message 12)``."""
        return f"waits for {self.waits_for or 'others'}" if self.waits else _WORDS[self.phase]

    @property
    def where(self) -> str:
        """`` at file.py:12 function``, or nothing."""
        return f" at {self.line}" if self.line else ""


_WORDS = {
    Phase.START: "gets ready",
    Phase.COMPUTE: "computes",
    Phase.COMMUNICATION: "waits for others",
    Phase.DATA: "waits for its data",
    Phase.CHECKPOINT: "writes a checkpoint",
    Phase.EVALUATION: "evaluates",
    Phase.RECOVERY: "takes over the state",
    Phase.LOST: "computes again",
    Phase.IDLE: "is idle",
}
