"""The layout of the memory that peers of one host share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm import header_record as record
from unisono.comm.shared_memory.memfd import pages

HALF_BYTES = 1 << 20
"""Half of one worker's mailbox."""
RING = 64
"""The number of rounds by which a worker may be ahead of its peers."""
_BLOCK = 1 << 16  # elements that are added and converted before the next ones, so that their sum stays in the cache
_ADD_WHOLE = 2  # workers; more of them read less if each adds a slice
_LINE_WORDS = 8
_LINE_BYTES = 64


class SharedMemoryMap:
    """The layout of a channel's memory, in this order::

        broken, token                               one line of words of 8 bytes
        posted, closed | done                       two lines for each rank
        64 headers                                  for each rank
        mailbox of two halves                       for each rank

    The words of two workers are never in the same cache line.
    """

    broken, token = 0, 1

    def __init__(self, size: int) -> None:
        self.size = size
        self.posted = tuple(_LINE_WORDS * (1 + 2 * rank) for rank in range(size))
        self.closed = tuple(offset + 1 for offset in self.posted)
        self.done = tuple(offset + _LINE_WORDS for offset in self.posted)
        self._rings = _LINE_WORDS * (1 + 2 * size)
        self._slot_words = -(-record.length(size) // _LINE_WORDS) * _LINE_WORDS
        self._mail = pages((self._rings + size * RING * self._slot_words) * 8)
        self.nbytes = self._mail + size * 2 * HALF_BYTES
        # The most bytes that a worker sends to one peer in one round of `exchange`: each peer has a segment of a half.
        self.segment_bytes = HALF_BYTES // size // _LINE_BYTES * _LINE_BYTES

    def words(self, memory: Tensor) -> memoryview:
        """Flags and headers as integers of 8 bytes. Python reads one of them in 30 ns; from a tensor it takes 2 us."""
        return memory[: self._mail].view(torch.int64).numpy().data

    def slot(self, rank: int, number: int) -> int:
        """The index of the word at which the header of `rank` in round `number` begins."""
        return self._rings + (rank * RING + number % RING) * self._slot_words

    def half(self, rank: int, number: int) -> int:
        """The byte at which the mailbox half of `rank` for round `number` begins."""
        return self._mail + (2 * rank + number % 2) * HALF_BYTES


class BufferSlice:
    """One worker's part in the sum of an allocated tensor: the same slice of all workers' buffers and of the result.

    `offset` is the tensor's position within all allocations; it must be the same on all peers.
    """

    def __init__(self, buffers: Sequence[Tensor], result: Tensor, rank: int, offset: int) -> None:
        size, numel, width = len(buffers), result.numel(), buffers[0].element_size()
        line = max(1, _LINE_BYTES // width)
        step = -(-numel // (size * line)) * line
        low, high = min(rank * step, numel), min((rank + 1) * step, numel)
        parts, target = [buffer[low:high] for buffer in buffers], result[low:high]
        self._buffers, self._blocks = buffers, _blocks(parts, target)
        self._result, self._offset, self._few = result, offset, size <= _ADD_WHOLE
        # Peers read this worker's buffer except for the slice that this worker adds, and each of them reads that slice
        # of the result.
        self._bytes_read = (numel - (high - low)) * result.element_size() + (size - 1) * (high - low) * width

    def place(self, out: Tensor | None) -> int:
        """A number that is the same on all workers that take part in a sum into `out` in the same way."""
        return self._offset if out is None else -2 - self._offset

    def add_up(self, out: Tensor | None) -> None:
        """Add the buffers in the order of ranks, in their dtype, and convert the sums to the dtype of the result.

        A few workers add the whole buffers into `out`, if that is given; else each adds its slice.
        """
        _add_up(_blocks(self._buffers, out) if out is not None and self._few else self._blocks)

    def result(self, out: Tensor | None) -> Tensor:
        """The sum, once all workers have added up."""
        return self._result if out is None else out if self._few else out.copy_(self._result)

    def bytes_read(self, out: Tensor | None) -> int:
        """The bytes that peers read of this worker's."""
        others = len(self._buffers) - 1
        return others * self._buffers[0].nbytes if out is not None and self._few else self._bytes_read


_Block = tuple[Sequence[Tensor], Tensor, Tensor]
"""Tensors that are added, the memory for their sum, and where it goes."""


def _blocks(parts: Sequence[Tensor], target: Tensor) -> list[_Block]:
    if target.dtype == parts[0].dtype:
        return [(parts, target, target)]
    sums = torch.empty_like(parts[0][:_BLOCK])
    blocks = zip(zip(*(part.split(_BLOCK) for part in parts), strict=True), target.split(_BLOCK), strict=True)
    return [(added, sums[: to.numel()], to) for added, to in blocks]


def _add_up(blocks: Sequence[_Block]) -> None:
    for (first, second, *others), total, target in blocks:
        torch.add(first, second, out=total)
        for other in others:
            total.add_(other)
        if total is not target:
            target.copy_(total)
