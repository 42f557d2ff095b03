"""The mean of many tensors over all workers: bucket by bucket, in one order, with a control word.

All-reduce takes it of gradients while backward still runs, local SGD and its kin of walks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from unisono.comm import Communicator, Hierarchy
from unisono.compress import Buffered, Cast, CollectiveVerbs, Compressor, CompressorMemory, Mean, Span, views
from unisono.sync.buckets import Cut, cut, gaps, pack, refused, unpack
from unisono.sync.pending_mean import PendingMean

How = Callable[[Compressor, Tensor, Sequence[Span], CollectiveVerbs, CompressorMemory, torch.dtype], Mean]


def mean(
    compress: Compressor,
    total: Tensor,
    spans: Sequence[Span],
    comm: CollectiveVerbs,
    memory: CompressorMemory,
    dtype: torch.dtype,
) -> Mean:
    """The mean as the compressor takes it."""
    return compress.mean(total, spans, comm, memory, dtype)


def by_tiers(tiers: Hierarchy, how: How) -> How:
    """Sums inside each host, the mean between the hosts as `how` takes it, and back: what crosses the network does so
    once per host."""

    def steps(
        compress: Compressor,
        total: Tensor,
        spans: Sequence[Span],
        comm: CollectiveVerbs,
        memory: CompressorMemory,
        dtype: torch.dtype,
    ) -> Mean:
        summed = yield tiers.intra_node.sum(total)
        if tiers.inter_node is None:
            mean = torch.empty(total.numel(), dtype=dtype, device=total.device)
        else:
            mean = yield from how(compress, summed.clone(), spans, tiers.inter_node, memory, dtype)
        return (yield tiers.intra_node.broadcast(mean))  # type: ignore[no-any-return]

    return steps


class BucketedReduction:
    """Per round: `begin`, `add` for what this worker has, `close` before its last, `launch`, `wait`, `commit`.

    Args:
        parameters: name to a tensor of the shape, dtype and device of what is averaged.
        control: length of the control word in numbers.
        overlap: start a bucket as soon as it is full.
        how: takes the mean of one bucket.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        compress: Compressor,
        *,
        bucket_bytes: int,
        first_bytes: int,
        control: int = 0,
        overlap: bool = True,
        how: How = mean,
    ) -> None:
        self.names = tuple(parameters)
        self._comm, self._polled_at = comm, comm.now()
        self._overlap, self._silence = overlap, [0.0] * control
        cuts = cut(parameters, compress, bucket_bytes, first_bytes)
        tail = len(parameters) + 8 * control
        # What takes more than one message starts the later ones when polled, which no two workers do at the same
        # moment: such buckets have a conversation of their own, in which one is over before the next begins.
        tiers = comm.hierarchy("hops")
        self._peers = tiers.inter_node.size if tiers and tiers.inter_node else comm.size
        add_up = [how is mean and c.compress.adds_up for c in cuts]
        lane = comm if tiers or all(add_up) else comm.channel("hops")
        self._gradients = [
            Bucket(c, comm, lane, how=how, tiers=tiers, tail=tail if how is mean and c is cuts[-1] else 0) for c in cuts
        ]
        self._apart: list[Bucket] = []  # for a tail that travels by itself, as it is
        if not add_up or not add_up[-1]:
            nothing = Cut((), torch.float32, cuts[-1].device if cuts else torch.device("cpu"), 0, Cast())
            self._apart = [Bucket(nothing, comm, comm, how=mean, tiers=tiers, tail=tail)]
        self._place = {span.name: (bucket, i) for bucket in self._gradients for i, span in enumerate(bucket.cut.spans)}
        self.begin()

    @property
    def cuts(self) -> list[Cut]:
        """How the parameters lie in the buckets."""
        return [bucket.cut for bucket in self._gradients]

    def begin(self) -> None:
        """A new round; what was added to one that was not committed is forgotten."""
        self._closing = False
        self._control = self._silence
        self._launched = 0
        self._queue: deque[Bucket] = deque()
        for bucket in [*self._gradients, *self._apart]:
            bucket.begin()
        carried = bool(self._gradients) and self._gradients[-1].carries
        self._buckets = self._gradients if carried else self._gradients + self._apart

    def close(self, control: list[float]) -> None:
        """What is added from now on is this worker's last of the round."""
        self._closing = True
        self._control = control

    def under_way(self, name: str) -> bool:
        """Whether the bucket of `name` has been launched."""
        return self._place[name][0].launched

    def add(self, name: str, tensor: Tensor, weight: float) -> None:
        """``weight * tensor`` goes into the mean of `name`; buckets that are full by that start."""
        bucket, i = self._place[name]
        bucket.add(i, tensor, weight)
        if self._closing and self._overlap:
            bucket.missing.discard(i)
            while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].missing:
                self._launch_next()
            self.poll()

    def fold(self) -> None:
        """All gradients of a micro-batch have been added. Raises as `Compressor.add` does."""
        for bucket in self._gradients[self._launched :]:
            bucket.fold()

    def launch(self) -> None:
        """Start whatever has not been started."""
        while self._launched < len(self._buckets):
            self._launch_next()

    def poll(self) -> None:
        """Go on without waiting. Once per moment: a simulated worker that polls the same work twice at the same moment
        is taken for one that waits."""
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

    def wait(self) -> Agreed:
        """Wait for all means. Raises `PeerLost`, `MessageMismatch`."""
        self.launch()
        while self._queue:
            self._queue.popleft().wait()
            self._start_queued()
        means = [bucket.wait() for bucket in self._buckets]
        tail = means[-1][self._buckets[-1].cut.numel :]
        used = tail[: len(self.names)]
        return Agreed(self._buckets, means, used, unpack(tail[len(self.names) :]))

    def commit(self) -> None:
        """The means are used: what was left out of them is owed from now on."""
        for bucket in self._buckets:
            bucket.memory.commit()

    def residual_state(self) -> dict[str, Tensor]:
        """Between two rounds: what this worker's messages have left out so far."""
        return {
            f"{self._kept_under(i)}/{key}": tensor
            for i, bucket in enumerate(self._gradients)
            for key, tensor in bucket.memory.state_dict().items()
        }

    def load_residuals(self, owed: Mapping[str, Tensor]) -> None:
        """Between two rounds, load the `residual_state` of an earlier attempt with as many workers and buckets."""
        for i, bucket in enumerate(self._gradients):
            bucket.memory.load_state_dict(under(self._kept_under(i), owed), bucket.cut.device)
        self.begin()

    def _kept_under(self, bucket: int) -> str:
        return f"{bucket} of {len(self._gradients)} between {self._peers}"

    def _launch_next(self) -> None:
        """In the one order that all workers share. The last bucket waits for `launch`, where it is known who was
        used."""
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
    """What of `state` has names that begin with ``prefix/``, without that."""
    return {name.removeprefix(f"{prefix}/"): t for name, t in state.items() if name.startswith(f"{prefix}/")}


class Agreed:
    """The means of one round."""

    def __init__(self, buckets: list[Bucket], means: list[Tensor], used: Tensor, control: list[float]) -> None:
        self._buckets, self.means, self.control = buckets, means, control
        self._used = [True] * used.numel() if not used.numel() or used.min() > 0 else (used > 0).tolist()

    def norms(self) -> list[float]:
        """The 2-norm of each bucket."""
        return [float(flat.norm()) for flat in self.flats()]

    def flats(self, scale: float = 1.0) -> list[Tensor]:
        """``scale * mean`` of each bucket, laid out as in `BucketedReduction.cuts`, to be read only and until the next
        round."""
        means = zip(self._buckets, self.means)
        return [bucket.scaled(mean, scale)[: bucket.cut.numel] for bucket, mean in means if bucket.cut.spans]

    def results(self, scale: float = 1.0) -> dict[str, Tensor | None]:
        """``scale * mean`` by name, to be read only and until the next round; None for what no worker added to."""
        used = iter(self._used)
        return {
            span.name: result if next(used) else None
            for bucket, mean in zip(self._buckets, self.means)
            for span, result in zip(bucket.cut.spans, bucket.results(mean, scale))
        }


class Bucket:
    """One bucket in memory, and its exchange, which `hops` if it takes more than one message; then on `channel`.

    Args:
        tail: room at the end for as many numbers, which travel along where the round's exchange `carries` them.
    """

    def __init__(
        self, plan: Cut, comm: Communicator, lane: Communicator, *, how: How, tiers: Hierarchy | None, tail: int
    ) -> None:
        self.cut, self._tail, self._tiers, self._how = plan, tail, tiers, how
        self._comm, self._lane = comm, lane
        self.memory = CompressorMemory()
        self.total = (tiers.intra_node if tiers else comm).allocate(
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
        self.seen = [False] * len(self.cut.spans)
        self._unfolded: set[int] = set()
        self._folded: set[int] = set()
        self.missing = set(range(len(self.cut.spans)))
        self.launched = False
        self._flow: PendingMean | None = None
        self.memory.discard()
        one_message = self._how is mean and self.cut.compress.is_one_sum(self.memory)
        self.carries = one_message and self._tail > 0
        self.hops = self._tiers is not None or not one_message

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
                self.cut.compress.add(self.parts[i], tensor, weight, i not in self._folded)
            except ValueError as error:
                raise refused(self.cut.spans[i].name, error) from error
            self._folded.add(i)
        self.seen[i] = True

    def fold(self) -> None:
        """What was written goes into the total, in one piece where nothing is missing. Raises `ValueError`, which
        names the parameter."""
        unfolded, self._unfolded = self._unfolded, set()
        if self._collects and unfolded:
            if len(unfolded) == len(self.parts) and len(self._folded) in (0, len(self.parts)):
                try:
                    self._collects.fold(self.total[: self.cut.numel], self._buffer, not self._folded)
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
                raise refused(self.cut.spans[i].name, error) from error

    def write_tail(self, numbers: Tensor) -> None:
        self.total[self.cut.numel :].copy_(numbers)  # whole numbers up to 255, which every kind of total holds

    def seal(self) -> None:
        """Nothing more is added. Of what was in this memory nothing is left to rely on after the last exchange."""
        self.fold()
        self.launched = True
        for silent in [part for part, seen in zip(self.parts, self.seen) if not seen] + self.gaps:
            silent.zero_()

    def start(self) -> None:
        plan, comm = self.cut, self._lane if self.hops else self._comm
        total = self.total[: plan.numel + self._tail * self.carries]
        how = by_tiers(self._tiers, self._how) if self._tiers else self._how
        self._flow = PendingMean(how(plan.compress, total, plan.spans, comm, self.memory, plan.dtype))

    def poll(self) -> bool:
        return self._flow is not None and self._flow.poll()

    def wait(self) -> Tensor:
        assert self._flow is not None
        return self._flow.wait()

    def scaled(self, mean: Tensor, scale: float) -> Tensor:
        """``scale * mean``. The mean may be memory that peers read too, so scaling goes to memory of our own."""
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
            self._views = {pointer: views(mean, self.cut.spans)}
        return self._views[pointer]
