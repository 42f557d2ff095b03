"""Adds error feedback to a compressor that has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.cast import Cast
from unisono.compress.compressor import Codec, CollectiveVerbs, Compressor, Mean
from unisono.compress.delegate import Delegate, check_compressor
from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span


@dataclass(frozen=True)
class WithErrorFeedback(Delegate):
    """Adds what `compress` leaves out of a message to the next message: ``m = C(x + e)``, ``e = x + e - m``.

    Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", algorithm 2, with residual ``e``. This is for compressors
    that round without error feedback, such as `Cast` to 16 bits and the stochastic `Quantize`; others are unchanged.
    Additive messages stay additive. Rounding in the sum between workers is not part of any residual.

    Args:
        compress: the compressor.

    Raises:
        ValueError: `compress` is not a compressor.
    """

    compress: Compressor = Cast("bf16")

    def __post_init__(self) -> None:
        check_compressor("compress", self.compress)

    @property
    def inner(self) -> Compressor:
        return self.compress

    @property
    def keeps_residual(self) -> bool:
        return True

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        chosen = self.compress.choose(name, shape)
        return chosen if chosen.keeps_residual else WithErrorFeedback(chosen)

    def for_sums_of(self, addends: int) -> Compressor:
        return WithErrorFeedback(self.compress.for_sums_of(addends))

    def encode_with_feedback(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        if self.compress.keeps_residual:
            return self.compress.encode_with_feedback(total, spans, memory)
        return Codec.encode_with_feedback(self, total, spans, memory)

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        if self.compress.keeps_residual:
            return self.compress.mean(total, spans, comm, memory, dtype)
        if not self.is_additive:
            return Codec.mean(self, total, spans, comm, memory, dtype)
        message = self.encode_with_feedback(total, spans, memory)
        arrives = self.decode(message, spans, total.numel(), total.dtype)
        return self.compress.mean(arrives, spans, comm, memory, dtype)
