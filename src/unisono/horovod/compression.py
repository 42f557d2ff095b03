"""Compression of gradients by Horovod's interface, beside which every compressor of Unisono is taken."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unisono.compress import COMPRESSORS
from unisono.horovod.errors import InvalidArgument
from unisono.notation import write


class TensorCompressor:
    """What is sent in place of one tensor. A subclass defines both methods, of which each worker calls one after the
    other; what is sent is reduced as tensors are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What is sent in place of `tensor`, and what `decompress` needs besides the reduction of that."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The reduction, from what was received."""
        raise NotImplementedError


class NoneCompressor(TensorCompressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(TensorCompressor):
    """Sends floating-point tensors as float16, and others as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """The choices for ``compression=``; `DistributedOptimizer` takes values such as ``unisono.TopK(0.01)`` too."""

    none = NoneCompressor
    fp16 = FP16Compressor


def notation_of(compression: Any) -> str:
    """A compressor of Unisono in the notation; empty for Horovod's interface.

    Raises:
        InvalidArgument: it is neither.
    """
    if COMPRESSORS.get(type(compression).__name__) is type(compression):
        return write("compression", compression, COMPRESSORS)
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise InvalidArgument("compression", compression, "has no compress(tensor) and decompress(tensor, ctx)",
                              "use hvd.Compression.fp16, or a compressor such as unisono.TopK()")  # fmt: skip
    return ""


def cast_only(compression: Any) -> Any:
    """`compression`, which one operation without a name uses.

    Raises:
        InvalidArgument: it is a compressor of Unisono, which keeps a residual for each parameter.
    """
    if notation_of(compression):
        raise InvalidArgument("compression", compression, "keeps a residual for each parameter",
                              "pass it to hvd.DistributedOptimizer, or use hvd.Compression.fp16 here")  # fmt: skip
    return compression
