"""Which box of the whole model's tensors a worker holds: arithmetic without I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """The box of a global tensor that one worker holds.

    Args:
        name: global name.
        shape: of the whole tensor.
        offset, size: of the box, one number per dimension (a scalar: all empty tuples).

    Raises:
        ValueError: the box does not lie in the tensor.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        inside = len(self.shape) == len(self.offset) == len(self.size)
        if not inside or any(o < 0 or n < 0 or o + n > s for s, o, n in zip(self.shape, self.offset, self.size)):
            raise ValueError(f"{self.name}: {list(self.size)} at {list(self.offset)} is no box of {list(self.shape)}")

    @staticmethod
    def whole(name: str, shape: tuple[int, ...]) -> Part:
        """All of the tensor."""
        return Part(name, tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.size == self.shape

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index the whole tensor with."""
        return tuple(slice(begin, begin + n) for begin, n in zip(self.offset, self.size))

    def overlap(self, other: Part) -> Part | None:
        """What both hold of the same tensor; None where that is nothing.

        Raises:
            ValueError: they are parts of different tensors.
        """
        if (self.name, self.shape) != (other.name, other.shape):
            raise ValueError(f"{self.name} {list(self.shape)} and {other.name} {list(other.shape)} are not one tensor")
        begin = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size))
        size = tuple(end - first for first, end in zip(begin, ends))
        return Part(self.name, self.shape, begin, size) if all(n > 0 for n in size) else None
