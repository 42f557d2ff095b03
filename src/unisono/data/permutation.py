"""A seeded permutation of any number of samples, computed per position without storage.

A balanced Feistel network on pairs of numbers below ``a = ceil(sqrt(size))`` is a bijection of
``range(a * a)`` for any round function (Luby & Rackoff 1988). Cycle walking applies it again until the value is below
`size`. This gives a bijection of ``range(size)`` (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"). The
square is hardly larger than the size, so few positions need a second application.
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
    """The order of `size` samples (1 to 2**62) in one epoch; maps positions to samples."""

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
        requested = np.asarray(positions, dtype=np.int64)
        if requested.size and (requested.min() < 0 or requested.max() >= self.size):
            raise ValueError(f"positions {requested.min()} to {requested.max()}: they must be in range({self.size})")
        values = self._shuffle(requested.astype(np.uint64).ravel())
        outside = np.flatnonzero(values >= self._size)
        while outside.size > _FEW:
            shuffled = self._shuffle(values[outside])
            values[outside] = shuffled
            outside = outside[shuffled >= self._size]
        for index in outside.tolist():
            values[index] = self._shuffle_into_range(int(values[index]))
        return values.astype(np.int64).reshape(requested.shape)

    def _shuffle_into_range(self, value: int) -> int:
        """Cycle walking for a single value, with Python's integers, which are faster there."""
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
        """The Feistel network: ``left, right = right, (left + f(right)) % side``, `_ROUNDS` times.

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


_FEW = 4  # up to so many values, Python's integers are faster than arrays
_WORD, _HALF, _ROOM = (1 << 64) - 1, 32, 20
_FACTORS = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
_FOLD, _TOP = np.uint64(_HALF), np.uint64(_ROOM)
_FIRST, _SECOND = np.uint64(_FACTORS[0]), np.uint64(_FACTORS[1])
