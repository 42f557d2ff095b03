"""Connects the workers of a run: from a rank and a rendezvous to a communicator."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono.comm.abort import Abort
from unisono.comm.communicator import Communicator
from unisono.comm.hierarchy import Hierarchy, SubCommunicator, with_global_ranks
from unisono.comm.operation_queue import ChannelSet
from unisono.comm.rendezvous.address import connect_store, delete_earlier_attempts, own_address, parse_rendezvous
from unisono.comm.rendezvous.prefix_store import PrefixedStore
from unisono.comm.rendezvous.store_exchange import StoreExchange
from unisono.comm.security import Security
from unisono.comm.shared_memory.communicator import SharedMemory
from unisono.comm.shared_memory.memfd import MemoryUnavailable, check_platform, create, open_of
from unisono.comm.shared_memory.memory_map import SharedMemoryMap
from unisono.comm.shared_memory.peer_processes import PeerProcesses
from unisono.comm.shared_memory.rounds import HostResources
from unisono.comm.single import SingleWorker
from unisono.comm.torch_groups.default_group import TorchWorld
from unisono.comm.torch_groups.process_group import TorchGroup
from unisono.errors import InvalidInput

LOG = logging.getLogger("unisono")
LOOPBACK = "127.0.0.1"
_rendezvous_so_far: Counter[str] = Counter()
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
    """Collective: the communicator of all workers of a run.

    Args:
        rank, size: the number of this worker, ``0 .. size-1``, and how many workers there are.
        rendezvous: a URL, see `unisono.comm.rendezvous.address`; ignored if `size` is 1.
        local_size: the number of workers on this host.
        kind: one of `KINDS`; ``auto`` is NCCL on CUDA, else shared memory if all workers run on one host, else gloo.
        device: the device of payloads; None: the CPU.
        timeout_seconds: how long to wait for a peer, now and in every operation.

    Raises:
        InvalidInput: the arguments cannot work on this host.
        PeerLost: not all peers have connected within the deadline.
    """
    if not 0 <= rank < size:
        raise InvalidInput("rank", rank, f"is not one of the {size} workers", f"write 0 to {size - 1}")
    hosts, device = in_blocks(size, local_size), device or torch.device("cpu")
    return Rendezvous(rank, hosts, rendezvous, kind, device, timeout_seconds).connect(range(size))


def in_blocks(size: int, local_size: int) -> list[str]:
    """A host's name for each of `size` workers, where every `local_size` consecutive ranks have the same host."""
    return [f"host {rank // local_size}" for rank in range(size)]


class Rendezvous:
    """The rendezvous of the workers of a run, through which all or some of them connect to each other.

    Args:
        rank: the number of this worker.
        hosts: the name of each worker's host; workers of the same host share memory and the loopback device.
        rendezvous, kind, device, timeout_seconds: as for `connect`.
        abort: once set, all waiting in this rendezvous, and in the communicators that it connects, ends with
            `PeerLost`.
        security: the secret of the run; None: workers are not authenticated at the rendezvous.

    Attributes:
        complete: whether all workers have been connected to each other.

    Raises:
        InvalidInput: the arguments cannot work on this host.
        PeerLost: no process serves the rendezvous within the deadline, or `abort` was set.
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
        security: Security | None = None,
    ) -> None:
        self._rank, self._hosts, self._abort = rank, tuple(hosts), abort or Abort()
        self._kind, self._device, self._timeout_seconds = kind, device, timeout_seconds
        self._security = security or Security()
        _select_kind(kind, self._hosts, rank, device)
        self.complete = len(hosts) == 1
        if self.complete:
            return
        self._url = parse_rendezvous(rendezvous)
        self._address = own_address(self._url)
        # A process may use one URL for several rendezvous, one after the other: each has keys of its own.
        _rendezvous_so_far[rendezvous] += 1
        store = connect_store(self._url, rank, timeout_seconds, self._abort, self._security.token)
        self._store = PrefixedStore(f"rendezvous/{_rendezvous_so_far[rendezvous]}", store)

    def connect(self, ranks: Sequence[int], name: str = "") -> Communicator:
        """Collective over `ranks`: their communicator, in which they have the ranks ``0 .. len(ranks)-1``.

        Another `name` makes another communicator of the same workers.

        Raises:
            InvalidInput: the arguments cannot work on this host.
            PeerLost: not all of `ranks` connected within the deadline (the error names the missing ones), or `abort`
                was set.
        """
        rank, size = ranks.index(self._rank), len(ranks)
        hosts = [self._hosts[each] for each in ranks]
        kind = _select_kind(self._kind, hosts, rank, self._device)
        if size == 1:
            return SingleWorker(self._device)
        store = PrefixedStore("-".join([name, *map(str, ranks)]), self._store)
        comm = self._connect(store, kind, rank, hosts)
        if size == len(self._hosts):
            self.complete = True
            if rank == 0:
                delete_earlier_attempts(self._url)
        return comm

    def open_world(self) -> TorchWorld:
        """Collective: torch's default process group of all workers, for torch's own parallel layers.

        Raises:
            PeerLost: not all workers connected within the deadline, or `abort` was set.
        """
        store = PrefixedStore("world", self._store)
        exchange = StoreExchange(store, self._timeout_seconds, self._abort)
        size = len(self._hosts)
        exchange.exchange("here", self._rank, size, True, bool)
        return TorchWorld(store, self._rank, size, self._address, self._device, self._timeout_seconds, self._abort)

    def _connect(self, store: c10d.Store, kind: str, rank: int, hosts: Sequence[str]) -> Communicator:
        size = len(hosts)
        if kind == "shared_memory":
            try:
                return self._share_memory(PrefixedStore("memory", store), rank, size)
            except MemoryUnavailable as reason:
                kind = "gloo"
                if rank == 0:
                    LOG.warning("shared memory cannot be used (%s): using gloo instead", reason)
        actor_address = LOOPBACK if len(set(hosts)) == 1 else self._address
        group = self._torch_group(PrefixedStore(kind, store), rank, size, kind, actor_address)
        if self._kind == "auto" and kind == "gloo" and _several_on_each_host(hosts):
            self._add_hierarchy(group, store, hosts)
        return group

    def _torch_group(self, store: c10d.Store, rank: int, size: int, kind: str, actor_address: str) -> TorchGroup:
        channels = ChannelSet.create(actor_address, self._timeout_seconds, self._abort, self._security)
        return TorchGroup(store, rank, size, channels, backend=kind, device=self._device, address=self._address,
                          timeout_seconds=self._timeout_seconds)  # fmt: skip

    def _share_memory(self, store: c10d.Store, rank: int, size: int) -> SharedMemory:
        return share_memory(store, rank, size, self._timeout_seconds, self._abort)

    def _add_hierarchy(self, group: TorchGroup, store: c10d.Store, hosts: Sequence[str]) -> None:
        """Collective: give `group` its two levels, or log why the workers of a host cannot share memory."""
        names = list(dict.fromkeys(hosts))
        ranks_of_hosts = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
        number = names.index(hosts[group.rank])
        local_ranks, leaders = ranks_of_hosts[number], [ranks[0] for ranks in ranks_of_hosts]
        intra_node, reason = None, ""
        try:
            with with_global_ranks(local_ranks):
                own_store = PrefixedStore(f"host/{number}", store)
                intra_node = self._share_memory(own_store, local_ranks.index(group.rank), len(local_ranks))
        except MemoryUnavailable as error:
            reason = str(error)
        if not group.gather(torch.tensor([intra_node is not None])).wait().all():
            if intra_node is not None:
                intra_node.close()
            if reason:
                LOG.warning("workers of one host do not share memory (%s): all workers use the network", reason)
            return
        assert intra_node is not None
        inter_node = None
        if group.rank in leaders:
            with with_global_ranks(leaders):
                between_hosts = PrefixedStore("between", store)
                comm = self._torch_group(between_hosts, number, len(leaders), "gloo", self._address)
                inter_node = SubCommunicator(comm, leaders)
        group.set_hierarchy(Hierarchy(SubCommunicator(intra_node, local_ranks), inter_node))


def share_memory(
    store: c10d.Store, rank: int, size: int, timeout_seconds: float, abort: Abort | None = None
) -> SharedMemory:
    """Collective: a communicator of the workers of one host, which share memory.

    Raises:
        MemoryUnavailable: the memory cannot be shared; all workers raise the same error.
    """
    abort = abort or Abort()
    memory_map, exchange = SharedMemoryMap(size), StoreExchange(store, timeout_seconds, abort)
    fd, token, memory, failure = -1, 0, None, ""
    try:
        try:
            check_platform()
            if rank == 0:
                fd = create(memory_map.nbytes)
                token = secrets.randbits(62)
                os.pwrite(fd, token.to_bytes(8, sys.byteorder), 8 * SharedMemoryMap.token)
        except OSError as error:
            failure = str(error)
        if rank == 0:
            exchange.publish("file", {"pid": os.getpid(), "number": fd, "token": token})
        (file,) = exchange.collect([(0, "file")], lambda values: _File(**values))
        if not failure and file.number >= 0:
            try:
                memory = _open(file, memory_map)
            except OSError as error:
                failure = str(error)
        own = {"pid": os.getpid(), "failure": failure}
        workers = exchange.exchange("worker", rank, size, own, lambda x: (int(x["pid"]), str(x["failure"])))
    finally:
        if fd >= 0:
            os.close(fd)
    for other, (_, reason) in enumerate(workers):
        if reason:
            raise MemoryUnavailable(f"worker {other}: {reason}")
    assert memory is not None
    peers = PeerProcesses({other: pid for other, (pid, _) in enumerate(workers) if other != rank})
    resources = HostResources(store, peers, file.pid, memory_map.words(memory))
    channels = ChannelSet.create(LOOPBACK, timeout_seconds, abort)
    return SharedMemory(rank, size, memory, resources, timeout_seconds, channels)


@dataclass(frozen=True)
class _File:
    """Worker 0's memory file: its process, its descriptor there (-1: none), and a random word in its memory."""

    pid: int
    number: int
    token: int


def _open(file: _File, memory_map: SharedMemoryMap) -> Tensor:
    """Map worker 0's memory file. Its token shows that this is the right file: another container may have a process
    of the same number."""
    memory = open_of(file.pid, file.number, memory_map.nbytes)
    if memory_map.words(memory)[SharedMemoryMap.token] != file.token:
        raise MemoryUnavailable("worker 0 is in another container")
    return memory


def _several_on_each_host(hosts: Sequence[str]) -> bool:
    """Whether there are several hosts, and all have the same number of workers, which is more than one."""
    counts = set(Counter(hosts).values())
    return len(set(hosts)) > 1 and len(counts) == 1 and counts != {1}


def _select_kind(kind: str, hosts: Sequence[str], rank: int, device: torch.device) -> str:
    size, local_size = len(hosts), hosts.count(hosts[rank])
    if kind not in KINDS:
        raise InvalidInput("kind", kind, "is not a kind of communicator", f"write one of {', '.join(KINDS)}")
    if kind == "auto":
        if device.type == "cuda":
            return "nccl"
        return "shared_memory" if local_size == size else "gloo"
    if kind == "shared_memory" and local_size != size:
        problem = f"only {local_size} of {size} workers run on this host"
        raise InvalidInput("kind", kind, problem, "write auto or gloo")
    if kind == "nccl" and size > 1 and device.type != "cuda":
        raise InvalidInput("kind", kind, f"cannot send tensors on {device.type}", "write auto or gloo")
    return kind
