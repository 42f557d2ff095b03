"""Which worker stores which rows of a value: arithmetic without I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LARGEST_PART_BYTES = 1 << 27
"""An answer with a part's optimizer state, of several times this size, has to fit into a message."""


@dataclass(frozen=True)
class Part:
    """Rows ``[start, stop)`` of a value, and the worker that stores them.

    Args:
        number: of the part in its value.
        shape: of the part; that of the value where it is whole.
    """

    number: int
    start: int
    stop: int
    shape: tuple[int, ...]
    whole: bool
    worker: int


class Placement:
    """Assigns values to workers in the order in which they are initialized, which is the same on all workers.

    A value of `bigarray_bound` elements or more is divided into rows of its first dimension, for all workers. Each part
    goes to the worker that stores the fewest bytes by then.
    """

    def __init__(self, workers: int, bigarray_bound: int) -> None:
        self._bound, self._loads = bigarray_bound, [0] * workers

    def place(self, shape: Sequence[int], itemsize: int) -> list[Part]:
        """The parts of a value of `shape`, whose elements have `itemsize` bytes."""
        shape, numel = tuple(shape), math.prod(shape)
        rows = shape[0] if shape else 1
        wanted = len(self._loads) if numel >= self._bound else 1
        count = max(1, min(rows, max(wanted, -(-numel * itemsize // LARGEST_PART_BYTES))))
        cuts = [rows * i // count for i in range(count + 1)]
        parts = []
        for number, (start, stop) in enumerate(pairwise(cuts)):
            worker = self._loads.index(min(self._loads))
            self._loads[worker] += numel * itemsize // count
            part_shape = shape if count == 1 else (stop - start, *shape[1:])
            parts.append(Part(number, start, stop, part_shape, count == 1, worker))
        return parts
