"""The control word: numbers of every worker that travel with the gradients, so that they cost no message of their own.

All workers receive it between the same two steps, and so act on it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ControlWord(NamedTuple):
    """The numbers of one worker.

    Attributes:
        stop: this worker was asked to stop the run. All workers stop after this step.
        written: status of its share of a checkpoint, see `Checkpointer.share_status`.
        end_view: the view is to end after this step.
        leave: this worker was asked to leave, while the others continue.
        pace: its seconds per micro-batch; 0: not known.
        digest: of its state before the step, see `Replica.digest`; 0: none was taken.
    """

    stop: float = 0.0
    written: float = 0.0
    end_view: float = 0.0
    leave: float = 0.0
    pace: float = 0.0
    digest: float = 0.0


NUMBERS = len(ControlWord._fields)
"""Numbers per worker."""


def encode(word: ControlWord, rank: int, size: int) -> list[float]:
    """The numbers of worker `rank` in its slots, and 0 in those of the other ``size - 1`` workers."""
    numbers = [0.0] * (NUMBERS * size)
    numbers[NUMBERS * rank : NUMBERS * (rank + 1)] = [float(number) for number in word]
    return numbers


def decode(numbers: Sequence[float]) -> list[ControlWord]:
    """The words of all workers, by rank."""
    return [ControlWord(*numbers[i : i + NUMBERS]) for i in range(0, len(numbers), NUMBERS)]
