"""Synchronous data parallelism: every replica steps by the mean gradient of the global batch.

Goyal et al. 2017, eqs. 3 and 4: the mean over a global batch. Li et al. 2020, "PyTorch Distributed": buckets whose
exchange overlaps with backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.compress import Compressor
from unisono.errors import UnisonoError
from unisono.sync.adasum import adasum
from unisono.sync.bucket_reduction import BucketedReduction, ReduceFunction, RoundMeans, mean
from unisono.sync.buckets import plan_buckets
from unisono.sync.gradient_memory import GradientMemory
from unisono.sync.synchronizer import BoundSynchronizer, Loop


@dataclass(frozen=True)
class AllReduce:
    """All-reduces the mean gradient in buckets, which are sent as they fill, in an order that all workers share.

    Args:
        bucket_bytes: the least size of a bucket; larger buckets have less overhead, smaller ones overlap more.
        first_bytes: the least size of the first bucket, which is sent first.
        reduce: ``mean``, or ``adasum`` (see `unisono.sync.adasum`), which adds orthogonal components.

    Raises:
        ValueError: a size is below 1, or `reduce` is neither ``mean`` nor ``adasum``.
    """

    bucket_bytes: int = 8 << 20
    first_bytes: int = 1 << 20
    reduce: str = "mean"

    def __post_init__(self) -> None:
        if self.reduce not in _HOW:
            raise ValueError(f"reduce={self.reduce!r} is none of {', '.join(_HOW)}")
        for name in ("bucket_bytes", "first_bytes"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is not a whole number from 1")

    def bind(
        self, parameters: Mapping[str, nn.Parameter], comm: Communicator, compress: Compressor, loop: Loop
    ) -> BoundAllReduce:
        """See `Synchronizer.bind`."""
        reduction = BucketedReduction(
            plan_buckets(parameters, compress, self.bucket_bytes, self.first_bytes),
            comm,
            control=loop.control,
            overlap=loop.overlap,
            how=_HOW[self.reduce],
        )
        return BoundAllReduce(parameters, reduction, loop.sparse)


_HOW: dict[str, ReduceFunction] = {"mean": mean, "adasum": adasum}


class BoundAllReduce(BoundSynchronizer):
    """The bound `AllReduce`; see `BoundSynchronizer` for the order of calls."""

    gradients_only = True

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], reduction: BucketedReduction, sparse: frozenset[str] = frozenset()
    ) -> None:
        self._parameters, self._reduction, self._sparse = parameters, reduction, sparse
        self._memory = GradientMemory()

    def begin(self) -> None:
        self._reduction.begin()

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self._reduction.close(control)

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        if self._reduction.is_launched(name):
            raise UnisonoError(
                f"the gradient of {name} was computed again after its exchange had started: backward ran again before "
                "the step was taken, or visits this parameter more than once (set overlap=False, or pass the number "
                "of backward passes of a step to world.bind)"
            )
        self._reduction.add(name, gradient.to_dense() if gradient.is_sparse else gradient, weight)

    def fold(self) -> None:
        self._reduction.fold()

    def residual_state(self) -> dict[str, Tensor]:
        return self._reduction.residual_state()

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        self._reduction.load_residuals(residuals)

    def settle(self) -> MeanGradient:
        return MeanGradient(self._parameters, self._reduction, self._sparse, self._memory)


class MeanGradient:
    """The mean gradient of one step; a `PendingUpdate`."""

    agreed = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        reduction: BucketedReduction,
        sparse: frozenset[str],
        memory: GradientMemory,
    ) -> None:
        self._parameters, self._reduction, self._sparse = parameters, reduction, sparse
        self._memory, self._written = memory, False
        self._mean: RoundMeans = reduction.wait()
        self.control = self._mean.control

    def norm(self, without: Collection[str] = ()) -> float:
        if without:
            results = self._mean.results()
            counted = [g for name, g in results.items() if g is not None and name not in without]
            return math.sqrt(math.fsum(float(g.norm()) ** 2 for g in counted))
        return math.sqrt(math.fsum(n * n for n in self._mean.norms()))

    def write(self, scale: float = 1.0) -> None:
        self._written = True
        self._memory.write(self._mean, scale, self._parameters, self._sparse)

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Set every ``grad`` to ``scale * mean`` (None if no worker used the parameter), step, reset every ``grad``."""
        if self._written:
            self._reduction.commit()
            return step()
        for name, gradient in self._mean.results(scale).items():
            sparse = gradient is not None and name in self._sparse
            self._parameters[name].grad = gradient.to_sparse(1) if gradient is not None and sparse else gradient
        try:
            result = step()
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None
        self._reduction.commit()
        return result
