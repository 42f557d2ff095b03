"""What lies where in the memory of peers of one host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm import header_record as record
from unisono.comm.shared_memory.memfd import pages

HALF_BYTES = 1 << 20
"""Half of one worker's mailbox."""
RING = 64
"""Headers that a worker may be ahead of its peers."""
_PIECE = 1 << 16  # numbers that are added up and converted before the next ones, so that their sum stays in the cache
_LINE_WORDS = 8
_LINE_BYTES = 64


class SharedMemoryMap:
    """The map of a lane's memory, in this order::

        broken, token                               one line of words of 8 bytes
        posted, closed | done                       two lines for each rank
        64 headers                                  for each rank
        mailbox of two halves                       for each rank

    What one worker writes shares no cache line with what another writes.
    """

    broken, token = 0, 1

    def __init__(self, size: int) -> None:
        self.size = size
        self.posted = tuple(_LINE_WORDS * (1 + 2 * rank) for rank in range(size))
        self.closed = tuple(place + 1 for place in self.posted)
        self.done = tuple(place + _LINE_WORDS for place in self.posted)
        self._rings = _LINE_WORDS * (1 + 2 * size)
        self._slot_words = -(-record.length(size) // _LINE_WORDS) * _LINE_WORDS
        self._mail = pages((self._rings + size * RING * self._slot_words) * 8)
        self.nbytes = self._mail + size * 2 * HALF_BYTES
        # What a worker sends to one peer in one round of `exchange`, where each has a part of the half.
        self.segment_bytes = HALF_BYTES // size // _LINE_BYTES * _LINE_BYTES

    def words(self, memory: Tensor) -> memoryview:
        """Flags and headers as numbers: reading one from Python costs 30 ns, from a tensor 2 us."""
        return memory[: self._mail].view(torch.int64).numpy().data

    def slot(self, rank: int, turn: int) -> int:
        """The word at which `rank`'s header of round `turn` begins."""
        return self._rings + (rank * RING + turn % RING) * self._slot_words

    def half(self, rank: int, turn: int) -> int:
        """The byte at which the half of `rank`'s mailbox begins that round `turn` uses."""
        return self._mail + (2 * rank + turn % 2) * HALF_BYTES


class BufferSlice:
    """One worker's part in the sum of an allocated tensor: a slice of everybody's buffer, and of the result.

    `place` says where in which allocation the tensor lies, so that peers can be seen to mean the same one.
    """

    def __init__(self, buffers: Sequence[Tensor], result: Tensor, rank: int, place: int) -> None:
        size, numel, width = len(buffers), result.numel(), buffers[0].element_size()
        line = max(1, _LINE_BYTES // width)
        step = -(-numel // (size * line)) * line
        low, high = min(rank * step, numel), min((rank + 1) * step, numel)
        parts, target = [buffer[low:high] for buffer in buffers], result[low:high]
        if result.dtype == buffers[0].dtype:
            self._pieces = [(parts, target, target)]
        else:
            sums = torch.empty_like(parts[0][:_PIECE])
            cut = zip(*(part.split(_PIECE) for part in parts), strict=True)
            pieces = zip(cut, target.split(_PIECE), strict=True)
            self._pieces = [(list(added), sums[: to.numel()], to) for added, to in pieces]
        self.result, self.place = result, place
        # Peers read this worker's buffer outside its own slice, and each reads the slice that this one has
        # added up.
        self.bytes_read = (numel - (high - low)) * result.element_size() + (size - 1) * (high - low) * width

    def add_up(self) -> None:
        """Add in the order of ranks, in the tensor's own dtype, and convert what comes of it to the result's."""
        for (first, second, *others), total, target in self._pieces:
            torch.add(first, second, out=total)
            for other in others:
                total.add_(other)
            if total is not target:
                target.copy_(total)
