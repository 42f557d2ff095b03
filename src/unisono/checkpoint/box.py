"""Boxes of a tensor: arithmetic without I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor.

    Args:
        shape: of the whole tensor.
        offset, size: of the box, one number per dimension (a scalar: empty tuples).

    Raises:
        ValueError: the box does not lie in the tensor.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        inside = len(self.shape) == len(self.offset) == len(self.size)
        if not inside or any(o < 0 or n < 0 or o + n > s for s, o, n in zip(self.shape, self.offset, self.size)):
            raise ValueError(f"{list(self.size)} elements at {list(self.offset)} are no box of {list(self.shape)}")

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return Box(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.size == self.shape

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.size)

    def __str__(self) -> str:
        """As Python writes slices: ``[0:2, 3:8]``."""
        return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(self.offset, self.size))}]"

    def overlap(self, other: Box) -> Box | None:
        """What lies in both; None where that is nothing.

        Raises:
            ValueError: they are boxes of tensors of different shapes.
        """
        if self.shape != other.shape:
            raise ValueError(f"boxes of {list(self.shape)} and of {list(other.shape)} have nothing in common")
        begin = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size))
        size = tuple(end - first for first, end in zip(begin, ends))
        return Box(self.shape, begin, size) if all(n > 0 for n in size) else None

    def slices(self, within: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds the box `within`, around it."""
        return tuple(slice(o - w, o - w + n) for o, n, w in zip(self.offset, self.size, within.offset))

    def position(self, within: Box) -> int:
        """How many elements precede this box's first in a row-major tensor that holds `within`."""
        found = 0
        for offset, first, size in zip(self.offset, within.offset, within.size):
            found = found * size + offset - first
        return found

    def cut(self, axis: int, begin: int, end: int) -> Box:
        """The part with indices ``[begin, end)`` of the whole tensor along `axis`."""
        offset, size = list(self.offset), list(self.size)
        offset[axis], size[axis] = begin, end - begin
        return Box(self.shape, tuple(offset), tuple(size))

    def span(self, of: Box) -> Box:
        """The smallest box around this one that is one run of a row-major tensor that holds the box `of`."""
        free = next((axis for axis, size in enumerate(self.size) if size > 1), len(self.size))
        pairs = zip(of.offset[free + 1 :], of.size[free + 1 :])
        rest = tuple(zip(*pairs)) or ((), ())
        return Box(self.shape, self.offset[: free + 1] + rest[0], self.size[: free + 1] + rest[1])


def slabs(box: Box, most: int) -> Iterator[Box]:
    """`box` cut into boxes of at most `most` elements, at least 1, in row-major order; each is one run of a row-major
    tensor that holds `box`."""
    if box.numel <= most:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.size) if size > 1)
    rows = max(1, most * box.size[axis] // box.numel)
    first, last = box.offset[axis], box.offset[axis] + box.size[axis]
    for begin in range(first, last, rows):
        yield from slabs(box.cut(axis, begin, min(begin + rows, last)), most)


def check_tiling(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Check that `boxes` make up a tensor of this shape.

    Raises:
        ValueError: names a region that two boxes hold, or that none holds.
    """
    if len(boxes) == 1 and boxes[0].is_whole:
        return
    _check_disjoint(shape, boxes)
    if sum(box.numel for box in boxes) < math.prod(shape):
        missing = [Box.whole(shape)]
        for box in boxes:
            missing = [rest for region in missing for rest in without(region, box)]
        raise ValueError(f"{missing[0]} of {list(shape)} is missing")


def _check_disjoint(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Sweep along the dimension in which boxes begin at the most places: few are open at a time."""
    axes = range(len(shape))
    axis = max(axes, key=lambda axis: len({box.offset[axis] for box in boxes}), default=None)
    begin = (lambda box: 0) if axis is None else (lambda box: box.offset[axis])
    opened: list[Box] = []
    for box in sorted(boxes, key=begin):
        if axis is not None:
            opened = [other for other in opened if begin(other) + other.size[axis] > begin(box)]
        for other in opened:
            if twice := box.overlap(other):
                raise ValueError(f"{twice} of {list(shape)} is there twice")
        opened.append(box)


def without(region: Box, box: Box) -> Iterator[Box]:
    """What of `region` is not in `box`."""
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
