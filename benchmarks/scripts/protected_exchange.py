"""A client and an actor over loopback TCP, whose frames are bare, authenticated or encrypted.

Run by `benchmarks.communication.protection`; writes a JSON object to ``--report``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from unisono.comm import ActorConnection, ActorMessage, Answer
from unisono.comm.actors import wire_format
from unisono.comm.actors.client import ActorAddress, SocketConnection, directly, not_counted
from unisono.comm.actors.handshake import ConnectionTerms, TrustedConnection
from unisono.comm.actors.protection import Direction, Protected, Protection
from unisono.comm.actors.server import ActorServer

LARGE_ELEMENTS, SMALL_ELEMENTS = 10_000_000, 1024
KEY = bytes(16)


class Adding:
    """Answers a push with the sum of all pushes, as a parameter server does."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}

    def connected(self, lines: Sequence[ActorConnection]) -> None:
        """Needs no connections."""

    def lost(self, sender: int) -> None:
        """Does not wait for senders."""

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """The tensor that arrived is memory of this sender only, so the sum may be returned in it."""
        (x,) = message.tensors
        held = self._held.setdefault(x.numel(), torch.zeros_like(x))
        held += x
        x.copy_(held)
        answer(ActorMessage("sum", {}, [x]))


def connection(sock: socket.socket, way: str) -> TrustedConnection:
    """Both ends have one key: it is the cost that counts here."""
    mode = Protection[way.upper()]
    made: Callable[[], Direction] = partial(Protected, KEY, mode is Protection.ENCRYPTED) if mode else Direction
    return TrustedConnection(sock, ConnectionTerms(wire_format.LARGEST_BYTES, mode), made(), made())


def serve(core: int, way: str, port: int) -> None:
    """The actor's process."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    server = ActorServer(Adding(), 0, lambda sender, nbytes: None)
    server.connected([])
    with socket.create_connection(("127.0.0.1", port)) as sock:
        server.accept(connection(sock, way), 0)
        server._connections[0]._thread.join()  # until the client goes


def timed(push: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    """Seconds from call to answer."""
    began = time.perf_counter()
    push(x)
    return time.perf_counter() - began


def main() -> None:
    """Start the actor and report what a client found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=[each.name.lower() for each in Protection], required=True)
    parser.add_argument("--shared", action="store_true", help="both processes on one core")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trips", type=int, default=1000)
    parser.add_argument("--report", type=Path, required=True)
    asked = parser.parse_args()
    first, *others = sorted(os.sched_getaffinity(0))
    second = first if asked.shared else others[0]
    os.sched_setaffinity(0, {first})
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        actor = multiprocessing.get_context("spawn").Process(target=serve, args=(second, asked.way, port), daemon=True)
        actor.start()
        sock, _ = listening.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    assert actor.pid is not None
    line = SocketConnection(
        connection(sock, asked.way), ActorAddress(0, "actor", 0, "", 0, actor.pid), not_counted, directly
    )
    push = lambda x: line.call(ActorMessage("push", {"step": 1}, [x])).wait()
    small, large = torch.ones(SMALL_ELEMENTS), torch.ones(LARGE_ELEMENTS)
    microseconds = sorted(timed(push, small) * 1e6 for _ in range(asked.trips))
    seconds = [timed(push, large) for _ in range(asked.rounds + 2)][2:]
    line.close()
    actor.join()
    report = {
        "round_trip_microseconds": statistics.median(microseconds),
        "gigabytes_per_second": 2 * LARGE_ELEMENTS * 4 / statistics.median(seconds) / 1e9,
    }
    asked.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
