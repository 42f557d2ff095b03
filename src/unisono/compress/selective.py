"""Compressors that choose another compressor for each parameter, by its size or name."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from unisono.compress.cast import Cast
from unisono.compress.compressor import Compressor
from unisono.compress.delegate import Delegate, check_compressor
from unisono.compress.quantize import Quantize


@dataclass(frozen=True)
class BySize(Delegate):
    """Compresses parameters of fewer than `below` numbers with `small`, all others with `large`.

    Biases and norms take few bytes and are sensitive to errors; large matrices are the opposite. A piece without a
    parameter's name is compressed with `large`.

    Args:
        below: the number of elements from which a parameter is large.
        small: the compressor for small parameters, for instance ``Cast()``.
        large: the compressor for large parameters, for instance ``Quantize(8)``.

    Raises:
        ValueError: `below` is not a whole number from 1; `small` or `large` is not a compressor.
    """

    below: int = 4096
    small: Compressor = Cast()
    large: Compressor = Quantize(8)

    def __post_init__(self) -> None:
        if not isinstance(self.below, int) or isinstance(self.below, bool) or self.below < 1:
            raise ValueError(f"below={self.below!r} is not a whole number from 1")
        check_compressor("small", self.small)
        check_compressor("large", self.large)

    @property
    def inner(self) -> Compressor:
        return self.large

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        return (self.small if shape.numel() < self.below else self.large).choose(name, shape)

    def for_sums_of(self, addends: int) -> Compressor:
        return BySize(self.below, self.small.for_sums_of(addends), self.large.for_sums_of(addends))


@dataclass(frozen=True)
class ByName(Delegate):
    """Compresses a parameter by the first rule whose pattern matches its name, else with `otherwise`.

    Args:
        rules: pairs of a pattern (``*``, ``?``, ``[seq]``, as in file names, case-sensitive) and a compressor, for
            instance ``(("embed*", TopK()), ("*.bias", Cast()))``.
        otherwise: the compressor for parameters that match no rule, and for pieces without a name.

    Raises:
        ValueError: `rules` is not a tuple of such pairs; `otherwise` is not a compressor.
    """

    rules: tuple[tuple[str, Compressor], ...] = ()
    otherwise: Compressor = Cast()

    def __post_init__(self) -> None:
        if not isinstance(self.rules, tuple):
            raise ValueError(f"rules={self.rules!r} is not a tuple of pairs of a pattern and a compressor")
        for rule in self.rules:
            if not isinstance(rule, tuple) or len(rule) != 2 or not isinstance(rule[0], str):
                raise ValueError(f"rules: {rule!r} is not a pair of a pattern and a compressor")
            check_compressor(f"rules: {rule[0]}", rule[1])
        check_compressor("otherwise", self.otherwise)

    @property
    def inner(self) -> Compressor:
        return self.otherwise

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        matching = (compress for pattern, compress in self.rules if fnmatchcase(name, pattern))
        return next(matching, self.otherwise).choose(name, shape)

    def for_sums_of(self, addends: int) -> Compressor:
        rules = tuple((pattern, compress.for_sums_of(addends)) for pattern, compress in self.rules)
        return ByName(rules, self.otherwise.for_sums_of(addends))
