"""A seeded order of any number of samples, computed per position: nothing is stored, any size starts at once.

A balanced Feistel network on pairs of numbers below ``a = ceil(sqrt(size))`` is a bijection of
``range(a * a)`` whatever its round function is (Luby & Rackoff 1988); walking its cycle until the value falls
below `size` makes it one of ``range(size)`` (Black & Rogaway 2002, "Ciphers with arbitrary finite domains").
The square is hardly larger than the size, so that hardly any position has to walk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unisono.data.random_streams import mix

_ROUNDS = 6


@dataclass(frozen=True)
class Permutation:
    """The order of `size` samples (1 to 2**62) in one epoch; called with positions, it gives samples."""

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
        if asked.size and (asked.min() < 0 or asked.max() >= self.size):
            raise ValueError(f"positions {asked.min()} to {asked.max()}: they must lie in range({self.size})")
        values = self._shuffle(asked.astype(np.uint64).ravel())
        outside = np.flatnonzero(values >= self._size)
        while outside.size > _FEW:
            walked = self._shuffle(values[outside])
            values[outside] = walked
            outside = outside[walked >= self._size]
        for place in outside.tolist():
            values[place] = self._walk(int(values[place]))
        return values.astype(np.int64).reshape(asked.shape)

    def _walk(self, value: int) -> int:
        """The same arithmetic, quicker for one value: along the cycle until it lies below `size`."""
        side, keys = int(self._side), [int(key) for key in self._keys]
        while value >= self.size:
            left, right = divmod(value, side)
            for key in keys:
                x = (right + key) * _FACTORS[0] & _WORD
                x = (x ^ x >> _HALF) * _FACTORS[1] & _WORD
                left, right = right, (left + (x >> _ROOM)) % side
            value = left * side + right
        return value

    def _shuffle(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The Feistel network: ``left, right = right, (left + f(right)) % side``, so many rounds.

        f multiplies, folds the upper half onto the lower, multiplies again (words wrap) and keeps the upper
        44 bits, so that nothing wraps when `left` is added.
        """
        left, right = np.divmod(values, self._side)
        for key in self._keys:
            x = right + key
            x *= _FIRST
            x ^= x >> _FOLD
            x *= _SECOND
            x >>= _TOP
            x += left
            x %= self._side
            left, right = right, x
        return left * self._side + right

    @cached_property
    def _size(self) -> np.uint64:
        return np.uint64(self.size)

    @cached_property
    def _side(self) -> np.uint64:
        return np.uint64(math.isqrt(self.size - 1) + 1)

    @cached_property
    def _keys(self) -> list[np.uint64]:
        return [np.uint64(mix(self.seed, self.epoch, number)) for number in range(_ROUNDS)]


_FEW = 4  # values for which Python's own integers are quicker than an array's fixed costs
_WORD, _HALF, _ROOM = (1 << 64) - 1, 32, 20
_FACTORS = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
_FOLD, _TOP = np.uint64(_HALF), np.uint64(_ROOM)
_FIRST, _SECOND = np.uint64(_FACTORS[0]), np.uint64(_FACTORS[1])
