"""Synchronous data parallelism: every replica takes the step of the mean gradient over the global batch.

Goyal et al. 2017 (eqs. 3 and 4) for the mean over a global batch; Li et al. 2020, "PyTorch Distributed", for buckets
that travel while backward still runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.compress import Cast, Compressor, Memory
from unisono.errors import UnisonoError
from unisono.sync.buckets import Cut, cut, gaps, pack, unpack, views
from unisono.sync.flow import Flow


@dataclass(frozen=True)
class AllReduce:
    """The mean gradient by one reduction per bucket, launched in a fixed order as buckets fill.

    Args:
        bucket_bytes: size of a bucket; a larger one has less overhead, a smaller one more overlap.
        first_bytes: size of the first bucket, which travels first.

    Raises:
        ValueError: a size below 1.
    """

    bucket_bytes: int = 8 << 20
    first_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "first_bytes"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is not a whole number from 1")

    def bind(
        self,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        compress: Compressor,
        *,
        control: int = 0,
        overlap: bool = True,
        sparse: Collection[str] = (),
    ) -> BoundAllReduce:
        """See `Synchronizer.bind`."""
        return BoundAllReduce(self, parameters, comm, compress, control, overlap, frozenset(sparse))


class BoundAllReduce:
    """`AllReduce` in its world; see `BoundSynchronizer` for the order of calls."""

    def __init__(
        self,
        value: AllReduce,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        compress: Compressor,
        control: int,
        overlap: bool,
        sparse: frozenset[str],
    ) -> None:
        self._parameters, self._overlap, self._sparse = parameters, overlap, sparse
        self._silence = [0.0] * control
        cuts = cut(parameters, value.bucket_bytes, value.first_bytes)
        tail = len(parameters) + 8 * control
        if not cuts or not compress.adds_up:  # the tail then travels by itself, as it is
            kind = cuts[-1] if cuts else Cut((), torch.float32, torch.device("cpu"), 0)
            cuts.append(Cut((), kind.dtype, kind.device, 0))
        last = len(cuts) - 1
        self._buckets = [
            _Bucket(c, compress if c.spans else Cast(), comm, tail if i == last else 0) for i, c in enumerate(cuts)
        ]
        self._place = {span.name: (bucket, i) for bucket in self._buckets for i, span in enumerate(bucket.cut.spans)}
        self.begin()

    def begin(self) -> None:
        self._closing = False
        self._control = self._silence
        self._launched = 0
        for bucket in self._buckets:
            bucket.begin()

    def close(self, control: list[float]) -> None:
        self._closing = True
        self._control = control

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        bucket, i = self._place[name]
        if bucket.flow is not None:
            raise UnisonoError(
                f"the gradient of {name} came once more after its exchange had started: backward ran again before "
                "the step was taken, or visits this parameter more than once (set overlap=False, or tell "
                "world.bind how many backward passes make a step)"
            )
        bucket.take(i, gradient.to_dense() if gradient.is_sparse else gradient, weight)
        if self._closing and self._overlap:
            bucket.missing.discard(i)
            self._launch_filled()

    def settle(self) -> MeanGradient:
        while self._launched < len(self._buckets):
            self._launch()
        means = [bucket.wait() for bucket in self._buckets]
        tail = means[-1][self._buckets[-1].cut.numel :]
        used = tail[: len(self._parameters)]
        return MeanGradient(self, means, used, unpack(tail[len(self._parameters) :]))

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass

    def _launch_filled(self) -> None:
        """Start what is complete, in the one order that all workers share; the last bucket waits for `settle`, where
        it is known who was used."""
        while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].missing:
            self._launch()
        if self._launched:
            self._buckets[self._launched - 1].poll()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        if bucket.tail:
            used = [float(seen) for b in self._buckets for seen in b.seen]
            bucket.write_tail(torch.cat([torch.tensor(used), pack(self._control).float()]))
        bucket.launch()
        self._launched += 1


class MeanGradient:
    """What an all-reduce step is about to do; see `Change`."""

    def __init__(self, bound: BoundAllReduce, means: list[Tensor], used: Tensor, control: list[float]) -> None:
        self._bound, self._means, self.control = bound, means, control
        self._used = repeat(True) if not used.numel() or used.min() > 0 else iter((used > 0).tolist())

    def norm(self) -> float:
        """The 2-norm of the mean gradient over all parameters."""
        buckets = self._bound._buckets
        norms = [float(mean[: b.cut.numel].norm()) for b, mean in zip(buckets, self._means) if b.cut.spans]
        return math.sqrt(math.fsum(n * n for n in norms))

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Put ``scale * mean`` into every ``grad`` (None where no worker used the parameter), step, take it out."""
        parameters, sparse = self._bound._parameters, self._bound._sparse
        for bucket, mean in zip(self._bound._buckets, self._means):
            for span, gradient in zip(bucket.cut.spans, bucket.results(mean, scale)):
                kept = gradient.to_sparse(1) if span.name in sparse else gradient
                parameters[span.name].grad = kept if next(self._used) else None
        try:
            return step()
        finally:
            for parameter in parameters.values():
                parameter.grad = None


class _Bucket:
    """One bucket in memory, and its exchange."""

    def __init__(self, plan: Cut, compress: Compressor, comm: Communicator, tail: int) -> None:
        self.cut, self.compress, self.comm, self.tail = plan, compress, comm, tail
        self.memory: Memory = {}
        self.total = comm.allocate(plan.numel + tail, compress.total_dtype(plan.dtype))
        self.parts = views(self.total, plan.spans)
        self.gaps = [self.total[start:stop] for start, stop in gaps(plan)]
        self._views: dict[int, list[Tensor]] = {}
        self._scaled: Tensor | None = None
        self.begin()

    def begin(self) -> None:
        self.seen = [False] * len(self.cut.spans)
        self.missing = set(range(len(self.cut.spans)))
        self.flow: Flow | None = None

    def take(self, i: int, gradient: Tensor, weight: float) -> None:
        self.compress.add(self.parts[i], gradient, weight, not self.seen[i])
        self.seen[i] = True

    def write_tail(self, numbers: Tensor) -> None:
        self.compress.add(self.total[self.cut.numel :], numbers.to(self.cut.device, self.cut.dtype), 1.0, True)

    def launch(self) -> None:
        # Of what was in this memory nothing is left to rely on after the last exchange.
        for silent in [part for part, seen in zip(self.parts, self.seen) if not seen] + self.gaps:
            silent.zero_()
        self.flow = Flow(self.compress.mean(self.total, self.comm, self.memory, self.cut.dtype))

    def poll(self) -> None:
        if self.flow is not None:
            self.flow.poll()

    def wait(self) -> Tensor:
        assert self.flow is not None
        return self.flow.wait()

    def results(self, mean: Tensor, scale: float) -> list[Tensor]:
        """One gradient per span. The mean may be memory that peers read too, so scaling goes to memory of our own."""
        if scale != 1.0:
            if self._scaled is None:
                self._scaled = torch.empty_like(mean)
            mean = torch.mul(mean, scale, out=self._scaled)
        pointer = mean.data_ptr()
        if pointer not in self._views:
            self._views = {pointer: views(mean, self.cut.spans)}
        return self._views[pointer]
