"""Attacks on servers: connections without the token, floods, random bytes and malformed messages.

python -m tests.campaigns.hostile_peers --seconds 60      # the long form of the tests
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from unisono.comm import ActorConnection, ActorMessage, SingleWorker
from unisono.comm.actors import handshake, wire_format
from unisono.comm.actors.listener import abstract
from unisono.comm.actors.services import ActorHost
from unisono.comm.actors.wire_format import BrokenMessage

LARGEST_BYTES = 1 << 22
UNKNOWN_SENDER = 1000  # numbers of senders from here on belong to no worker


@dataclass
class Target:
    """A server in a process of its own, a good client of it, and what an enemy may know."""

    connection: ActorConnection
    pid: int
    family: socket.AddressFamily
    address: tuple[str, int] | str
    token: bytes

    def value(self) -> torch.Tensor:
        """The state of the actor."""
        return self.connection.call(ActorMessage("value")).wait().tensors[0].clone()

    def memory_bytes(self) -> int:
        """What the server has in memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def connect(self) -> socket.socket:
        """A connection that has not said anything."""
        wire = socket.socket(self.family)
        try:
            wire.connect(self.address)
        except OSError:
            wire.close()
            raise
        wire.settimeout(10.0)
        return wire

    def trusted(self, number: int = UNKNOWN_SENDER) -> Client:
        """A connection that knows the token."""
        return Client(handshake.authenticate(self.connect(), self.token, number, 0))


@dataclass
class Client:
    """One that was let in, and says whatever it likes: its tags are right."""

    trusted: handshake.TrustedConnection

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    @property
    def sock(self) -> socket.socket:
        return self.trusted.sock

    def say(self, data: bytes) -> None:
        """`data`, cut into segments as the head that it begins with announces them."""
        first = len(data)
        with suppress(BrokenMessage, struct.error):
            head = wire_format.Head.parse(data[: wire_format.HEAD_BYTES], LARGEST_BYTES)
            first = wire_format.HEAD_BYTES + head.table_bytes + head.text_bytes
        parts = self.trusted.outgoing.protect([memoryview(data[:first]), memoryview(data[first:])])
        self.sock.sendall(b"".join(piece for part in parts for piece in part))


DOORS = ("network", "nearby")


@contextmanager
def target(door: str) -> Iterator[Target]:
    """A server that has been told a number, and the promise that it still knows it in the end; all who come from
    now on come by the same `door`."""
    actor_host = ActorHost(timeout_seconds=60.0)
    try:
        (connection,) = actor_host.serve(
            SingleWorker(), 1, "tests.support.actors:Echo", {"largest_bytes": LARGEST_BYTES}
        )
        place = connection._actor  # type: ignore[attr-defined]
        family, address = {
            "network": (socket.AF_INET, (place.address, place.port)),
            "nearby": (socket.AF_UNIX, abstract(place.nearby)),
        }[door]
        made = Target(connection, place.pid, family, address, actor_host._token)
        told = torch.arange(1000, dtype=torch.float64)
        connection.call(ActorMessage("add", {}, [told])).wait()
        crowd(made, 200)  # memory that a crowd takes once
        before = made.memory_bytes()
        yield made
        assert torch.equal(made.value(), told), "the state has changed"
        grown = made.memory_bytes() - before
        assert grown < 8 << 20, f"the server has grown by {grown} bytes"
    finally:
        actor_host.close()


def wrong_token(server: Target) -> None:
    """Somebody who knows everything but the token."""
    for guess in (bytes(32), secrets.token_bytes(32), server.token[::-1], b""):
        with server.connect() as wire:
            challenge_bytes = handshake._receive_exactly(wire, handshake.CHALLENGE_BYTES)
            wire.sendall(handshake.claim(guess, challenge_bytes, 0, 0))
            assert ended(wire)


def replay(server: Target) -> None:
    """What another conversation has proved proves nothing here."""
    with server.connect() as first, server.connect() as second:
        challenge_bytes = handshake._receive_exactly(first, handshake.CHALLENGE_BYTES)
        handshake._receive_exactly(second, handshake.CHALLENGE_BYTES)
        second.sendall(handshake.claim(server.token, challenge_bytes, UNKNOWN_SENDER, 0))
        assert ended(second)


def broken_messages(server: Target) -> None:
    """A client that is trusted and broken: it loses its connection, and nothing else happens."""
    good = b"".join(wire_format.encode(ActorMessage("value", {}, [torch.zeros(4)])))
    head = lambda text, tensors, payload: struct.pack("<4sIIxxxxQQ", b"uni2", text, tensors, 0, payload)
    table = lambda code, numel: struct.pack("<B7xQ", code, numel)
    cases = [
        b"uni1" + good[4:],
        bytes(64),
        head(2, 1, 1 << 63),
        head(2, 1, LARGEST_BYTES + 8),
        head(1 << 31, 0, 0),
        head(2, 1 << 31, 0),
        head(2, 1, 16) + table(0, (1 << 63) + 4) + b"{}" + bytes(16),
        head(2, 1, 16) + table(99, 4) + b"{}" + bytes(16),
        head(2, 2, 16) + table(0, 2**62) * 2 + b"{}" + bytes(16),
        *(head(len(text), 0, 0) + text for text in TEXTS),
    ]
    for case in cases:
        with server.trusted() as client:
            client.say(case)
            assert ended(client.sock), case
    for length in (1, 31, 32, 40, len(good) - 1):
        with server.trusted() as client:
            client.sock.sendall(good[:length])
            client.sock.shutdown(socket.SHUT_WR)
            assert ended(client.sock), length


TEXTS = [
    *(b"\0", b"\0" * 100, b"{}", b"[]", b'["value"]', b'["value", []]', b"[1, {}]", b'"value"', b"\xff\xfe", b"nul"),
    *(b"[" * 100_000, b'["value", {"a": ' + b"9" * 10_000 + b"}]", b'["no such word", {}]', b'["__init__", {}]'),
]


def crowd(server: Target, count: int) -> None:
    """Connections that are opened, say nothing and stay, as many as this process may have."""
    left = count
    while left > 0:
        batch: list[socket.socket] = []
        try:
            for _ in range(min(left, _descriptors())):
                wire = socket.socket(server.family)
                batch.append(wire)
                wire.setblocking(False)
                with suppress(BlockingIOError):
                    wire.connect(server.address)
                if len(batch) % 100 == 0:
                    time.sleep(0.001)
            served(server)
        finally:
            for wire in batch:
                wire.close()
        left -= len(batch)


def noise(server: Target, seconds: float, seed: int = 0) -> int:
    """Random bytes of strangers and of trusted clients, for so long; returns how many connections it took."""
    source, count, until = random.Random(seed), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        count += 1
        junk = source.randbytes(source.choice([1, 8, 88, 200, 5000]))
        said = b"uni2" + junk if source.random() < 0.3 else junk
        with suppress(ConnectionError):
            if count % 2:
                with server.trusted() as client:
                    client.say(said) if source.random() < 0.5 else client.sock.sendall(said)
            else:
                with server.connect() as wire:
                    wire.sendall(said)
        if count % 50 == 0:
            served(server)
    return count


def served(server: Target) -> None:
    """A newcomer who knows the token gets in, and is answered, whatever else goes on."""
    until = time.monotonic() + 20.0
    while True:
        try:
            with server.trusted(UNKNOWN_SENDER + 1) as client:
                client.say(b"".join(wire_format.encode(ActorMessage("value"))))
                assert client.sock.recv(4) == b"uni2"
                return
        except ConnectionError:  # it had to make room, or its predecessor is not gone yet
            assert time.monotonic() < until


def ended(wire: socket.socket) -> bool:
    """The other end closes the connection, and says nothing before."""
    try:
        return wire.recv(1) == b""
    except ConnectionResetError:
        return True


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(50, min(10_000, soft - len(os.listdir("/proc/self/fd")) - 50))


ATTACKS: dict[str, Callable[[Target], None]] = {
    "wrong token": wrong_token,
    "replay": replay,
    "broken messages": broken_messages,
}


def main() -> None:
    """All attacks, at length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of noise (60)")
    parser.add_argument("--connections", type=int, default=10_000, help="at a time, as far as may be (10,000)")
    asked = parser.parse_args()
    for door in DOORS:
        with target(door) as server:
            for name, attack in ATTACKS.items():
                attack(server)
                print(f"{door}: {name}: withstood", flush=True)
            crowd(server, asked.connections)
            print(f"{door}: {asked.connections} connections: withstood", flush=True)
            count = noise(server, asked.seconds)
            print(f"{door}: noise for {asked.seconds:g} s on {count} connections: withstood", flush=True)
    print("same state, no more memory")


if __name__ == "__main__":
    main()
