"""A real coordinator server in a thread of the test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.membership import Policy
from unisono.membership.endpoint import Endpoint
from unisono.membership.server.http_server import CoordinatorServer

TOKEN = "a token"


POLICY = Policy(min_workers=1, expected_workers=2, max_workers=3, heartbeat_seconds=2.0)  # the machine may be busy


@contextmanager
def running_coordinator(state: Path, port: int = 0, policy: Policy = POLICY) -> Iterator[CoordinatorServer]:
    served = CoordinatorServer(Endpoint(port=port), policy, state, TOKEN)
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        yield served
    finally:
        served.stop()
        thread.join()


def is_closed(wire: socket.socket) -> bool:
    """Waits until the other end has closed the connection, or has sent something."""
    try:
        return wire.recv(1 << 12) == b""
    except ConnectionResetError:
        return True
