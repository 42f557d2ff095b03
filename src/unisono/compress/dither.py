"""Random numbers for stochastic rounding, from a generator of our own: the same run rounds the same way."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from unisono.compress.memory import CompressorMemory

PERIOD = 1 << 17  # drawing costs more than all other arithmetic, so that one draw serves many numbers
_SHIFTS = 4096
_SHIFT = 977  # prime, so that pieces of a message meet all shifts before any comes again


class Dither:
    """Uniform numbers in [0, 1), in steps of 2^-16, for one message.

    The seed is the number of messages that this memory has sent, and a checksum of some of the total, so that workers,
    whose totals differ, round independently of each other. Each number is uniform; two that lie 131072 or more apart
    in one message may be equal.
    """

    def __init__(self, total: Tensor, memory: CompressorMemory) -> None:
        sent = int(memory.get("sent", 0))
        memory.put("sent", sent + 1)
        generator = torch.Generator().manual_seed(_seed(total, sent))
        length = min(total.numel(), PERIOD) + (_SHIFTS if total.numel() > PERIOD else 0)
        drawn = torch.empty(-(-length // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
        self._table = drawn.view(torch.int16).float().mul_(2**-16).add_(0.5).to(total.device)

    def of(self, start: int, like: Tensor) -> Tensor:
        """The numbers for those that lie from `start` in the total, in the shape of `like`, at most `PERIOD`."""
        shift = start // PERIOD * _SHIFT % _SHIFTS
        return self._table[shift : shift + like.numel()].view(like.shape)


def _seed(total: Tensor, sent: int) -> int:
    """32 bits, which is all that torch's generator for the CPU takes of a seed."""
    some = total[:: max(1, total.numel() // 256)].contiguous()
    return zlib.crc32(some.view(torch.uint8).cpu().numpy().tobytes(), sent)
