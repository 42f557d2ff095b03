"""What a worker is doing, as its agent, the coordinator and its log describe it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from unisono.system.bounds import PRINTABLE, STRICT, Bounds, Count, Seconds

MAX_TEXT_CHARACTERS = 300
MAX_MISSING = 16  # ranks that an activity names as missing
Text = Annotated[str, Bounds(max_length=MAX_TEXT_CHARACTERS, pattern=PRINTABLE)]


class Phase(Enum):
    """What a worker spends its time on; at every moment, exactly one phase."""

    START = "start"  # until the first step: imports, the model, the data set, the first rendezvous
    COMPUTE = "compute"
    COMMUNICATION = "communication"  # not overlapped with computation: the worker waits for others
    DATA = "data"  # the worker waits for its next batch
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    RECOVERY = "recovery"  # after a view has ended: rendezvous and state transfer
    LOST = "lost work"  # spent on steps that were rolled back
    IDLE = "idle"

    __hash__ = object.__hash__  # members are unique; Enum's own hash is slow, and phases are looked up in every step


@dataclass(frozen=True)
class Activity:
    """What one worker is doing at a moment.

    Args:
        step: the current step, from 0.
        micro_batch: the micro-batch of this step that began last; -1: none yet.
        since_seconds: time spent in `phase` so far.
        waits_for: the operation that the worker waits for; empty: none.
        missing: ranks that have not started this operation, where that is known.
        line: the innermost line of user code that the worker is on; empty: there is none, or the worker has entered
            `phase` only a moment ago.
    """

    phase: Phase
    step: Count = 0
    micro_batch: Annotated[int, Bounds(ge=-1, lt=1 << 62)] = -1
    since_seconds: Seconds = 0.0
    waits_for: Text = ""
    missing: Annotated[tuple[Count, ...], Bounds(max_length=MAX_MISSING)] = ()
    line: Text = ""

    __pydantic_config__ = STRICT

    @property
    def is_waiting(self) -> bool:
        """Whether the worker waits for other workers."""
        return bool(self.waits_for) or self.phase is Phase.COMMUNICATION

    @property
    def description(self) -> str:
        """The activity as text: ``computing``, ``waiting for sum (gradients, message 12)``."""
        return f"waiting for {self.waits_for or 'others'}" if self.is_waiting else _DESCRIPTIONS[self.phase]

    @property
    def location(self) -> str:
        """The line as text, `` at file.py:12 function``; empty without a line."""
        return f" at {self.line}" if self.line else ""


_DESCRIPTIONS = {
    Phase.START: "starting",
    Phase.COMPUTE: "computing",
    Phase.COMMUNICATION: "waiting for others",
    Phase.DATA: "waiting for data",
    Phase.CHECKPOINT: "writing a checkpoint",
    Phase.EVALUATION: "evaluating",
    Phase.RECOVERY: "receiving the state",
    Phase.LOST: "repeating lost steps",
    Phase.IDLE: "idle",
}
