"""A compressor that is made of others: what they have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.compress.compressor import Buffered, Codec, CollectiveVerbs, Compressor, Mean
from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span


class Delegate(Codec):
    """Does what `stands_for` does. A subclass says which compressor that is, and what it does otherwise."""

    @property
    def stands_for(self) -> Compressor:
        """The compressor that does the work."""
        raise NotImplementedError

    @property
    def adds_up(self) -> bool:
        return self.stands_for.adds_up

    @property
    def owes(self) -> bool:
        return self.stands_for.owes

    @property
    def finite(self) -> bool:
        return self.stands_for.finite

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.stands_for.total_dtype(dtype)

    def keeps(self, dtype: torch.dtype) -> bool:
        return self.stands_for.keeps(dtype)

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        self.stands_for.add(total, gradient, weight, first)

    @property
    def buffered(self) -> Buffered | None:
        return self.stands_for.buffered

    def value(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return self.stands_for.value(total, dtype)

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.stands_for.blank(spans, numel, dtype, device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return self.stands_for.encode(total, spans, memory)

    def owe(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return self.stands_for.owe(total, spans, memory)

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        return self.stands_for.decode(message, spans, numel, dtype)

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        return self.stands_for.mean(total, spans, comm, memory, dtype)


def check_compressor(field: str, value: object) -> None:
    """
    Raises:
        ValueError: `value` is no compressor.
    """
    if isinstance(value, type) or not callable(getattr(value, "choose", None)):
        raise ValueError(f"{field}={value!r} is no compressor")
