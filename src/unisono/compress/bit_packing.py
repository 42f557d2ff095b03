"""Packs whole numbers of 1, 2 or 4 bits, several to a byte, by arithmetic on bytes, without tables."""

from __future__ import annotations

import torch
from torch import Tensor


def packed(count: int, bits: int) -> int:
    """The number of bytes that `count` codes of `bits` bits take."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write `codes` (uint8, each below ``2**bits``, a multiple of ``8 // bits`` of them; overwritten) into `out`.

    The upper half is added to the lower half, shifted by one code, until a byte is full. So all operands are
    contiguous. Of 1-bit codes ``c[0..n)``, byte *i* holds ``c[i + k * n / 8]`` for *k* in 0..7.
    """
    while bits < 8:
        half = codes.numel() // 2
        target = out if bits == 4 else codes[:half]
        torch.add(codes[:half], codes[half:], alpha=1 << bits, out=target)
        codes, bits = target, 2 * bits


def unpack(packed: Tensor, bits: int, out: Tensor) -> None:
    """Write the codes in `packed` into `out` (uint8, ``8 // bits`` times as long); the inverse of `pack`."""
    width, codes = 8, packed
    while width > bits:
        width //= 2
        count = codes.numel()
        torch.bitwise_right_shift(codes, width, out=out[count : 2 * count])
        torch.bitwise_and(codes, (1 << width) - 1, out=out[:count])
        codes = out[: 2 * count]
