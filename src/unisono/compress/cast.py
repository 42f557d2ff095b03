"""Send gradients in a smaller floating type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.compressor import Mean, Memory, Wire

_TYPES = {"own": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast:
    """Gradients travel as `to`, are summed in a worker in their own type, and come back in it.

    ``Cast()``, that is ``own``, sends them as they are. A smaller type halves or quarters the bytes and rounds at each
    hop of the sum: ``fp32`` to 24 significant bits, ``fp16`` to 11, ``bf16`` to 8.

    Raises:
        ValueError: `to` is none of own, fp32, bf16, fp16.
    """

    to: str = "own"

    def __post_init__(self) -> None:
        if self.to not in _TYPES:
            raise ValueError(f"to={self.to!r} is none of {', '.join(_TYPES)}")

    @property
    def adds_up(self) -> bool:
        return True

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return min(dtype, _TYPES[self.to], key=lambda d: d.itemsize)

    def keeps(self, dtype: torch.dtype) -> bool:
        return self.wire_dtype(dtype) == dtype

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        if first:
            torch.mul(gradient, weight, out=total)
        else:
            total.add_(gradient, alpha=weight)

    def encode(self, total: Tensor) -> Tensor:
        return total.to(self.wire_dtype(total.dtype))

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        return wire.to(dtype)

    def mean(self, total: Tensor, comm: Wire, memory: Memory, dtype: torch.dtype) -> Mean:
        summed = yield comm.sum(self.encode(total))
        return self.decode(summed, dtype)

    def bits(self, x: Tensor) -> float:
        return x.numel() * self.wire_dtype(x.dtype).itemsize * 8
