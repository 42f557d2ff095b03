"""Boxes of a tensor: arithmetic without I/O."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Box:
    """A rectangular part of a tensor.

    Args:
        shape: the shape of the whole tensor.
        offset, size: the offset and size of the box, one number per dimension; empty for a scalar.

    Raises:
        ValueError: the box is not inside the tensor.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        inside = len(self.shape) == len(self.offset) == len(self.size)
        if not inside or any(o < 0 or n < 0 or o + n > s for s, o, n in zip(self.shape, self.offset, self.size)):
            raise ValueError(
                f"a box of size {list(self.size)} at offset {list(self.offset)} is not inside a tensor of shape "
                f"{list(self.shape)}"
            )

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return Box(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def is_whole(self) -> bool:
        """Whether the box is the whole tensor."""
        return self.size == self.shape

    @property
    def numel(self) -> int:
        """The number of elements in the box."""
        return math.prod(self.size)

    def __str__(self) -> str:
        """The box as Python writes slices: ``[0:2, 3:8]``."""
        return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(self.offset, self.size))}]"

    def overlap(self, other: Box) -> Box | None:
        """The box of the elements that are in both boxes; None if there are none.

        Raises:
            ValueError: they are boxes of tensors of different shapes.
        """
        if self.shape != other.shape:
            shapes = f"{list(self.shape)} and {list(other.shape)}"
            raise ValueError(f"boxes of tensors of different shapes, {shapes}, have no overlap")
        begin = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size))
        size = tuple(end - first for first, end in zip(begin, ends))
        return Box(self.shape, begin, size) if all(n > 0 for n in size) else None

    def slices(self, within: Box | None = None) -> tuple[slice, ...]:
        """The slices of this box in a tensor that has the elements of `within`; None: in the whole tensor."""
        first = within.offset if within else (0,) * len(self.offset)
        return tuple(slice(o - w, o - w + n) for o, n, w in zip(self.offset, self.size, first))

    def position(self, within: Box) -> int:
        """Offset of this box's first element in a row-major tensor that has the elements of `within`."""
        found = 0
        for offset, first, size in zip(self.offset, within.offset, within.size):
            found = found * size + offset - first
        return found

    def cut(self, axis: int, begin: int, end: int) -> Box:
        """This box, restricted to indices ``[begin, end)`` of the whole tensor along `axis`."""
        offset, size = list(self.offset), list(self.size)
        offset[axis], size[axis] = begin, end - begin
        return Box(self.shape, tuple(offset), tuple(size))

    def span(self, of: Box) -> Box:
        """The smallest box around this one that is contiguous in a row-major tensor with the elements of `of`."""
        free = next((axis for axis, size in enumerate(self.size) if size > 1), len(self.size))
        pairs = zip(of.offset[free + 1 :], of.size[free + 1 :])
        rest = tuple(zip(*pairs)) or ((), ())
        return Box(self.shape, self.offset[: free + 1] + rest[0], self.size[: free + 1] + rest[1])


def slabs(box: Box, most: int) -> Iterator[Box]:
    """`box` cut into boxes of at most `most` elements (from 1), in row-major order.

    Each of them is contiguous in a row-major tensor that has the elements of `box`.
    """
    if box.numel <= most:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.size) if size > 1)
    rows = max(1, most * box.size[axis] // box.numel)
    first, last = box.offset[axis], box.offset[axis] + box.size[axis]
    for begin in range(first, last, rows):
        yield from slabs(box.cut(axis, begin, min(begin + rows, last)), most)


def check_tiling(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Check that `boxes` tile a tensor of this shape, in time proportional to their number.

    The indicator function of a box is 1 in it and 0 elsewhere. Its mixed difference is nonzero at the corners of the
    box only, alternating between 1 and -1. Boxes tile a tensor if and only if the sum of their differences equals that
    of the tensor. If it does not, the first point with a difference, in row-major order, is in a region that two boxes
    cover, or none.

    Raises:
        ValueError: two boxes cover a region, or no box does (names the region); a box is of a tensor of another shape;
            or boxes cut the tensor along more than ``_MOST_AXES`` dimensions.
    """
    if len(boxes) == 1 and boxes[0] == Box.whole(shape):
        return
    other = next((box.shape for box in boxes if box.shape != shape), None)
    if other is not None:
        raise ValueError(f"a box of a tensor of shape {list(other)} is among boxes of a tensor of shape {list(shape)}")
    axes = [axis for axis, size in enumerate(shape) if any(box.size[axis] != size for box in boxes)]
    if len(axes) > _MOST_AXES:
        raise ValueError(
            f"boxes cut a tensor of shape {list(shape)} along {len(axes)} dimensions, more than {_MOST_AXES}"
        )
    left: Counter[tuple[int, ...]] = Counter()
    for count, box in [(-1, Box.whole(shape)), *((1, box) for box in boxes)]:
        for corner, sign in _corners(box, axes):
            left[corner] += count * sign
    wrong = min((corner for corner, count in left.items() if count), default=None)
    if wrong is None:
        return
    point = [0] * len(shape)
    for axis, at in zip(axes, wrong):
        point[axis] = at
    if left[wrong] > 0:
        covering = [box for box in boxes if all(o <= at < o + n for o, n, at in zip(box.offset, box.size, point))]
        first, second = covering[:2]
        raise ValueError(f"{first.overlap(second)} of {list(shape)} is covered twice")
    raise ValueError(f"{_free(shape, point, boxes)} of {list(shape)} is missing")


_MOST_AXES = 6


def _corners(box: Box, axes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """The corners of the box in the dimensions `axes`, with the sign of the mixed difference of its indicator function.

    The sign is 1 where an even number of the corner's coordinates are ends of the box, else -1.
    """
    ends = [(box.offset[axis], box.offset[axis] + box.size[axis]) for axis in axes]
    for which in itertools.product((0, 1), repeat=len(axes)):
        yield tuple(pair[end] for pair, end in zip(ends, which)), 1 - 2 * (sum(which) % 2)


def _free(shape: tuple[int, ...], point: Sequence[int], boxes: Sequence[Box]) -> Box:
    """A region from `point` on that no box covers, extended as far as possible, the last dimension first."""
    free = Box(shape, tuple(point), (1,) * len(shape))
    for axis in reversed(range(len(shape))):
        most = free.cut(axis, point[axis], shape[axis])
        ends = [box.offset[axis] for box in boxes if most.overlap(box)]
        free = free.cut(axis, point[axis], min(ends, default=shape[axis]))
    return free


def without(region: Box, box: Box) -> Iterator[Box]:
    """Boxes that tile the elements of `region` outside of `box`."""
    common = region.overlap(box)
    if common is None:
        yield region
        return
    for axis, (offset, size) in enumerate(zip(common.offset, common.size)):
        begin, end = region.offset[axis], region.offset[axis] + region.size[axis]
        if begin < offset:
            yield region.cut(axis, begin, offset)
        if offset + size < end:
            yield region.cut(axis, offset + size, end)
        region = region.cut(axis, offset, offset + size)
