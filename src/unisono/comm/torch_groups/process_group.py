"""Process groups of torch (gloo, NCCL) as a communicator, without torch's default group or any variable.

A lane is two groups. One carries headers, always on gloo: one all-gather of a record per verb, issued when
the verb is started. The other carries payloads, issued strictly in order once the headers are known to
agree. Two are needed because the header of a later verb is on its way before the payload of an earlier one
is issued, and a group must see the same order on all workers. As sizes are compared first, gloo never meets
a size that would abort the process.
"""

from __future__ import annotations

import ctypes
import hmac
import ipaddress
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono.comm import header_record as record
from unisono.comm.abort import Abort
from unisono.comm.actors.services import ActorHost
from unisono.comm.hierarchy import Hierarchy
from unisono.comm.host import sources
from unisono.comm.operation_queue import Blocked, ChannelSet, Operation, OperationQueue, Steps
from unisono.comm.process_sockets import (
    End,
    admit_only,
    connected,
    is_open,
    listening,
    read_end,
    refuse_connections,
    shut,
)
from unisono.comm.rendezvous.prefix_store import PrefixedStore
from unisono.comm.rendezvous.store_exchange import AbortableStore, StoreExchange
from unisono.errors import CommunicationError, InvalidInput, PeerLost
from unisono.system.backoff import Backoff

# gloo can add these; others are widened for the sum.
_GLOO_ADDS = {
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
# The deadline is ours; gloo's own must only never come first.
_LONG = timedelta(days=1)
_ALIGNMENT_BYTES = 16
_LOOK_SECONDS = 0.1  # between two looks at the sockets while nothing arrives
_SLICE_SECONDS = 0.05  # for as long, nobody listens to anybody but the backend
_LONGEST_TORN_SECONDS = 5.0
_UNWIND_SECONDS = 1.0
_BACKOFF = Backoff(first_seconds=20e-6, factor=1.1, longest_seconds=500e-6)


class TorchGroup(OperationQueue):
    """Peers that talk through gloo or NCCL.

    Args:
        store: where the peers find each other; must hold nothing from an earlier group.
        rank, size: this worker's number among the peers, and how many there are.
        backend: what carries payloads, ``gloo`` or ``nccl``.
        device: where payloads live (NCCL).
        address: the address of this host by which the peers reach it.
        service_address: the same for actors; None: `address`.
        timeout_seconds: how long a peer may stay silent, at start and in every verb.
        abort: breaks off all that waits, now and later.
        secret, encrypted: those of `ActorHost`.

    Raises:
        PeerLost: not all peers came within the deadline, or it was broken off.
        InvalidInput: this build of torch has no such backend.
    """

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        *,
        backend: str = "gloo",
        device: torch.device | None = None,
        address: str = "127.0.0.1",
        timeout_seconds: float = 60.0,
        service_address: str | None = None,
        abort: Abort | None = None,
        secret: str = "",
        encrypted: bool = False,
        channels: ChannelSet | None = None,
    ) -> None:
        if channels is None:
            abort = abort or Abort()
            actor_host = ActorHost(service_address or address, timeout_seconds, abort, secret, encrypted)
            channels = ChannelSet(actor_host=actor_host, abort=abort)
        super().__init__(channels, timeout_seconds)
        self.rank, self.size = rank, size
        self._store: c10d.Store | None = store
        self._backend, self._address = backend, address
        self._device = device or torch.device("cpu")
        self._sequence = 0
        self._issued: deque[Any] = deque()
        self._looked_at, self._torn_since = 0.0, 0.0
        self._wires: dict[int, str] = {}
        self._headers: Any = None
        self._payloads: Any = None
        self._near: Any = None  # NCCL carries only what lies on its device; what lies here goes beside it
        self._waiting: AbortableStore | None = None  # gloo has only what C++ knows of it
        self._unabort: Callable[[], None] = lambda: None
        _check_backend(backend)
        notices = StoreExchange(store, timeout_seconds, channels.abort)
        devices, ends = open_devices(notices, rank, size, address, 3 if backend == "nccl" else 2)
        forget = channels.abort.add_callback(lambda: shut(connected(ends)))
        try:
            with _peer_lost_for("connect"):
                groups = channels.abort.run("connect", partial(self._connect, store, devices))
        finally:
            forget()
        self._headers, self._payloads, self._near = groups
        self._wires = connected(ends)
        if backend == "nccl":  # its operations hold up whoever waits for the device, too
            self._unabort = channels.abort.add_callback(self._payloads.abort)

    def _connect(self, store: c10d.Store, devices: Sequence[Device]) -> tuple[Any, Any, Any]:
        """The groups of headers, of payloads, and of payloads that lie here."""
        waiting = AbortableStore(store, self._timeout_seconds, self._channels.abort)

        def over(name: str, device: Device) -> Any:
            self._channels.abort.check("connect")
            return gloo(PrefixedStore(name, waiting), self.rank, self.size, device, self._timeout_seconds)

        headers = over("headers", devices[0])
        if self._backend == "gloo":
            payloads = near = over("payloads", devices[1])
        else:
            payloads, near = self._nccl(PrefixedStore("payloads", store)), over("near", devices[2])
        self._waiting = waiting
        return headers, payloads, near

    def _nccl(self, store: c10d.Store) -> Any:
        made: Any = c10d.ProcessGroupNCCL
        options = made.Options()
        options._timeout = timedelta(seconds=self._timeout_seconds)
        with torch.cuda.device(self._device):
            return made(store, self.rank, self.size, options)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Operation[Tensor]:
        def payload() -> Steps[Tensor]:
            flat = x.detach().reshape(-1)
            wide = flat if self._adds(x) else flat.to(_wider(x.dtype))
            if flat.numel():
                options = c10d.AllreduceOptions()
                options.timeout = _LONG
                yield from self._carry("sum", lambda: self._group_of(wide).allreduce([wide], options))
                # A ring moves every byte twice, but for this worker's own share.
                self._channels.bytes_sent += 2 * (self.size - 1) * wide.numel() * wide.element_size() // self.size
            return wide.to(x.dtype).to(dtype or x.dtype).view(x.shape)

        return self._start(payload, "sum", x.numel(), x.dtype, to=dtype)

    def gather(self, x: Tensor) -> Operation[Tensor]:
        def payload() -> Steps[Tensor]:
            rows = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
            if x.numel():
                mine, everybody = _as_bytes(x), _as_bytes(rows)
                options = c10d.AllgatherOptions()
                options.timeout = _LONG
                yield from self._carry("gather", lambda: self._group_of(x)._allgather_base(everybody, mine, options))
                self._channels.bytes_sent += (self.size - 1) * mine.numel()
            return rows

        return self._start(payload, "gather", x.numel(), x.dtype)

    def broadcast(self, x: Tensor, root: int = 0) -> Operation[Tensor]:
        def payload() -> Steps[Tensor]:
            if x.numel():
                whole = x.detach().contiguous()
                options = c10d.BroadcastOptions()
                options.rootRank, options.timeout = root, _LONG
                yield from self._carry(
                    "broadcast", lambda: self._group_of(whole).broadcast([_as_bytes(whole)], options)
                )
                self._channels.bytes_sent += (self.size - 1) * whole.nbytes if self.rank == root else 0
                if not x.is_contiguous():
                    x.detach().copy_(whole)
            return x

        record.check_root(root, self.size)
        return self._start(payload, "broadcast", x.numel(), x.dtype, root)

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Operation[list[Tensor]]:
        def payload() -> Steps[list[Tensor]]:
            arrived = yield from self._all_to_all("exchange", sends, expects)
            return [arrived[rank] for rank in range(self.size)]

        record.check_everybody(xs, like, self.size)
        sends, expects = dict(enumerate(xs)), dict(enumerate(like))
        return self._start(payload, "exchange", sends=sends, expects=expects)

    def swap(self, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> Operation[dict[int, Tensor]]:
        record.check_neighbours(xs, like, self.rank, self.size)
        sends, expects = dict(xs), dict(like)
        return self._start(lambda: self._all_to_all("swap", sends, expects), "swap", sends=sends, expects=expects)

    def set_hierarchy(self, hierarchy: Hierarchy) -> None:
        """From now on, `hierarchy` are what these workers have beside this conversation."""
        self._channels.hierarchy = hierarchy

    def channel(self, name: str) -> TorchGroup:
        if self._store is None:
            raise PeerLost([], "lane", "this end was closed")
        lane = TorchGroup(
            PrefixedStore(f"lane/{name}", self._store),
            self.rank,
            self.size,
            backend=self._backend,
            device=self._device,
            address=self._address,
            timeout_seconds=self._timeout_seconds,
            channels=self._channels,
        )
        lane.name = name
        return lane

    def close(self) -> None:
        if self._channels.queues[0] is self:
            self._channels.actor_host.close()
            if self._channels.hierarchy:
                self._channels.hierarchy.close()
        for lane in self._channels.queues if self._channels.queues[0] is self else [self]:
            assert isinstance(lane, TorchGroup)
            lane._end()
            lane._hang_up()

    def _start(
        self,
        payload: Callable[[], Steps[Any]],
        verb: str,
        numel: int = -1,
        dtype: torch.dtype | None = None,
        root: int = -1,
        sends: Mapping[int, Tensor] | None = None,
        expects: Mapping[int, Tensor] | None = None,
        to: torch.dtype | None = None,
    ) -> Operation[Any]:
        """Send the header now, whatever else is under way; the payload follows in its turn."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        agreed = record.agreed_part(verb, sequence, numel, dtype, root, to=to)
        spoken = [*agreed, *record.pairs(self.size, sends or {}), *record.pairs(self.size, expects or {})]
        # Straight to everybody: a ring would take as many messages one after the other as there are peers.
        mine = torch.tensor(spoken).repeat(self.size)
        everybody = torch.empty_like(mine)
        options = c10d.AllToAllOptions()
        options.timeout = _LONG
        arrival = None
        self._check_abort(verb)
        try:
            if self._failure is None:
                with _peer_lost_for(verb):
                    arrival = self._under_way(self._headers.alltoall_base(everybody, mine, [], [], options))
        except PeerLost as error:
            self._fail(error)
        return self._enqueue(verb, self._steps(verb, sequence, arrival, everybody.view(self.size, -1), payload))

    def _steps(
        self, verb: str, sequence: int, arrival: Any, records: Tensor, payload: Callable[[], Steps[Any]]
    ) -> Steps[Any]:
        yield from self._until(verb, arrival, released=False)
        spoken = records.tolist()
        record.check_agreed([one[: record.AGREED] for one in spoken])
        there = record.AGREED + self.size
        record.check_pairs(
            sequence, verb, [one[record.AGREED : there] for one in spoken], [one[there:] for one in spoken]
        )
        result = yield from payload()
        return result

    def _until(self, verb: str, handle: Any, released: bool) -> Steps[None]:
        blocked = Blocked(released, handle)
        while not handle.is_completed():
            yield blocked
        with _peer_lost_for(verb):
            handle.wait()
        self._progress += 1

    def _carry(self, verb: str, issue: Callable[[], Any]) -> Steps[None]:
        with _peer_lost_for(verb):
            handle = self._under_way(issue())
        self._progress += 1
        yield from self._until(verb, handle, released=True)

    def _under_way(self, handle: Any) -> Any:
        while self._issued and self._issued[0].is_completed():
            self._issued.popleft()
        self._issued.append(handle)
        return handle

    def _all_to_all(self, verb: str, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> Steps[dict[int, Tensor]]:
        """One piece for each peer, empty where there is nothing to say; what is for this worker stays
        here."""
        there = {rank: x for rank, x in xs.items() if rank != self.rank}
        back = {rank: x for rank, x in like.items() if rank != self.rank}
        outgoing = [_padded(there[rank].nbytes) if rank in there else 0 for rank in range(self.size)]
        incoming = [_padded(back[rank].nbytes) if rank in back else 0 for rank in range(self.size)]
        device = next((x.device for x in (*there.values(), *back.values())), torch.device("cpu"))
        sent = torch.empty(sum(outgoing), dtype=torch.uint8, device=device)
        received = torch.empty(sum(incoming), dtype=torch.uint8, device=device)
        for rank, piece in enumerate(torch.split(sent, outgoing)):
            if rank in there:
                piece[: there[rank].nbytes].copy_(_as_bytes(there[rank]))
        options = c10d.AllToAllOptions()
        options.timeout = _LONG
        yield from self._carry(
            verb, lambda: self._group_of(sent).alltoall_base(received, sent, incoming, outgoing, options)
        )
        self._channels.bytes_sent += sum(x.nbytes for x in there.values())
        pieces = torch.split(received, incoming)
        return {
            rank: _as_bytes(xs[rank]).clone().view(x.dtype).view(x.shape)
            if rank == self.rank
            else pieces[rank][: x.nbytes].view(x.dtype).view(x.shape)
            for rank, x in like.items()
        }

    def _communicator(self) -> TorchGroup:
        return self

    def _group_of(self, x: Tensor) -> Any:
        return self._near if x.device.type == "cpu" else self._payloads

    def _adds(self, x: Tensor) -> bool:
        return (self._backend != "gloo" and x.device.type != "cpu") or x.dtype in _GLOO_ADDS

    def _pause(self, attempt: int, operation: Operation[Any]) -> None:
        """Sleep until what the oldest operation waits for is there; in slices where other lanes need this
        thread."""
        siblings = self._siblings()
        for lane in siblings:
            lane.advance()
        assert operation.blocked is not None
        handle = operation.blocked.on
        if siblings or handle.is_completed() or self._backend != "gloo":
            time.sleep(_BACKOFF.seconds(attempt))
            return
        with suppress(RuntimeError):  # the next poll sees it, be it a timeout or an error
            handle.wait(timedelta(seconds=min(_SLICE_SECONDS, self._timeout_seconds)))

    def _lost(self, now: float, operation: Operation[Any]) -> PeerLost | None:
        """Backends close a broken connection, but do not always wake what waits for it.

        A peer that has done its part may close its end too, and what others still bring is then waited for a while.
        """
        if now - self._looked_at < _LOOK_SECONDS:
            return None
        self._looked_at = now
        if all(is_open(fd, name) for fd, name in self._wires.items()):
            return None
        self._torn_since = self._torn_since or now
        since = max(self._torn_since, self._blocked_since or now)
        if now - since < min(_LONGEST_TORN_SECONDS, self._timeout_seconds / 8):
            return None
        return PeerLost((), operation.verb, "a connection was closed")

    def _notify_peers(self, error: CommunicationError) -> None:
        if isinstance(error, PeerLost):
            self._hang_up()

    def _hang_up(self) -> None:
        """Close the sockets first: it ends what is under way here, and wakes peers that wait for this
        worker."""
        self._unabort()
        shut(self._wires)
        self._wires, self._store, self._waiting = {}, None, None
        if self._backend == "nccl" and self._payloads is not None:
            self._payloads.abort()
        if not self._unwound():
            # To be taken down, a group waits for what is under way in it, which would be for ever.
            for group in (self._headers, self._payloads, self._near, self._waiting):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._headers = self._payloads = self._near = None
        self._issued.clear()

    def _unwound(self) -> bool:
        """Whether all that is under way has ended, now that nothing carries it any more."""
        end = time.monotonic() + _UNWIND_SECONDS
        while not all(handle.is_completed() for handle in self._issued):
            if time.monotonic() > end:
                return False
            time.sleep(1e-3)
        return True


@dataclass(frozen=True)
class Device:
    """What one group of gloo listens on.

    Attributes:
        made: torch's.
        end: where that is.
    """

    made: Any
    end: End

    @staticmethod
    def open(address: str, admitted: Collection[str]) -> Device:
        """One that listens on the network that `address` belongs to, to hosts that have one of the addresses
        `admitted`."""
        before, group = listening(address), cast(Any, c10d.ProcessGroupGloo)  # the stubs know nothing of devices
        made = group.create_device(hostname=address)
        end = next(iter(listening(address) - before), (address, 0))
        admit_only(admitted, end)
        return Device(made, end)


def open_devices(
    notices: StoreExchange, rank: int, size: int, address: str, count: int
) -> tuple[list[Device], frozenset[End]]:
    """`count` devices of this worker, and where those of all workers listen: so what hangs while they connect can be
    woken. Nothing listens before all workers have come, which then connect within moments, and only to their addresses.

    Raises:
        PeerLost: as `StoreExchange.hear`.
    """
    here = notices.exchange("here", rank, size, sources(address), _read_addresses)
    admitted = frozenset(each for addresses in here for each in addresses)
    devices = [Device.open(address, admitted) for _ in range(count)]
    mine = [list(each.end) for each in devices]
    told = notices.exchange("listening", rank, size, mine, lambda each: [read_end(end) for end in each])
    return devices, frozenset(end for each in told for end in each)


def gloo(store: c10d.Store, rank: int, size: int, device: Device, timeout_seconds: float) -> Any:
    """torch's process group of these workers over gloo, each through its `device`. All pairs are connected, and the
    listening socket refuses further connections: gloo would keep their descriptors, and abort when there are no more.

    Raises:
        RuntimeError: the pairs could not be connected.
        PeerLost: a connected peer does not know the word that this group's workers share in `store`.
    """
    made: Any = c10d.ProcessGroupGloo  # the stubs know nothing of options
    options = made._Options()
    options._devices = [device.made]
    options._timeout = timedelta(seconds=timeout_seconds)
    group = made(store, rank, size, options)
    refuse_connections(device.end)
    if rank == 0:
        store.set("word", secrets.token_hex(32))
    _authenticate(group, store.get("word"), rank, size, timeout_seconds)
    return group


def _read_addresses(told: Any) -> list[str]:
    """As JSON carries them. Raises `ValueError` or `TypeError` for anything else."""
    return [str(ipaddress.ip_address(each)) for each in told]


def _check_backend(backend: str) -> None:
    if backend != "gloo" and not (backend == "nccl" and hasattr(c10d, "ProcessGroupNCCL")):
        raise InvalidInput("backend", backend, "this build of torch does not have it", "write gloo")


def _authenticate(group: Any, word: bytes, rank: int, size: int, timeout_seconds: float) -> None:
    """Exchange an HMAC under `word` over each pair: gloo takes the first connection that names a peer's number for that
    peer. It is a barrier as well: a worker that closes at once must not break off a peer that still connects."""

    def proofs(pairs: Iterable[tuple[int, int]]) -> Tensor:
        said = b"".join(hmac.digest(word, f"{one} to {other}".encode(), "sha256") for one, other in pairs)
        return torch.frombuffer(bytearray(said), dtype=torch.uint8)

    mine = proofs((rank, other) for other in range(size))
    expected, told = proofs((other, rank) for other in range(size)), torch.empty_like(mine)
    options = c10d.AllToAllOptions()
    options.timeout = timedelta(seconds=timeout_seconds)
    group.alltoall_base(told, mine, [], [], options).wait()
    wrong = (told != expected).view(size, -1).any(1).nonzero().flatten().tolist()
    if wrong:
        raise PeerLost(wrong, "connect", "another process has connected in its place")


@contextmanager
def _peer_lost_for(verb: str) -> Iterator[None]:
    """What the backends have to say are plain RuntimeErrors without a rank."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost((), verb, str(error).splitlines()[0]) from error


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else torch.int64


def _as_bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _padded(nbytes: int) -> int:
    """Pieces begin where any dtype may begin."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
