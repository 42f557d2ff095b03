"""Which box of the whole model's tensors a worker holds: arithmetic without I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """The box of a global tensor that one worker holds.

    Args:
        shape: of the whole tensor.
        offset, size: of the box, one number per dimension (a scalar: all empty tuples).
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Part:
        """All of the tensor."""
        return Part(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index the whole tensor with."""
        return tuple(slice(begin, begin + n) for begin, n in zip(self.offset, self.size))
