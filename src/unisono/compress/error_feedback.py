"""Owe what another compressor leaves out."""

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
    """What `compress` leaves out of a message is added to the next: ``m = C(x + e)``, ``e = x + e - m``.

    Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", algorithm 2. For compressors that round without owing, as
    `Cast` to 16 bits and the stochastic `Quantize`; one that owes already is left as it is. Where messages add up they
    still do; what the sum itself rounds between workers is nobody's debt.

    Args:
        compress: the compressor.

    Raises:
        ValueError: `compress` is no compressor.
    """

    compress: Compressor = Cast("bf16")

    def __post_init__(self) -> None:
        check_compressor("compress", self.compress)

    @property
    def stands_for(self) -> Compressor:
        return self.compress

    @property
    def owes(self) -> bool:
        return True

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        chosen = self.compress.choose(name, shape)
        return chosen if chosen.owes else WithErrorFeedback(chosen)

    def for_sums_of(self, addends: int) -> Compressor:
        return WithErrorFeedback(self.compress.for_sums_of(addends))

    def owe(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        if self.compress.owes:
            return self.compress.owe(total, spans, memory)
        return Codec.owe(self, total, spans, memory)

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        if self.compress.owes:
            return self.compress.mean(total, spans, comm, memory, dtype)
        if not self.adds_up:
            return Codec.mean(self, total, spans, comm, memory, dtype)
        message = self.owe(total, spans, memory)
        arrives = self.decode(message, spans, total.numel(), total.dtype)
        return self.compress.mean(arrives, spans, comm, memory, dtype)
