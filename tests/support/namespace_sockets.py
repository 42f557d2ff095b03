"""Sockets in the network namespaces of simulated hosts."""

from __future__ import annotations

import ctypes
import socket
from concurrent.futures import ThreadPoolExecutor

from benchmarks.netlab import Host

_NEW_NETWORK = 0x40000000


def socket_of(host: Host) -> socket.socket:
    """A TCP socket of `host`, to be used here: a socket stays in the namespace in which it was made."""

    def make() -> socket.socket:
        with open(f"/run/netns/{host.name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
        return socket.socket()

    with ThreadPoolExecutor(1) as thread:  # which is gone afterwards, and its namespace with it
        return thread.submit(make).result()
