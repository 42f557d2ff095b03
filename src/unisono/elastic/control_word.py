"""The control word: numbers of every worker that travel with the gradients, so that they cost no message of their own.

All workers receive it between the same two steps, and so act on it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ControlWord(NamedTuple):
    """The numbers that one worker sends.

    Attributes:
        stop: whether this worker was asked to stop the run; if so, all workers stop after this step.
        written: the status of this worker's part of a checkpoint; see `Checkpointer.share_status`.
        end_view: whether the view is to end after this step.
        leave: whether this worker was asked to leave, while the others continue.
        pace: this worker's seconds per micro-batch; 0: not known.
        digest: the digest of this worker's state before the step, see `Replica.digest`; 0: none was computed.
    """

    stop: float = 0.0
    written: float = 0.0
    end_view: float = 0.0
    leave: float = 0.0
    pace: float = 0.0
    digest: float = 0.0


NUMBERS = len(ControlWord._fields)
"""The length of the control word of one worker."""


def encode(word: ControlWord, rank: int, size: int) -> list[float]:
    """The numbers of worker `rank` in its slots, and 0 in those of the other ``size - 1`` workers."""
    numbers = [0.0] * (NUMBERS * size)
    numbers[NUMBERS * rank : NUMBERS * (rank + 1)] = [float(number) for number in word]
    return numbers


def decode(numbers: Sequence[float]) -> list[ControlWord]:
    """The control words of all workers, by rank."""
    return [ControlWord(*numbers[i : i + NUMBERS]) for i in range(0, len(numbers), NUMBERS)]
