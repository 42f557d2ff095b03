"""Random numbers for stochastic rounding, from a separate generator: the same run rounds the same way."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from unisono.compress.memory import CompressorMemory

PERIOD = 1 << 17  # drawing costs more than all other arithmetic, so numbers of one draw are used several times
_SHIFTS = 4096
_SHIFT = 977  # prime, so that pieces of a message use all shifts before any is used again


class Dither:
    """Uniform numbers in [0, 1), in steps of 2^-16, for one message.

    The seed is derived from the count of messages sent with `memory`, and from a checksum of a sample of the total.
    Totals of workers differ, so workers round independently. Each number is uniform; two numbers that are 131072 or
    more apart in one message may be equal.
    """

    def __init__(self, total: Tensor, memory: CompressorMemory) -> None:
        sent = int(memory.get("sent", 0))
        memory.put("sent", sent + 1)
        generator = torch.Generator().manual_seed(_seed(total, sent))
        length = min(total.numel(), PERIOD) + (_SHIFTS if total.numel() > PERIOD else 0)
        drawn = torch.empty(-(-length // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
        self._table = drawn.view(torch.int16).float().mul_(2**-16).add_(0.5).to(total.device)

    def of(self, start: int, like: Tensor) -> Tensor:
        """The numbers for the elements of the total from `start` on, in the shape of `like` (at most `PERIOD`)."""
        shift = start // PERIOD * _SHIFT % _SHIFTS
        return self._table[shift : shift + like.numel()].view(like.shape)


def _seed(total: Tensor, sent: int) -> int:
    """A seed of 32 bits: torch's CPU generator uses no more."""
    sample = total[:: max(1, total.numel() // 256)].contiguous()
    return zlib.crc32(sample.view(torch.uint8).cpu().numpy().tobytes(), sent)
