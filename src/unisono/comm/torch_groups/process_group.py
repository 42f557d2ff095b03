"""Process groups of torch (gloo, NCCL) as a communicator, without torch's default group or environment variables.

A channel has two groups. One carries headers, always on gloo: when an operation is started, every worker sends its
record to all others. The other carries payloads, issued strictly in order once the headers agree. One group is not
enough: the header of a later operation is sent before the payload of an earlier one is issued, and a group needs the
same order on all workers. As sizes are compared first, gloo never receives a size that would abort the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono.comm import header_record as record
from unisono.comm.hierarchy import Hierarchy
from unisono.comm.operation_queue import Blocked, ChannelSet, Operation, OperationQueue, Steps
from unisono.comm.rendezvous.prefix_store import PrefixedStore
from unisono.comm.torch_groups.backend_groups import BackendGroups, raise_peer_lost
from unisono.errors import CommunicationError, PeerLost
from unisono.system.backoff import Backoff

# gloo can add these; others are widened for the sum.
_GLOO_ADDS = {
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
# The operation queue has the deadline; gloo's own deadline must never pass before it.
_LONG = timedelta(days=1)
_ALIGNMENT_BYTES = 16
_CHECK_SECONDS = 0.1  # between two checks of the connections while nothing arrives
_SLICE_SECONDS = 0.05  # the longest wait in the backend at a time, as it cannot be aborted
_LONGEST_BROKEN_SECONDS = 5.0
_BACKOFF = Backoff(first_seconds=20e-6, factor=1.1, longest_seconds=500e-6)


class TorchGroup(OperationQueue):
    """A communicator over gloo or NCCL. Collective: the constructor connects the peers.

    Args:
        store: a store that the peers share, without keys of an earlier group.
        rank, size: the number of this worker in the group, and how many workers the group has.
        channels: the channels of the communicator that this group belongs to; None: it begins a new communicator.
        backend: what transfers payloads, ``gloo`` or ``nccl``.
        device: the device of payloads (NCCL).
        address: the address of this host, as the peers reach it.
        timeout_seconds: how long to wait for a peer, while connecting and in every operation.

    Raises:
        PeerLost: not all peers connected within the deadline, or the communicator was aborted.
        InvalidInput: this build of torch has no such backend.
    """

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        channels: ChannelSet | None = None,
        *,
        backend: str = "gloo",
        device: torch.device | None = None,
        address: str = "127.0.0.1",
        timeout_seconds: float = 60.0,
    ) -> None:
        super().__init__(channels or ChannelSet.create(address, timeout_seconds), timeout_seconds)
        self.rank, self.size = rank, size
        self._store: c10d.Store | None = store
        self._backend, self._address = backend, address
        self._device = device or torch.device("cpu")
        self._sequence = 0
        self._checked_at, self._broken_since = 0.0, 0.0
        self._groups: BackendGroups | None = None
        self._groups = BackendGroups(store, rank, size, backend=backend, device=self._device, address=address,
                                     timeout_seconds=timeout_seconds, abort=self._channels.abort)  # fmt: skip

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def sum(self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Operation[Tensor]:
        def payload() -> Steps[Tensor]:
            flat = x.detach().reshape(-1)
            wide = flat if self._can_add(x) else flat.to(_wider(x.dtype))
            if flat.numel():
                options = c10d.AllreduceOptions()
                options.timeout = _LONG
                yield from self._transfer("sum", wide, lambda group: group.allreduce([wide], options))
                # In a ring, each worker sends the tensor twice, both times without one of its `size` parts.
                self._channels.bytes_sent += 2 * (self.size - 1) * wide.numel() * wide.element_size() // self.size
            return (wide.to(x.dtype).to(dtype or x.dtype) if out is None else out.copy_(wide.to(x.dtype))).view(x.shape)

        return self._start(payload, "sum", x.numel(), x.dtype, to=dtype)

    def gather(self, x: Tensor) -> Operation[Tensor]:
        def payload() -> Steps[Tensor]:
            rows = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
            if x.numel():
                own, gathered = _as_bytes(x), _as_bytes(rows)
                options = c10d.AllgatherOptions()
                options.timeout = _LONG
                yield from self._transfer("gather", x, lambda group: group._allgather_base(gathered, own, options))
                self._channels.bytes_sent += (self.size - 1) * own.numel()
            return rows

        return self._start(payload, "gather", x.numel(), x.dtype)

    def broadcast(self, x: Tensor, root: int = 0) -> Operation[Tensor]:
        def payload() -> Steps[Tensor]:
            if x.numel():
                whole = x.detach().contiguous()
                options = c10d.BroadcastOptions()
                options.rootRank, options.timeout = root, _LONG
                yield from self._transfer(
                    "broadcast", whole, lambda group: group.broadcast([_as_bytes(whole)], options)
                )
                self._channels.bytes_sent += (self.size - 1) * whole.nbytes if self.rank == root else 0
                if not x.is_contiguous():
                    x.detach().copy_(whole)
            return x

        record.check_root(root, self.size)
        return self._start(payload, "broadcast", x.numel(), x.dtype, root)

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Operation[list[Tensor]]:
        def payload() -> Steps[list[Tensor]]:
            received = yield from self._all_to_all("exchange", sends, expects)
            return [received[rank] for rank in range(self.size)]

        record.check_all_ranks(xs, like, self.size)
        sends, expects = dict(enumerate(xs)), dict(enumerate(like))
        return self._start(payload, "exchange", sends=sends, expects=expects)

    def swap(self, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> Operation[dict[int, Tensor]]:
        record.check_neighbours(xs, like, self.rank, self.size)
        sends, expects = dict(xs), dict(like)
        return self._start(lambda: self._all_to_all("swap", sends, expects), "swap", sends=sends, expects=expects)

    def set_hierarchy(self, hierarchy: Hierarchy) -> None:
        """Have `Communicator.hierarchy` return duplicates of `hierarchy`, which is closed with this communicator."""
        self._channels.hierarchy = hierarchy

    def channel(self, name: str) -> TorchGroup:
        if self._store is None:
            raise PeerLost([], "channel", "this end was closed")
        store = PrefixedStore(f"channel/{name}", self._store)
        channel = TorchGroup(store, self.rank, self.size, self._channels, backend=self._backend, device=self._device,
                             address=self._address, timeout_seconds=self._timeout_seconds)  # fmt: skip
        channel.name = name
        return channel

    def close(self) -> None:
        is_first = self._channels.queues[0] is self
        if is_first:
            self._channels.actor_host.close()
            if self._channels.hierarchy:
                self._channels.hierarchy.close()
        for channel in self._channels.queues if is_first else [self]:
            assert isinstance(channel, TorchGroup)
            channel._end()
            channel._release()

    def _start(
        self, payload: Callable[[], Steps[Any]], verb: str, numel: int = -1, dtype: torch.dtype | None = None,
        root: int = -1, sends: Mapping[int, Tensor] | None = None, expects: Mapping[int, Tensor] | None = None,
        to: torch.dtype | None = None,
    ) -> Operation[Any]:  # fmt: skip
        """Send the header at once, whatever else is in flight; the payload follows after earlier ones."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        agreed = record.agreed_part(verb, sequence, numel, dtype, root, to=to)
        numbers = [*agreed, *record.pairs(self.size, sends or {}), *record.pairs(self.size, expects or {})]
        # All-to-all sends to every peer directly: a ring would take as many messages in sequence as there are peers.
        own = torch.tensor(numbers).repeat(self.size)
        gathered = torch.empty_like(own)
        options = c10d.AllToAllOptions()
        options.timeout = _LONG
        handle = None
        self._check_abort(verb)
        try:
            if self._failure is None:
                with raise_peer_lost(verb):
                    assert self._groups is not None
                    handle = self._groups.track(self._groups.headers.alltoall_base(gathered, own, [], [], options))
        except PeerLost as error:
            self._fail(error)
        return self._enqueue(verb, self._steps(verb, sequence, handle, gathered.view(self.size, -1), payload))

    def _steps(
        self, verb: str, sequence: int, handle: Any, records: Tensor, payload: Callable[[], Steps[Any]]
    ) -> Steps[Any]:
        yield from self._until_complete(verb, handle, released=False)
        rows = records.tolist()
        record.check_agreed([row[: record.AGREED] for row in rows])
        middle = record.AGREED + self.size
        record.check_pairs(
            sequence, verb, [row[record.AGREED : middle] for row in rows], [row[middle:] for row in rows]
        )
        result = yield from payload()
        return result

    def _until_complete(self, verb: str, handle: Any, released: bool) -> Steps[None]:
        blocked = Blocked(released, handle)
        while not handle.is_completed():
            yield blocked
        with raise_peer_lost(verb):
            handle.wait()
        self._progress += 1

    def _transfer(self, verb: str, x: Tensor, issue: Callable[[Any], Any]) -> Steps[None]:
        """Issue an operation on the group for the device of `x`, and wait for it."""
        assert self._groups is not None
        with raise_peer_lost(verb):
            handle = self._groups.track(issue(self._groups.carrying(x)))
        self._progress += 1
        yield from self._until_complete(verb, handle, released=True)

    def _all_to_all(self, verb: str, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> Steps[dict[int, Tensor]]:
        """One segment for each peer, which may be empty; this worker's message to itself is copied here."""
        sends = {rank: x for rank, x in xs.items() if rank != self.rank}
        expects = {rank: x for rank, x in like.items() if rank != self.rank}
        outgoing = [_padded(sends[rank].nbytes) if rank in sends else 0 for rank in range(self.size)]
        incoming = [_padded(expects[rank].nbytes) if rank in expects else 0 for rank in range(self.size)]
        device = next((x.device for x in (*sends.values(), *expects.values())), torch.device("cpu"))
        sent = torch.empty(sum(outgoing), dtype=torch.uint8, device=device)
        received = torch.empty(sum(incoming), dtype=torch.uint8, device=device)
        for rank, segment in enumerate(torch.split(sent, outgoing)):
            if rank in sends:
                segment[: sends[rank].nbytes].copy_(_as_bytes(sends[rank]))
        options = c10d.AllToAllOptions()
        options.timeout = _LONG
        yield from self._transfer(
            verb, sent, lambda group: group.alltoall_base(received, sent, incoming, outgoing, options)
        )
        self._channels.bytes_sent += sum(x.nbytes for x in sends.values())
        segments = torch.split(received, incoming)
        return {
            rank: _as_bytes(xs[rank]).clone().view(x.dtype).view(x.shape)
            if rank == self.rank
            else segments[rank][: x.nbytes].view(x.dtype).view(x.shape)
            for rank, x in like.items()
        }

    def _communicator(self) -> TorchGroup:
        return self

    def _can_add(self, x: Tensor) -> bool:
        return (self._backend != "gloo" and x.device.type != "cpu") or x.dtype in _GLOO_ADDS

    def _pause(self, attempt: int, operation: Operation[Any]) -> None:
        """Sleep until the oldest operation can continue; in short slices if other channels need this thread."""
        siblings = self._siblings()
        for channel in siblings:
            channel.advance()
        assert operation.blocked is not None
        handle = operation.blocked.on
        if siblings or handle.is_completed() or self._backend != "gloo":
            time.sleep(_BACKOFF.seconds(attempt))
            return
        with suppress(RuntimeError):  # a timeout of this slice, or an error, which the next poll finds
            handle.wait(timedelta(seconds=min(_SLICE_SECONDS, self._timeout_seconds)))

    def _lost(self, now: float, operation: Operation[Any]) -> PeerLost | None:
        """The error if a connection has been closed for some time.

        Backends close a broken connection, but do not always wake operations that wait for it. A peer that has
        finished its part may close its end too: so data of other peers is still awaited for a while.
        """
        if now - self._checked_at < _CHECK_SECONDS:
            return None
        self._checked_at = now
        if self._groups is None or self._groups.all_open:
            return None
        self._broken_since = self._broken_since or now
        since = max(self._broken_since, self._blocked_since or now)
        if now - since < min(_LONGEST_BROKEN_SECONDS, self._timeout_seconds / 8):
            return None
        return PeerLost((), operation.verb, "a connection was closed")

    def _notify_peers(self, error: CommunicationError) -> None:
        if isinstance(error, PeerLost):
            self._release()

    def _release(self) -> None:
        """Close the connections, which notifies the peers."""
        self._store = None
        if self._groups is not None:
            self._groups.close()


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else torch.int64


def _as_bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _padded(nbytes: int) -> int:
    """`nbytes` rounded up, so that a tensor of any dtype may begin right after so many bytes."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
