"""From a rank and a meeting place to a communicator."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono.comm.abort import Abort
from unisono.comm.actors.services import ActorHost
from unisono.comm.communicator import Communicator
from unisono.comm.hierarchy import Hierarchy, SubCommunicator, among_all
from unisono.comm.operation_queue import ChannelSet
from unisono.comm.rendezvous.address import connect_store, own_address, parse_rendezvous, tidy
from unisono.comm.rendezvous.prefix_store import PrefixedStore
from unisono.comm.rendezvous.store_exchange import StoreExchange
from unisono.comm.shared_memory.communicator import Host, SharedMemory
from unisono.comm.shared_memory.memfd import MemoryUnavailable, check_platform, create, open_of
from unisono.comm.shared_memory.memory_map import SharedMemoryMap
from unisono.comm.shared_memory.peer_processes import PeerProcesses
from unisono.comm.single import SingleWorker
from unisono.comm.torch_groups.default_group import TorchWorld
from unisono.comm.torch_groups.process_group import TorchGroup
from unisono.errors import InvalidInput

LOG = logging.getLogger("unisono")
_meetings: Counter[str] = Counter()
KINDS = ("auto", "shared_memory", "gloo", "nccl")


def connect(
    rank: int,
    size: int,
    *,
    rendezvous: str,
    local_size: int,
    kind: str = "auto",
    device: torch.device | None = None,
    timeout_seconds: float = 60.0,
) -> Communicator:
    """The wire between this worker and its peers; returns when all peers are there.

    Args:
        rank, size: this worker's number, ``0 .. size-1``, and how many there are.
        rendezvous: a URL, see `unisono.comm.rendezvous.address`; not looked at when `size` is 1.
        local_size: how many of the workers run on this host.
        kind: one of `KINDS`; ``auto`` is NCCL on CUDA, else shared memory where all workers run on one host,
        else gloo.
        device: where payloads live.
        timeout_seconds: how long a peer may stay silent, now and in every verb.

    Raises:
        InvalidInput: what was asked for cannot work here.
        PeerLost: not all peers came within the deadline.
    """
    if not 0 <= rank < size:
        raise InvalidInput("rank", rank, f"is not one of the {size} workers", f"write 0 to {size - 1}")
    hosts, where = in_blocks(size, local_size), device or torch.device("cpu")
    return Rendezvous(rank, hosts, rendezvous, kind, where, timeout_seconds).connect(range(size))


def in_blocks(size: int, local_size: int) -> list[str]:
    """The hosts of `size` workers of whom each `local_size` neighbours share one."""
    return [f"host {rank // local_size}" for rank in range(size)]


class Rendezvous:
    """A place where the workers of a run find each other, all of them or some.

    Args:
        rank: this worker's number.
        hosts: where each worker is; those of one name share memory and loopback.
        rendezvous, kind, device, timeout_seconds: those of `connect`.
        abort: once it is set, what is made here fails, and so does whoever waits here.
        token: shared by all workers of the run; a TCP rendezvous is then a store that only they can reach.
        encrypted: whether messages to servers and other actors on other hosts are encrypted too.

    Raises:
        InvalidInput: what was asked for cannot work here.
        PeerLost: nobody serves at the meeting place within the deadline, or it was broken off.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        rendezvous: str,
        kind: str,
        device: torch.device,
        timeout_seconds: float,
        *,
        abort: Abort | None = None,
        token: str = "",
        encrypted: bool = False,
    ) -> None:
        self._rank, self._hosts, self._abort = rank, tuple(hosts), abort or Abort()
        self._kind, self._device, self._timeout_seconds = kind, device, timeout_seconds
        self._token, self._encrypted = token, encrypted
        _choose(kind, self._hosts, rank, device)
        self.complete = len(hosts) == 1
        if self.complete:
            return
        self._place = parse_rendezvous(rendezvous)
        self._address = own_address(self._place)
        # Workers may meet at one place several times, one run after the other: each time has keys of its own.
        _meetings[rendezvous] += 1
        store = connect_store(self._place, rank, timeout_seconds, self._abort, token)
        self._store = PrefixedStore(f"meeting/{_meetings[rendezvous]}", store)

    def connect(self, ranks: Sequence[int], name: str = "") -> Communicator:
        """The wire between `ranks`, this worker among them: they call it alike, and become ``0 .. len(ranks)-1``.
        Another `name` gives another wire between the same workers.

        Raises:
            InvalidInput: what was asked for cannot work here.
            PeerLost: not all of them came within the deadline (it names the others), or it was broken off.
        """
        rank, size = ranks.index(self._rank), len(ranks)
        hosts = [self._hosts[each] for each in ranks]
        chosen = _choose(self._kind, hosts, rank, self._device)
        if size == 1:
            return SingleWorker(self._device)
        store = PrefixedStore("-".join([name, *map(str, ranks)]), self._store)
        comm = self._connect(store, chosen, rank, hosts)
        if size == len(self._hosts):
            self.complete = True
            if rank == 0:
                tidy(self._place)
        return comm

    def _connect(self, store: c10d.Store, chosen: str, rank: int, hosts: Sequence[str]) -> Communicator:
        size = len(hosts)
        if chosen == "shared_memory":
            try:
                within = PrefixedStore("memory", store)
                return share_memory(within, rank, size, self._timeout_seconds, self._abort)
            except MemoryUnavailable as reason:
                chosen = "gloo"
                if rank == 0:
                    LOG.warning("shared memory cannot be used (%s): using gloo instead", reason)
        reach = partial(TorchGroup, address=self._address, timeout_seconds=self._timeout_seconds, abort=self._abort,
                        secret=self._token, encrypted=self._encrypted)  # fmt: skip
        group = reach(
            PrefixedStore(chosen, store),
            rank,
            size,
            backend=chosen,
            device=self._device,
            service_address="127.0.0.1" if len(set(hosts)) == 1 else self._address,
        )
        if self._kind == "auto" and chosen == "gloo" and _several_on_each(hosts):
            share = partial(share_memory, timeout_seconds=self._timeout_seconds, abort=self._abort)
            divide(group, store, hosts, reach, share)
        return group

    def open_world(self) -> TorchWorld:
        """Make torch's default process group of all workers: what its own ways to cut a model talk through.

        Raises:
            PeerLost: not all of them came within the deadline, or it was broken off before they had.
        """
        store = PrefixedStore("world", self._store)
        notices = StoreExchange(store, self._timeout_seconds, self._abort)
        size = len(self._hosts)
        notices.exchange("here", self._rank, size, True, bool)
        return TorchWorld(
            store, self._rank, size, self._address, self._device, self._timeout_seconds, self._abort)  # fmt: skip


def divide(
    group: TorchGroup,
    store: c10d.Store,
    hosts: Sequence[str],
    reach: Callable[..., TorchGroup],
    share: Callable[..., SharedMemory],
) -> None:
    """Give `group` its tiers, of which `hosts` says who shares a host, as many on each; says so where they share none.

    Raises:
        PeerLost: not all peers did the same within the deadline, or it was broken off.
    """
    names = list(dict.fromkeys(hosts))
    sharing = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
    number = names.index(hosts[group.rank])
    mine, leaders = sharing[number], [ranks[0] for ranks in sharing]
    within, reason = None, ""
    try:
        with among_all(mine):
            within = share(PrefixedStore(f"host/{number}", store), mine.index(group.rank), len(mine))
    except MemoryUnavailable as error:
        reason = str(error)
    if not group.gather(torch.tensor([within is not None])).wait().all():
        if within is not None:
            within.close()
        if reason:
            LOG.warning("workers of one host do not share memory (%s): all talk over the network", reason)
        return
    assert within is not None
    between = None
    if group.rank in leaders:
        with among_all(leaders):
            between = SubCommunicator(reach(PrefixedStore("between", store), number, len(leaders)), leaders)
    group.set_hierarchy(Hierarchy(SubCommunicator(within, mine), between))


def share_memory(
    store: c10d.Store, rank: int, size: int, timeout_seconds: float, abort: Abort | None = None
) -> SharedMemory:
    """A communicator of workers of one host, or on all of them the same `MemoryUnavailable`."""
    abort = abort or Abort()
    board, notices = SharedMemoryMap(size), StoreExchange(store, timeout_seconds, abort)
    number, token, memory, failure = -1, 0, None, ""
    try:
        try:
            check_platform()
            if rank == 0:
                number = create(board.nbytes)
                token = secrets.randbits(62)
                os.pwrite(number, token.to_bytes(8, sys.byteorder), 8 * SharedMemoryMap.token)
        except OSError as error:
            failure = str(error)
        if rank == 0:
            notices.say("file", {"pid": os.getpid(), "number": number, "token": token})
        (there,) = notices.hear([(0, "file")], lambda told: _File(**told))
        if not failure and there.number >= 0:
            try:
                memory = _open(there, board)
            except OSError as error:
                failure = str(error)
        mine = {"pid": os.getpid(), "failure": failure}
        workers = notices.exchange("worker", rank, size, mine, lambda told: (int(told["pid"]), str(told["failure"])))
    finally:
        if number >= 0:
            os.close(number)
    for other, (_, why) in enumerate(workers):
        if why:
            raise MemoryUnavailable(f"worker {other}: {why}")
    assert memory is not None
    peers = PeerProcesses({other: pid for other, (pid, _) in enumerate(workers) if other != rank})
    host = Host(store, peers, there.pid, board.words(memory))
    channels = ChannelSet(actor_host=ActorHost(timeout_seconds=timeout_seconds, abort=abort), abort=abort)
    return SharedMemory(rank, size, memory, host, timeout_seconds, channels)


@dataclass(frozen=True)
class _File:
    """Worker 0's memory: its process, the file's number there (-1: none), and a word that lies in it."""

    pid: int
    number: int
    token: int


def _open(there: _File, board: SharedMemoryMap) -> Tensor:
    """Worker 0's file, and no other of the same numbers (a container may count its processes from 1
    again)."""
    memory = open_of(there.pid, there.number, board.nbytes)
    if board.words(memory)[SharedMemoryMap.token] != there.token:
        raise MemoryUnavailable("worker 0 is in another container")
    return memory


def _several_on_each(hosts: Sequence[str]) -> bool:
    """Whether there are several hosts, and as many workers, more than one, on each."""
    counts = set(Counter(hosts).values())
    return len(set(hosts)) > 1 and len(counts) == 1 and counts != {1}


def _choose(kind: str, hosts: Sequence[str], rank: int, device: torch.device) -> str:
    size, beside = len(hosts), hosts.count(hosts[rank])
    if kind not in KINDS:
        raise InvalidInput("kind", kind, "is not a kind of communicator", f"write one of {', '.join(KINDS)}")
    if kind == "auto":
        if device.type == "cuda":
            return "nccl"
        return "shared_memory" if beside == size else "gloo"
    if kind == "shared_memory" and beside != size:
        problem = f"only {beside} of {size} workers run on this host"
        raise InvalidInput("kind", kind, problem, "write auto or gloo")
    if kind == "nccl" and size > 1 and device.type != "cuda":
        raise InvalidInput("kind", kind, f"carries nothing that lies on {device.type}", "write auto or gloo")
    return kind
