"""What every worker says of itself with each step, in the control word that travels with the gradients: it costs no
message, and all hear it between the same two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ControlWord(NamedTuple):
    """One worker's numbers.

    Attributes:
        stop: it was asked to stop the run: all do, after this step.
        written: what became of its share of a checkpoint, see `Checkpointer.share_status`.
        parting: the workers present change after this step.
        leaving: it was asked to go, while the others go on.
        pace: seconds that it takes for a micro-batch; 0: not known.
        digest: of its state before the step, see `Replica.digest`; 0: none was taken.
    """

    stop: float = 0.0
    written: float = 0.0
    parting: float = 0.0
    leaving: float = 0.0
    pace: float = 0.0
    digest: float = 0.0


NUMBERS = len(ControlWord._fields)  # per worker in the control word


def numbers(said: ControlWord, rank: int, size: int) -> list[float]:
    """Those of worker `rank` of `size` in their slots, and 0 in everybody else's."""
    found = [0.0] * (NUMBERS * size)
    found[NUMBERS * rank : NUMBERS * (rank + 1)] = [float(number) for number in said]
    return found


def heard(control: Sequence[float]) -> list[ControlWord]:
    """What all workers said, by rank."""
    return [ControlWord(*control[i : i + NUMBERS]) for i in range(0, len(control), NUMBERS)]
