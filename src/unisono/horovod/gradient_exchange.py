"""How `DistributedOptimizer` exchanges gradients, and the negotiated exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.compress import COMPRESSORS, Cast, Compressor
from unisono.horovod.collectives import (
    compressed_allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from unisono.horovod.compression import Compression
from unisono.horovod.errors import InvalidArgument
from unisono.horovod.participant import current
from unisono.horovod.process_sets import ProcessSet, global_process_set
from unisono.horovod.reductions import Average, ReduceOp, Sum
from unisono.notation import parse

Finish = Callable[[], None]
"""Waits for an exchange of gradients, and writes the result into them."""


@dataclass(frozen=True)
class GradientExchange:
    """How tensors are exchanged, one or several at a time.

    Args:
        compression: Horovod's interface; not used with `notation`.
        notation: of a compressor of Unisono; empty: none.
        op, predivide, sparse_as_dense, process_set: as for `DistributedOptimizer`.
    """

    compression: Any
    notation: str
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet

    def __post_init__(self) -> None:
        if self.predivide != 1.0 and self.op != Average:
            raise InvalidArgument("gradient_predivide_factor", self.predivide, f"is not for op={self.op.name}",
                                  "use op=hvd.Average, or leave it out")  # fmt: skip
        if self.notation and (self.op not in (Average, Sum) or self.process_set.process_set_id):
            raise InvalidArgument("compression", self.notation, "is only for means and sums over all workers",
                                  "use op=hvd.Average, and no process set")  # fmt: skip

    def fixed_compressor(self, names: Mapping[Tensor, str]) -> Compressor | None:
        """The compressor of an exchange without negotiation; None: these gradients have to be negotiated.

        It takes sums over all workers of whole buckets, so that a compressor must not care which tensors these hold.
        """
        if self.op not in (Average, Sum) or self.predivide != 1.0 or self.process_set is not global_process_set:
            return None
        if self.notation:
            compress: Compressor = parse("compression", self.notation, COMPRESSORS)
            chosen = [compress.choose(name, parameter.shape) for parameter, name in names.items()]
            return compress if all(each.is_additive and not each.keeps_residual for each in chosen) else None
        if self.compression is Compression.none:
            return Cast()
        return Cast("fp16") if self.compression is Compression.fp16 else None

    def weight(self, size: int) -> float:
        """The factor of each of `size` workers' gradients before they are added up, without negotiation."""
        return 1.0 / size if self.notation else 1.0

    def divisor(self, size: int) -> float:
        """What the sum of the gradients with that weight is divided by."""
        divisor = float(size) if self.op == Average else 1.0
        return divisor / size if self.notation else divisor

    def start(self, name: str, tensors: Sequence[Tensor]) -> Finish:
        """Collective: start the reduction of `tensors`, in place."""
        if len(tensors) > 1 and not self.sparse_as_dense and any(x.is_sparse for x in tensors):
            finishes = [self.start(f"{name}.{number}", [x]) for number, x in enumerate(tensors)]
            return lambda: _call_all(finishes)
        if tensors[0].is_sparse and not self.sparse_as_dense:
            return self._start_sparse(name, tensors[0])
        dense = [x.to_dense() if x.is_sparse else x for x in tensors]
        if self.notation and dense[0].is_floating_point():
            scale = float(current().size) if self.op == Sum else 1.0
            handle = compressed_allreduce_async_(dense, name, self.notation, scale)
            return lambda: write(tensors, synchronize(handle))
        method = Compression.none if self.notation else self.compression
        sent, contexts = zip(*(method.compress(x) for x in dense))
        handle = grouped_allreduce_async_(sent, None, name, self.op, 1.0 / self.predivide, self.predivide,
                                          self.process_set)  # fmt: skip
        return lambda: write(tensors, [method.decompress(x, c) for x, c in zip(synchronize(handle), contexts)])

    def _start_sparse(self, name: str, tensor: Tensor) -> Finish:
        result = sparse_allreduce_async(tensor, name, self.op, self.process_set)
        return lambda: write([tensor], [result()])


def _call_all(functions: Sequence[Finish]) -> None:
    for function in functions:
        function()


def write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each of `values` into its target, which may be sparse, unless it is in the same memory."""
    with torch.no_grad():
        for target, value in zip(targets, values):
            if target.is_sparse:  # which has no copy_ from another number of indices
                target.zero_().add_(value if value.is_sparse else value.to_sparse(target.sparse_dim()))
            elif target.data_ptr() != value.data_ptr():
                target.copy_(value)
