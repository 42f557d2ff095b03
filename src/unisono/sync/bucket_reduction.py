"""Averages many tensors over all workers, bucket by bucket in one order, and sums a control word.

All-reduce uses it for gradients while backward runs; periodic algorithms use it for local updates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from unisono.comm import Communicator, Hierarchy
from unisono.compress import Buffered, Cast, CollectiveVerbs, Compressor, CompressorMemory, Mean, Span, views
from unisono.sync.buckets import BucketPlan, gaps, pack, refused, unpack
from unisono.sync.pending_mean import PendingMean

ReduceFunction = Callable[[Compressor, Tensor, Sequence[Span], CollectiveVerbs, CompressorMemory, torch.dtype], Mean]


def mean(
    compress: Compressor,
    total: Tensor,
    spans: Sequence[Span],
    comm: CollectiveVerbs,
    memory: CompressorMemory,
    dtype: torch.dtype,
) -> Mean:
    """Collective: the mean of one bucket as `Compressor.mean` computes it."""
    return compress.mean(total, spans, comm, memory, dtype)


def hierarchical(hierarchy: Hierarchy, how: ReduceFunction) -> ReduceFunction:
    """A reduction on two levels: a sum inside each host, `how` between hosts, and a broadcast inside each host.

    So each host sends only one message over the network.
    """

    def steps(
        compress: Compressor,
        total: Tensor,
        spans: Sequence[Span],
        comm: CollectiveVerbs,
        memory: CompressorMemory,
        dtype: torch.dtype,
    ) -> Mean:
        summed = yield hierarchy.intra_node.sum(total)
        if hierarchy.inter_node is None:
            mean = torch.empty(total.numel(), dtype=dtype, device=total.device)
        else:
            mean = yield from how(compress, summed.clone(), spans, hierarchy.inter_node, memory, dtype)
        return (yield hierarchy.intra_node.broadcast(mean))  # type: ignore[no-any-return]

    return steps


class BucketedReduction:
    """Averages named tensors over all workers, in rounds.

    A round calls `begin`, `add` for each tensor, `launch`, `wait` and `commit`; and `close` before the last `add` of
    each tensor.

    Args:
        plans: of the buckets, from `plan_buckets`.
        control: the length of the control word, in numbers.
        overlap: whether the exchange of a bucket starts as soon as the bucket is full.
        how: the function that takes the mean of one bucket.

    Attributes:
        plans: of the buckets.
    """

    def __init__(
        self,
        plans: Sequence[BucketPlan],
        comm: Communicator,
        *,
        control: int = 0,
        overlap: bool = True,
        how: ReduceFunction = mean,
    ) -> None:
        self.plans, self._count = plans, sum(len(plan.spans) for plan in plans)
        self._comm, self._polled_at = comm, comm.now()
        self._overlap, self._zero_control = overlap, [0.0] * control
        tail = self._count + 8 * control
        # An exchange of several messages starts the later messages when it is polled, at different moments on
        # different workers. So such buckets have a separate channel, which completes a bucket before it begins another.
        hierarchy = comm.hierarchy("hops")
        self._peers = hierarchy.inter_node.size if hierarchy and hierarchy.inter_node else comm.size
        add_up = [how is mean and c.compress.is_additive for c in plans]
        channel = comm if hierarchy or all(add_up) else comm.channel("hops")
        self._gradients = [
            Bucket(c, comm, channel, how=how, hierarchy=hierarchy, tail=tail if how is mean and c is plans[-1] else 0)
            for c in plans
        ]
        self._tail: list[Bucket] = []  # an uncompressed bucket for the tail, if no other bucket can carry it
        if not add_up or not add_up[-1]:
            empty = BucketPlan((), torch.float32, plans[-1].device if plans else torch.device("cpu"), 0, Cast())
            self._tail = [Bucket(empty, comm, comm, how=mean, hierarchy=hierarchy, tail=tail)]
        self._place = {span.name: (bucket, i) for bucket in self._gradients for i, span in enumerate(bucket.plan.spans)}
        self.begin()

    def begin(self) -> None:
        """Begin a round. The previous round, if it was not committed, is discarded."""
        self._closing = False
        self._control = self._zero_control
        self._launched = 0
        self._queue: deque[Bucket] = deque()
        for bucket in [*self._gradients, *self._tail]:
            bucket.begin()
        carried = bool(self._gradients) and self._gradients[-1].carries
        self._buckets = self._gradients if carried else self._gradients + self._tail

    def close(self, control: list[float]) -> None:
        """Announce that each following `add` is the last one for its name in this round."""
        self._closing = True
        self._control = control

    def is_launched(self, name: str) -> bool:
        """Whether the bucket of `name` has been launched."""
        return self._place[name][0].launched

    def add(self, name: str, tensor: Tensor, weight: float) -> None:
        """Add ``weight * tensor`` to the mean of `name`, and start the buckets that are now full."""
        bucket, i = self._place[name]
        bucket.add(i, tensor, weight)
        if self._closing and self._overlap:
            bucket.missing.discard(i)
            while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].missing:
                self._launch_next()
            self.poll()

    def fold(self) -> None:
        """Move buffered gradients into the totals, after a micro-batch has added all its gradients.

        Raises what `Compressor.add` raises.
        """
        for bucket in self._gradients[self._launched :]:
            bucket.fold()

    def launch(self) -> None:
        """Start all buckets that have not been started."""
        while self._launched < len(self._buckets):
            self._launch_next()

    def poll(self) -> None:
        """Let the exchanges make progress without blocking, at most once per instant of the clock.

        A worker that polls the same work twice at one instant counts as blocked in the simulator.
        """
        now = self._comm.now()
        if now == self._polled_at:
            return
        self._polled_at = now
        while self._queue and self._queue[0].poll():
            self._queue.popleft()
            self._start_queued()
        for bucket in self._buckets[: self._launched]:
            if not bucket.hops:
                bucket.poll()

    def is_complete(self) -> bool:
        """After `launch`: make progress without blocking, and return whether `wait` returns at once."""
        self.poll()
        return not self._queue and all(bucket.poll() for bucket in self._buckets)

    def wait(self) -> RoundMeans:
        """Collective: wait for the means of all buckets. Raises `PeerLost`, `MessageMismatch`."""
        self.launch()
        while self._queue:
            self._queue.popleft().wait()
            self._start_queued()
        means = [bucket.wait() for bucket in self._buckets]
        tail = means[-1][self._buckets[-1].plan.numel :]
        used, control = tail[: self._count], unpack(tail[self._count :])
        return RoundMeans(self._buckets, means, used, control)

    def commit(self) -> None:
        """Commit the residuals of this round; called once its means are applied."""
        for bucket in self._buckets:
            bucket.memory.commit()

    def residual_state(self) -> dict[str, Tensor]:
        """Between two rounds: this worker's error-feedback residuals."""
        return {
            f"{self._state_key(i)}/{key}": tensor
            for i, bucket in enumerate(self._gradients)
            for key, tensor in bucket.memory.state_dict().items()
        }

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Between two rounds: load the `residual_state` of an earlier attempt with as many workers and buckets."""
        for i, bucket in enumerate(self._gradients):
            bucket.memory.load_state_dict(under(self._state_key(i), residuals), bucket.plan.device)
        self.begin()

    def _state_key(self, bucket: int) -> str:
        return f"{bucket} of {len(self._gradients)} between {self._peers}"

    def _launch_next(self) -> None:
        """Start the next bucket, in the order that all workers share.

        Only `launch` starts the last bucket, because its tail says which parameters were used in the round.
        """
        bucket = self._buckets[self._launched]
        if bucket is self._buckets[-1]:
            used = [float(seen) for b in self._buckets for seen in b.seen]
            bucket.write_tail(torch.cat([torch.tensor(used), pack(self._control).float()]))
        bucket.seal()
        if bucket.hops:
            self._queue.append(bucket)
            if len(self._queue) == 1:
                self._start_queued()
        else:
            bucket.start()
        self._launched += 1

    def _start_queued(self) -> None:
        if self._queue:
            self._queue[0].start()


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `state` whose names begin with ``prefix/``, by their names without that prefix."""
    return {name.removeprefix(f"{prefix}/"): t for name, t in state.items() if name.startswith(f"{prefix}/")}


class RoundMeans:
    """The means of one round, by bucket and by name, and the sum of the control words."""

    def __init__(self, buckets: list[Bucket], means: list[Tensor], used: Tensor, control: list[float]) -> None:
        self._buckets, self.means, self.control = buckets, means, control
        self._used = [True] * used.numel() if not used.numel() or used.min() > 0 else (used > 0).tolist()

    @property
    def unused(self) -> frozenset[str]:
        """The names to whose means no worker added."""
        if all(self._used):
            return frozenset()
        names = (span.name for bucket in self._buckets for span in bucket.plan.spans)
        return frozenset(name for name, used in zip(names, self._used) if not used)

    @property
    def plans(self) -> list[BucketPlan]:
        """The plans of the buckets that have parameters, in the order of `flats`."""
        return [bucket.plan for bucket in self._buckets if bucket.plan.spans]

    def norms(self) -> list[float]:
        """The 2-norm of the mean of each bucket."""
        return [float(flat.norm()) for flat in self.flats()]

    def flats(self, scale: float = 1.0) -> list[Tensor]:
        """``scale * mean`` of each bucket, in the order of `BucketedReduction.plans`.

        The tensors are read-only, and valid until the next round. If `scale` is not 1, they are in a buffer that the
        next call of `flats` or `results` with another scale overwrites.
        """
        means = zip(self._buckets, self.means)
        return [bucket.scaled(mean, scale)[: bucket.plan.numel] for bucket, mean in means if bucket.plan.spans]

    def results(self, scale: float = 1.0) -> dict[str, Tensor | None]:
        """``scale * mean`` of each tensor by name; None if no worker added to that tensor in this round.

        The tensors are read-only, and valid for as long as those of `flats`.
        """
        used = iter(self._used)
        return {
            span.name: result if next(used) else None
            for bucket, mean in zip(self._buckets, self.means)
            for span, result in zip(bucket.plan.spans, bucket.results(mean, scale))
        }


class Bucket:
    """One bucket: the memory in which its tensors are summed, and the exchange of the sum.

    Args:
        channel: the channel for an exchange of several messages.
        tail: how many numbers follow the tensors: the flags of used parameters, and the control word.

    Attributes:
        hops: whether this round's exchange takes several messages, on `channel`.
        carries: whether this round's exchange contains the tail.
    """

    def __init__(
        self,
        plan: BucketPlan,
        comm: Communicator,
        channel: Communicator,
        *,
        how: ReduceFunction,
        hierarchy: Hierarchy | None,
        tail: int,
    ) -> None:
        self.plan, self._tail, self._hierarchy, self._how = plan, tail, hierarchy, how
        self._comm, self._channel = comm, channel
        self.memory = CompressorMemory()
        self.total = (hierarchy.intra_node if hierarchy else comm).allocate(
            plan.numel + tail, plan.compress.total_dtype(plan.dtype)
        )
        self.parts = views(self.total, plan.spans)
        self._collects = plan.compress.buffered
        if self._collects:
            dtype = self._collects.buffer_dtype(plan.dtype)
            self._buffer = torch.zeros(plan.numel, dtype=dtype, device=plan.device)
            self._written = views(self._buffer, plan.spans)
        self.gaps = [self.total[start:stop] for start, stop in gaps(plan)]
        self._views: dict[int, list[Tensor]] = {}
        self._scaled: Tensor | None = None
        self.begin()

    def begin(self) -> None:
        self.seen = [False] * len(self.plan.spans)
        self._unfolded: set[int] = set()
        self._folded: set[int] = set()
        self.missing = set(range(len(self.plan.spans)))
        self.launched = False
        self._pending: PendingMean | None = None
        self.memory.discard()
        one_message = self._how is mean and self.plan.compress.is_one_sum(self.memory)
        self.carries = one_message and self._tail > 0
        self.hops = self._hierarchy is not None or not one_message

    def add(self, i: int, tensor: Tensor, weight: float) -> None:
        if self._collects and self._collects.writes(weight):
            if i in self._unfolded:
                self.fold()
            self._collects.write(self._written[i], tensor, weight)
            self._unfolded.add(i)
            if len(self._unfolded) == len(self.parts):
                self.fold()
        else:
            try:
                self.plan.compress.add(self.parts[i], tensor, weight, i not in self._folded)
            except ValueError as error:
                raise refused(self.plan.spans[i].name, error) from error
            self._folded.add(i)
        self.seen[i] = True

    def fold(self) -> None:
        """Move the buffered gradients into the total, in one call if all parts are buffered.

        Raises:
            ValueError: the compressor refuses a gradient; the message names its parameter.
        """
        unfolded, self._unfolded = self._unfolded, set()
        if self._collects and unfolded:
            if len(unfolded) == len(self.parts) and len(self._folded) in (0, len(self.parts)):
                try:
                    self._collects.fold(self.total[: self.plan.numel], self._buffer, not self._folded)
                except ValueError:
                    self._fold_each(self._collects, unfolded)
                    raise
            else:
                self._fold_each(self._collects, unfolded)
            self._folded |= unfolded

    def _fold_each(self, collects: Buffered, which: set[int]) -> None:
        for i in sorted(which):
            try:
                collects.fold(self.parts[i], self._written[i], i not in self._folded)
            except ValueError as error:
                raise refused(self.plan.spans[i].name, error) from error

    def write_tail(self, numbers: Tensor) -> None:
        self.total[self.plan.numel :].copy_(numbers)  # whole numbers up to 255, exact in every dtype of totals

    def seal(self) -> None:
        """Complete the total. Parts without a gradient are set to 0, because the previous exchange overwrote them."""
        self.fold()
        self.launched = True
        for unused in [part for part, seen in zip(self.parts, self.seen) if not seen] + self.gaps:
            unused.zero_()

    def start(self) -> None:
        plan, comm = self.plan, self._channel if self.hops else self._comm
        total = self.total[: plan.numel + self._tail * self.carries]
        how = hierarchical(self._hierarchy, self._how) if self._hierarchy else self._how
        self._pending = PendingMean(how(plan.compress, total, plan.spans, comm, self.memory, plan.dtype))

    def poll(self) -> bool:
        return self._pending is not None and self._pending.poll()

    def wait(self) -> Tensor:
        assert self._pending is not None
        return self._pending.wait()

    def scaled(self, mean: Tensor, scale: float) -> Tensor:
        """``scale * mean``, in separate memory, because peers may still read the memory of `mean`."""
        if scale == 1.0:
            return mean
        if self._scaled is None:
            self._scaled = torch.empty_like(mean)
        return torch.mul(mean, scale, out=self._scaled)

    def results(self, mean: Tensor, scale: float) -> list[Tensor]:
        """One view of ``scale * mean`` per span."""
        mean = self.scaled(mean, scale)
        pointer = mean.data_ptr()
        if pointer not in self._views:
            self._views = {pointer: views(mean, self.plan.spans)}
        return self._views[pointer]
