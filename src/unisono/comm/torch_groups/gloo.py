"""Connects process groups of gloo, so that only the workers of a run can take part."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono.comm.host import source_addresses
from unisono.comm.process_sockets import End, admit_only, listening_ends, read_end, refuse_connections
from unisono.comm.rendezvous.store_exchange import StoreExchange
from unisono.errors import PeerLost


@dataclass(frozen=True)
class GlooDevice:
    """The listening socket of one group of gloo.

    Attributes:
        device: torch's object for the device.
        end: the address and port of its socket.
    """

    device: Any
    end: End

    @staticmethod
    def open(address: str, admitted: Collection[str]) -> GlooDevice:
        """Listen on the network of `address`, for hosts that have one of the addresses `admitted`."""
        before, group = listening_ends(address), cast(Any, c10d.ProcessGroupGloo)  # the stubs lack devices
        device = group.create_device(hostname=address)
        end = next(iter(listening_ends(address) - before), (address, 0))
        admit_only(admitted, end)
        return GlooDevice(device, end)


def open_devices(
    exchange: StoreExchange, rank: int, size: int, address: str, count: int
) -> tuple[list[GlooDevice], frozenset[End]]:
    """Collective: `count` devices of this worker, and the ends of the devices of all workers.

    The ends identify the connections that must be shut down to wake a worker that waits while it connects. A worker
    listens only once all workers take part, which then connect at once; it admits only their addresses.

    Raises:
        PeerLost: as `StoreExchange.collect`.
    """
    sources = exchange.exchange("here", rank, size, source_addresses(address), _read_addresses)
    admitted = frozenset(each for addresses in sources for each in addresses)
    devices = [GlooDevice.open(address, admitted) for _ in range(count)]
    own = [list(each.end) for each in devices]
    ends = exchange.exchange("listening", rank, size, own, lambda each: [read_end(end) for end in each])
    return devices, frozenset(end for each in ends for end in each)


def connect_gloo(store: c10d.Store, rank: int, size: int, device: GlooDevice, timeout_seconds: float) -> Any:
    """Collective: connect a process group of torch over gloo, in which each worker uses its `device`.

    Once all pairs are connected, the listening socket refuses further connections: gloo would keep their descriptors,
    and abort the process when it has no descriptors left.

    Raises:
        RuntimeError: the pairs could not be connected.
        PeerLost: a connected peer does not know the secret that this group's workers share in `store`.
    """
    process_group: Any = c10d.ProcessGroupGloo  # the stubs lack its options
    options = process_group._Options()
    options._devices = [device.device]
    options._timeout = timedelta(seconds=timeout_seconds)
    group = process_group(store, rank, size, options)
    refuse_connections(device.end)
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    _authenticate(group, store.get("secret"), rank, size, timeout_seconds)
    return group


def _read_addresses(value: Any) -> list[str]:
    """The addresses in `value`, a list read from JSON. Raises `ValueError` or `TypeError` for other values."""
    return [str(ipaddress.ip_address(each)) for each in value]


def _authenticate(group: Any, secret: bytes, rank: int, size: int, timeout_seconds: float) -> None:
    """Exchange an HMAC under `secret` over each pair.

    gloo accepts the first connection that gives a peer's number as that peer. The exchange is a barrier as well: a
    worker that closes at once must not interrupt a peer that still connects.
    """

    def proofs(pairs: Iterable[tuple[int, int]]) -> Tensor:
        joined = b"".join(hmac.digest(secret, f"{one} to {other}".encode(), "sha256") for one, other in pairs)
        return torch.frombuffer(bytearray(joined), dtype=torch.uint8)

    own = proofs((rank, other) for other in range(size))
    expected, received = proofs((other, rank) for other in range(size)), torch.empty_like(own)
    options = c10d.AllToAllOptions()
    options.timeout = timedelta(seconds=timeout_seconds)
    group.alltoall_base(received, own, [], [], options).wait()
    wrong = (received != expected).view(size, -1).any(1).nonzero().flatten().tolist()
    if wrong:
        raise PeerLost(wrong, "connect", "another process has connected in its place")
