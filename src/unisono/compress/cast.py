"""A compressor that sends gradients in a smaller floating-point type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.compressor import Codec, CollectiveVerbs, Mean
from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span

_TYPES = {"own": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast(Codec):
    """Sends gradients in the type `to`. Inside a worker they are summed in their own type.

    ``Cast()``, that is ``own``, sends them unchanged. A smaller type halves or quarters the bytes, and rounds at each
    hop of the sum: ``fp32`` to 24 significant bits, ``fp16`` to 11, ``bf16`` to 8. Rounding to nearest is unbiased, so
    there is no residual.

    Raises:
        ValueError: `to` is none of own, fp32, bf16, fp16.
    """

    to: str = "own"

    def __post_init__(self) -> None:
        if self.to not in _TYPES:
            raise ValueError(f"to={self.to!r} is none of {', '.join(_TYPES)}")

    @property
    def is_additive(self) -> bool:
        return True

    @property
    def keeps_residual(self) -> bool:
        return False

    def is_lossless(self, dtype: torch.dtype) -> bool:
        return self._travels(dtype) == dtype

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=self._travels(dtype), device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return total.to(self._travels(total.dtype))

    def encode_with_feedback(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return self.encode(total, spans, memory)

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        return message.to(dtype)

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        summed = yield comm.sum(self.encode(total, spans, memory))
        return self.decode(summed, spans, total.numel(), dtype)

    def _travels(self, dtype: torch.dtype) -> torch.dtype:
        return min(dtype, _TYPES[self.to], key=lambda d: d.itemsize)
