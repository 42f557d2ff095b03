"""The parameters as flat tensors, one per bucket: how weights travel, and how their mean is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.compress import Compressor, views
from unisono.sync.buckets import Cut, cut, gaps

_BUCKET_BYTES = 8 << 20


class Weights:
    """All `parameters`, in buckets of one dtype and one choice of `compress` each; the same cut on all workers."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], compress: Compressor) -> None:
        self.cuts: list[Cut] = cut(parameters, compress, _BUCKET_BYTES, _BUCKET_BYTES)
        self._groups: list[list[Tensor]] = [[parameters[span.name] for span in plan.spans] for plan in self.cuts]

    def blank(self) -> list[Tensor]:
        """Zeroed memory for all, one flat tensor per bucket."""
        return [torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device) for plan in self.cuts]

    @torch.no_grad()
    def read(self, into: list[Tensor] | None = None) -> list[Tensor]:
        """The parameters as they are now, copied into new memory, or `into` what `blank` gave."""
        flats = into or self.blank()
        for plan, flat, group in zip(self.cuts, flats, self._groups):
            torch._foreach_copy_(views(flat, plan.spans), group)
            for start, stop in gaps(plan):  # a compressor may have left something there
                flat[start:stop] = 0
        return flats

    @torch.no_grad()
    def write(self, flats: Sequence[Tensor]) -> None:
        """Put `flats` into the parameters, in place."""
        for plan, flat, group in zip(self.cuts, flats, self._groups):
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
        kept = self.read()
        self.write(flats)
        try:
            yield
        finally:
            self.write(kept)


def mean(flats: Sequence[Tensor], comm: Communicator, weight: float | None = None) -> list[Tensor]:
    """Collective: the mean over all workers, of which this one counts `weight` (None: all count alike), uncompressed,
    the same bits on all. Raises `PeerLost`."""
    factor, total = relative(weight, comm)
    wide = [x.to(torch.promote_types(x.dtype, torch.float32), copy=True).mul_(factor) for x in flats]
    works = [comm.sum(x) for x in wide]
    return [(work.wait() / total).to(x.dtype) for work, x in zip(works, flats)]


def relative(weight: float | None, comm: Communicator) -> tuple[float, float]:
    """Collective: this worker's weight, and the sum of all workers' weights, as multiples of the largest one.

    Equal weights (all of them None or 0, too) are exactly 1 and add up to the number of workers. Raises `PeerLost`.
    """
    if weight is None:
        return 1.0, float(comm.size)
    weights = comm.gather(torch.tensor([weight], dtype=torch.float64)).wait().view(-1).tolist()
    largest = max(weights)
    return (weight / largest, math.fsum(w / largest for w in weights)) if largest else (1.0, float(comm.size))
