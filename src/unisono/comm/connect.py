"""From a rank and a meeting place to a communicator."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono.comm.alone import Alone
from unisono.comm.board import Board
from unisono.comm.communicator import Communicator
from unisono.comm.memory import MemoryUnavailable, check_platform, create, open_of
from unisono.comm.peers import Peers
from unisono.comm.rendezvous import open_store, own_address, parse_rendezvous
from unisono.comm.shared_memory import Host, SharedMemory
from unisono.comm.tiers import Part, Tiers
from unisono.comm.torch_group import TorchGroup
from unisono.comm.torch_world import TorchWorld
from unisono.errors import InvalidInput, PeerLost

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
    deadline_seconds: float = 60.0,
) -> Communicator:
    """The wire between this worker and its peers; returns when all peers are there.

    Args:
        rank, size: this worker's number, ``0 .. size-1``, and how many there are.
        rendezvous: a URL, see `unisono.comm.rendezvous`; not looked at when `size` is 1.
        local_size: how many of the workers run on this host.
        kind: one of `KINDS`; ``auto`` is NCCL on CUDA, else shared memory where all workers run on one host,
        else gloo.
        device: where payloads live.
        deadline_seconds: how long a peer may stay silent, now and in every verb.

    Raises:
        InvalidInput: what was asked for cannot work here.
        PeerLost: not all peers came within the deadline.
    """
    meeting = Meeting(rank, size, rendezvous, local_size, kind, device or torch.device("cpu"), deadline_seconds)
    return meeting.among(range(size))


class Meeting:
    """A place where the workers of a run find each other, all of them or some; the arguments are those of `connect`."""

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: str,
        local_size: int,
        kind: str,
        device: torch.device,
        deadline_seconds: float,
    ) -> None:
        self._rank, self._size, self._local_size = rank, size, local_size
        self._kind, self._device, self._deadline_seconds = kind, device, deadline_seconds
        _choose(kind, size, local_size, device)
        if not 0 <= rank < size:
            raise InvalidInput("rank", rank, f"is not one of the {size} workers", f"write 0 to {size - 1}")
        if size == 1:
            return
        place = parse_rendezvous(rendezvous)
        self._address = own_address(place)
        # Workers may meet at one place several times, one run after the other: each time has keys of its own.
        _meetings[rendezvous] += 1
        self._store = c10d.PrefixStore(f"meeting/{_meetings[rendezvous]}", open_store(place, rank, deadline_seconds))

    def among(self, ranks: Sequence[int], name: str = "") -> Communicator:
        """The wire between `ranks`, this worker among them: they call it alike, and become ``0 .. len(ranks)-1``.
        Another `name` gives another wire between the same workers.

        Raises:
            InvalidInput: what was asked for cannot work here.
            PeerLost: not all of them came within the deadline.
        """
        rank, size, local_size = ranks.index(self._rank), len(ranks), self._beside(ranks)
        chosen = _choose(self._kind, size, local_size, self._device)
        if size == 1:
            return Alone(self._device)
        store = c10d.PrefixStore("-".join([name, *map(str, ranks)]), self._store)
        if chosen == "shared_memory":
            try:
                return share_memory(c10d.PrefixStore("memory", store), rank, size, self._deadline_seconds)
            except MemoryUnavailable as reason:
                chosen = "gloo"
                if rank == 0:
                    LOG.warning("shared memory cannot be used (%s): using gloo instead", reason)
        group = TorchGroup(
            c10d.PrefixStore(chosen, store),
            rank,
            size,
            backend=chosen,
            device=self._device,
            address=self._address,
            deadline_seconds=self._deadline_seconds,
            service_address="127.0.0.1" if local_size == size else self._address,
        )
        if self._kind == "auto" and chosen == "gloo" and 1 < local_size < size and size % local_size == 0:
            divide(group, store, local_size, self._address, self._deadline_seconds)
        return group

    def open_world(self) -> TorchWorld:
        """Make torch's default process group of all workers: what its own ways to cut a model talk through.

        Raises:
            PeerLost: not all of them came within the deadline.
        """
        store = c10d.PrefixStore("world", self._store)
        return TorchWorld(store, self._rank, self._size, self._address, self._device, self._deadline_seconds)

    def _beside(self, ranks: Sequence[int]) -> int:
        """How many of `ranks` share a host, where it is as many on each and neighbours share one; else 1."""
        hosts = [rank // self._local_size for rank in ranks]
        count = hosts.count(hosts[0])
        blocks = [host for i, host in enumerate(hosts) if i % count == 0 for _ in range(count)]
        return count if blocks[: len(hosts)] == hosts and len(set(hosts)) * count == len(hosts) else 1


def divide(group: TorchGroup, store: c10d.Store, local_size: int, address: str, deadline_seconds: float) -> None:
    """Give `group` its tiers, where ranks ``0 .. local_size - 1`` share a host and so on; says so where they do not.

    Raises:
        PeerLost: not all peers did the same within the deadline.
    """
    host, place = divmod(group.rank, local_size)
    within, reason = None, ""
    try:
        within = share_memory(c10d.PrefixStore(f"host/{host}", store), place, local_size, deadline_seconds)
    except MemoryUnavailable as error:
        reason = str(error)
    if not group.gather(torch.tensor([within is not None])).wait().all():
        if within is not None:
            within.close()
        if reason:
            LOG.warning("workers of one host do not share memory (%s): all talk over the network", reason)
        return
    assert within is not None
    hosts, between = group.size // local_size, None
    if place == 0:
        leaders = TorchGroup(
            c10d.PrefixStore("between", store), host, hosts, address=address, deadline_seconds=deadline_seconds
        )
        between = Part(leaders, range(0, group.size, local_size))
    group.divide(Tiers(Part(within, range(host * local_size, (host + 1) * local_size)), between))


def share_memory(store: c10d.Store, rank: int, size: int, deadline_seconds: float) -> SharedMemory:
    """A communicator of workers of one host, or on all of them the same `MemoryUnavailable`."""
    board = Board(size)
    number, token, memory, failure = -1, 0, None, ""
    try:
        try:
            check_platform()
            if rank == 0:
                number = create(board.nbytes)
                token = secrets.randbits(62)
                os.pwrite(number, token.to_bytes(8, sys.byteorder), 8 * Board.token)
        except OSError as error:
            failure = str(error)
        if rank == 0:
            _say(store, "file", {"pid": os.getpid(), "number": number, "token": token})
        there = _hear(store, "file", 0)
        if not failure and there["number"] >= 0:
            try:
                memory = _open(there, board)
            except OSError as error:
                failure = str(error)
        _say(store, f"worker/{rank}", {"pid": os.getpid(), "failure": failure})
        workers = [_hear(store, f"worker/{other}", other) for other in range(size)]
    finally:
        if number >= 0:
            os.close(number)
    for other, worker in enumerate(workers):
        if worker["failure"]:
            raise MemoryUnavailable(f"worker {other}: {worker['failure']}")
    assert memory is not None
    peers = Peers({other: worker["pid"] for other, worker in enumerate(workers) if other != rank})
    host = Host(store, peers, there["pid"], board.words(memory))
    return SharedMemory(rank, size, memory, host, deadline_seconds)


def _open(there: dict[str, Any], board: Board) -> Tensor:
    """Worker 0's file, and no other of the same numbers (a container may count its processes from 1
    again)."""
    memory = open_of(there["pid"], there["number"], board.nbytes)
    if board.words(memory)[Board.token] != there["token"]:
        raise MemoryUnavailable("worker 0 is in another container")
    return memory


def _say(store: c10d.Store, key: str, value: dict[str, Any]) -> None:
    try:
        store.set(key, json.dumps(value))
    except RuntimeError as error:
        raise PeerLost([0], "connect", str(error).splitlines()[0]) from error


def _hear(store: c10d.Store, key: str, rank: int) -> dict[str, Any]:
    """What `rank` said; a `PeerLost` that names it where it does not come within the store's deadline."""
    try:
        value = json.loads(store.get(key))
    except RuntimeError as error:
        raise PeerLost([rank], "connect", str(error).splitlines()[0]) from error
    assert isinstance(value, dict)
    return value


def _choose(kind: str, size: int, local_size: int, device: torch.device) -> str:
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
        raise InvalidInput("kind", kind, f"carries nothing that lies on {device.type}", "write auto or gloo")
    return kind
