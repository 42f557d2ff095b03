"""Encodes the indices of a sparse message in few bits.

``k`` increasing indices below ``n`` take about ``2 + log2(n / k)`` bits each. With one index in a thousand that is 12
bits; the information-theoretic bound is 11.4.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from unisono.compress import bit_packing as packing


def packed_bytes(k: int, n: int) -> int:
    """The number of bytes that `pack` returns for `k` indices below `n`."""
    low = _low_bits(k, n)
    return 0 if k == n else _eights(k) * low + _eights(_unary_bits(k, n, low))


def pack(indices: Tensor, n: int) -> Tensor:
    """Pack increasing `indices` ``[k]`` below `n` into bytes ``[packed_bytes(k, n)]`` (Elias 1974; Fano 1971).

    The low bits of all indices are packed. The high bits, which only grow, are written in unary: the bit at
    ``high + position`` is set. With ``k == n`` there are no bytes.
    """
    k = indices.numel()
    if k == n:
        return indices.new_empty(0, dtype=torch.uint8)
    low = _low_bits(k, n)
    unary = indices.new_zeros(_unary_bits(k, n, low), dtype=torch.uint8)
    unary.index_fill_(0, (indices >> low) + _count(k, indices), 1)
    return torch.cat([_pack_bits(indices, low), _pack_bits(unary, 1)])


def unpack(packed: Tensor, k: int, n: int) -> Tensor:
    """The `k` increasing indices below `n`, int64; the inverse of `pack`.

    Raises:
        ValueError: `pack` cannot have made `packed`.
    """
    if packed.dtype != torch.uint8 or packed.shape != (packed_bytes(k, n),):
        raise ValueError(
            f"packed indices of {tuple(packed.shape)} {packed.dtype}, where {packed_bytes(k, n)} bytes are expected "
            f"for {k} indices below {n}"
        )
    if k == n:
        return torch.arange(n, device=packed.device)
    low = _low_bits(k, n)
    cut = _eights(k) * low
    ones = true_indices(_unpack_bits(packed[cut:], 1, _unary_bits(k, n, low)).view(torch.bool))
    if ones.numel() != k:
        raise ValueError(f"{ones.numel()} indices where {k} were expected")
    indices = (ones - _count(k, ones)) << low
    if low:
        indices |= _unpack_bits(packed[:cut], low, k)
    if k and (int(indices[-1]) >= n or bool((indices[1:] <= indices[:-1]).any())):
        raise ValueError(f"the indices do not increase, or are not all from 0 to {n - 1}")
    return indices


def true_indices(mask: Tensor) -> Tensor:
    """The increasing indices at which the flat bool `mask` is true."""
    if mask.device.type != "cpu":
        return mask.nonzero().view(-1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))  # several times faster than torch on a CPU


def _low_bits(k: int, n: int) -> int:
    return max(0, (n // k).bit_length() - 1) if k else 0


def _unary_bits(k: int, n: int, low: int) -> int:
    return k + ((n - 1) >> low) if k else 0


def _eights(count: int) -> int:
    return -(-count // 8)


def _count(k: int, like: Tensor) -> Tensor:
    return torch.arange(k, device=like.device)


def _parts(width: int) -> Iterator[tuple[int, int]]:
    """The parts in which codes of `width` bits are packed: the number of bits of each part, and its shift."""
    shift = 0
    for bits in [8] * (width // 8) + [bits for bits in (4, 2, 1) if width & bits]:
        yield bits, shift
        shift += bits


def _pack_bits(values: Tensor, width: int) -> Tensor:
    """Pack the lowest `width` bits of each of `values`, part by part, into ``width`` bytes for eight values."""
    values = torch.nn.functional.pad(values, (0, -values.numel() % 8))
    out = torch.empty(values.numel() // 8 * width, dtype=torch.uint8, device=values.device)
    for bits, shift in _parts(width):
        codes = ((values >> shift) & ((1 << bits) - 1)).to(torch.uint8)
        target = out[values.numel() // 8 * shift :][: values.numel() // 8 * bits]
        if bits == 8:
            target.copy_(codes)
        else:
            packing.pack(codes, bits, target)
    return out


def _unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """The `count` values that were packed; uint8 if they are single bits, else int64. The inverse of `_pack_bits`.

    Raises:
        ValueError: bits are set behind the last value.
    """
    eights = _eights(count)
    codes = torch.empty(8 * eights, dtype=torch.uint8, device=packed.device)
    values = codes if width == 1 else torch.zeros(8 * eights, dtype=torch.int64, device=packed.device)
    for bits, shift in _parts(width):
        source = packed[eights * shift :][: eights * bits]
        if bits == 8:
            codes.copy_(source)
        else:
            packing.unpack(source, bits, codes)
        if width > 1:
            values |= codes.to(torch.int64) << shift
    if bool(values[count:].any()):
        raise ValueError("bits are set behind the last index")
    return values[:count]
