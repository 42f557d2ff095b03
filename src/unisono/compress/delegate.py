"""The base of compressors that consist of other compressors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.compress.compressor import Buffered, Codec, CollectiveVerbs, Compressor, Mean
from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span


class Delegate(Codec):
    """Delegates to the compressor `inner`. A subclass defines `inner`, and overrides methods in which it differs."""

    @property
    def inner(self) -> Compressor:
        """The compressor to which methods are delegated."""
        raise NotImplementedError

    @property
    def is_additive(self) -> bool:
        return self.inner.is_additive

    @property
    def keeps_residual(self) -> bool:
        return self.inner.keeps_residual

    @property
    def finite(self) -> bool:
        return self.inner.finite

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.inner.total_dtype(dtype)

    def is_lossless(self, dtype: torch.dtype) -> bool:
        return self.inner.is_lossless(dtype)

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        self.inner.add(total, gradient, weight, first)

    @property
    def buffered(self) -> Buffered | None:
        return self.inner.buffered

    def value(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return self.inner.value(total, dtype)

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.blank(spans, numel, dtype, device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return self.inner.encode(total, spans, memory)

    def encode_with_feedback(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return self.inner.encode_with_feedback(total, spans, memory)

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        return self.inner.decode(message, spans, numel, dtype)

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        return self.inner.mean(total, spans, comm, memory, dtype)


def check_compressor(field: str, value: object) -> None:
    """Check the value of the argument `field`.

    Raises:
        ValueError: `value` is not a compressor.
    """
    if isinstance(value, type) or not callable(getattr(value, "choose", None)):
        raise ValueError(f"{field}={value!r} is not a compressor")
