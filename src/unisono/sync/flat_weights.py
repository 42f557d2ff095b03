"""The parameters as flat tensors, one per bucket, for sending and averaging weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.compress import Compressor, views
from unisono.sync.buckets import BucketPlan, gaps, plan_buckets

_BUCKET_BYTES = 8 << 20


class Weights:
    """All `parameters`, in buckets of one dtype and compressor each; the same plan on all workers."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], compress: Compressor) -> None:
        self.plans: list[BucketPlan] = plan_buckets(parameters, compress, _BUCKET_BYTES, _BUCKET_BYTES)
        self._groups: list[list[Tensor]] = [[parameters[span.name] for span in plan.spans] for plan in self.plans]

    def blank(self) -> list[Tensor]:
        """Zeroed memory for all parameters, one flat tensor per bucket."""
        return [torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device) for plan in self.plans]

    @torch.no_grad()
    def read(self, into: list[Tensor] | None = None) -> list[Tensor]:
        """Copy the current parameters into the flat tensors `into`, which `blank` has returned; None: into new ones."""
        flats = into or self.blank()
        for plan, flat, group in zip(self.plans, flats, self._groups):
            torch._foreach_copy_(views(flat, plan.spans), group)
            for start, stop in gaps(plan):  # a compressor may have written there
                flat[start:stop] = 0
        return flats

    @torch.no_grad()
    def write(self, flats: Sequence[Tensor]) -> None:
        """Copy `flats` into the parameters, in place."""
        for plan, flat, group in zip(self.plans, flats, self._groups):
            torch._foreach_copy_(group, views(flat, plan.spans))

    @torch.no_grad()
    def multiply(self, factors: Sequence[float]) -> None:
        """Multiply the parameters of each bucket by its factor, in place."""
        for factor, group in zip(factors, self._groups):
            if factor != 1.0:
                torch._foreach_mul_(group, factor)

    @contextmanager
    def replaced(self, flats: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the parameters are `flats`; outside they are as before."""
        own = self.read()
        self.write(flats)
        try:
            yield
        finally:
            self.write(own)


def mean(flats: Sequence[Tensor], comm: Communicator, weight: float | None = None) -> list[Tensor]:
    """Collective: the uncompressed mean over all workers, the same bits on all. Raises `PeerLost`.

    `weight` is the weight of this worker; None, on all workers alike, means equal weights.
    """
    factor, total = relative(weight, comm)
    wide = [x.to(torch.promote_types(x.dtype, torch.float32), copy=True).mul_(factor) for x in flats]
    works = [comm.sum(x) for x in wide]
    return [(work.wait() / total).to(x.dtype) for work, x in zip(works, flats)]


def relative(weight: float | None, comm: Communicator) -> tuple[float, float]:
    """Collective: this worker's weight and the sum of all workers' weights, as multiples of the largest one.

    Equal weights (also all None or all 0) are exactly 1, and add up to the number of workers. Raises `PeerLost`.
    """
    if weight is None:
        return 1.0, float(comm.size)
    weights = comm.gather(torch.tensor([weight], dtype=torch.float64)).wait().view(-1).tolist()
    largest = max(weights)
    return (weight / largest, math.fsum(w / largest for w in weights)) if largest else (1.0, float(comm.size))
