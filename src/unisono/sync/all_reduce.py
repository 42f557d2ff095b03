"""Synchronous data parallelism: every replica takes the step of the mean gradient over the global batch.

Goyal et al. 2017 (eqs. 3 and 4) for the mean over a global batch; Li et al. 2020, "PyTorch Distributed", for buckets
that travel while backward still runs.
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
from unisono.sync.bucket_reduction import Agreed, BucketedReduction, How, mean
from unisono.sync.synchronizer import BoundSynchronizer, Loop


@dataclass(frozen=True)
class AllReduce:
    """The mean gradient by one reduction per bucket, launched in a fixed order as buckets fill.

    Args:
        bucket_bytes: size of a bucket; a larger one has less overhead, a smaller one more overlap.
        first_bytes: size of the first bucket, which travels first.
        reduce: ``mean``, or ``adasum`` (see `unisono.sync.adasum`), which adds up what workers disagree on.

    Raises:
        ValueError: a size below 1, or another `reduce`.
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
            parameters,
            comm,
            compress,
            bucket_bytes=self.bucket_bytes,
            first_bytes=self.first_bytes,
            control=loop.control,
            overlap=loop.overlap,
            how=_HOW[self.reduce],
        )
        return BoundAllReduce(parameters, reduction, loop.sparse)


_HOW: dict[str, How] = {"mean": mean, "adasum": adasum}


class BoundAllReduce(BoundSynchronizer):
    """`AllReduce` in its world; see `BoundSynchronizer` for the order of calls."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], reduction: BucketedReduction, sparse: frozenset[str] = frozenset()
    ) -> None:
        self._parameters, self._reduction, self._sparse = parameters, reduction, sparse

    def begin(self) -> None:
        self._reduction.begin()

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self._reduction.close(control)

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        if self._reduction.under_way(name):
            raise UnisonoError(
                f"the gradient of {name} came once more after its exchange had started: backward ran again before "
                "the step was taken, or visits this parameter more than once (set overlap=False, or tell "
                "world.bind how many backward passes make a step)"
            )
        self._reduction.add(name, gradient.to_dense() if gradient.is_sparse else gradient, weight)

    def fold(self) -> None:
        self._reduction.fold()

    def residual_state(self) -> dict[str, Tensor]:
        return self._reduction.residual_state()

    def load_residuals(self, owed: Mapping[str, Tensor]) -> None:
        self._reduction.load_residuals(owed)

    def settle(self) -> MeanGradient:
        return MeanGradient(self._parameters, self._reduction, self._sparse)


class MeanGradient:
    """What an all-reduce step is about to do; see `PendingUpdate`."""

    agreed = True

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], reduction: BucketedReduction, sparse: frozenset[str]
    ) -> None:
        self._parameters, self._reduction, self._sparse = parameters, reduction, sparse
        self._mean: Agreed = reduction.wait()
        self.control = self._mean.control

    def norm(self, without: Collection[str] = ()) -> float:
        """See `PendingUpdate.norm`."""
        if without:
            found = self._mean.results()
            counted = [g for name, g in found.items() if g is not None and name not in without]
            return math.sqrt(math.fsum(float(g.norm()) ** 2 for g in counted))
        return math.sqrt(math.fsum(n * n for n in self._mean.norms()))

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Put ``scale * mean`` into every ``grad`` (None where no worker used the parameter), step, take it out."""
        for name, gradient in self._mean.results(scale).items():
            kept = gradient.to_sparse(1) if gradient is not None and name in self._sparse else gradient
            self._parameters[name].grad = kept
        try:
            result = step()
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None
        self._reduction.commit()
        return result
