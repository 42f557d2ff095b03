"""A seeded order of any number of samples, computed per position: nothing is stored, nothing needs time to start.

A balanced Feistel network over the next even number of bits is a bijection of ``range(2**bits)`` whatever its
round function is (Luby & Rackoff 1988); walking its cycle until the value falls below `size` makes it a bijection
of ``range(size)`` (Black & Rogaway 2002, "Ciphers with arbitrary finite domains", method 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unisono.data.streams import mix

_ROUNDS = 6


@dataclass(frozen=True)
class Permutation:
    """The order of `size` samples (1 to 2**62) in one epoch; called with positions, it gives sample numbers."""

    size: int
    seed: int
    epoch: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 2**62:
            raise ValueError(f"size={self.size!r} is not between 1 and 2**62")

    def __call__(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """The samples at `positions`, an integer array of any shape with values in ``range(size)``.

        Raises:
            ValueError: a position out of range.
        """
        asked = np.asarray(positions, dtype=np.int64)
        if asked.size and not (0 <= int(asked.min()) and int(asked.max()) < self.size):
            raise ValueError(
                f"positions from {asked.min()} to {asked.max()}: they must lie in range({self.size})"
            )
        values = self._encrypt(asked.astype(np.uint64).ravel())
        outside = np.flatnonzero(values >= np.uint64(self.size))
        while outside.size:
            walked = self._encrypt(values[outside])
            values[outside] = walked
            outside = outside[walked >= np.uint64(self.size)]
        return values.astype(np.int64).reshape(asked.shape)

    @cached_property
    def _half_bits(self) -> int:
        return max(1, ((self.size - 1).bit_length() + 1) // 2)

    @cached_property
    def _keys(self) -> list[np.uint64]:
        return [np.uint64(mix(self.seed, self.epoch, number)) for number in range(_ROUNDS)]

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The Feistel network: ``left, right = right, left ^ f(right)``, so many rounds."""
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (_scramble(right + key) & mask)
        return (left << bits) | right


_SHIFT, _SHIFT_LATER = np.uint64(32), np.uint64(29)
_FACTOR, _FACTOR_LATER = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA0761D6478BD642F)


def _scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A mixing of 64 bits by two multiply-and-shift steps; arithmetic wraps."""
    x = x ^ (x >> _SHIFT)
    x = x * _FACTOR
    x = x ^ (x >> _SHIFT_LATER)
    x = x * _FACTOR_LATER
    return x ^ (x >> _SHIFT)
