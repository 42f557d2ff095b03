"""Messages between an actor and its clients arrive unchanged, or the connection is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import pytest
import torch

from tests.campaigns.hostile_peers import Target, target
from unisono.comm import ActorMessage
from unisono.comm.actors import wire_format
from unisono.comm.actors.client import ActorAddress, SocketConnection, connect_actor
from unisono.comm.actors.handshake import ConnectionTerms, Untrusted, authenticate, challenge, verify
from unisono.comm.actors.message_stream import Inbox, Outbox
from unisono.comm.actors.protection import SEGMENT_BYTES, SINGLE_BYTES, TAG_BYTES, Direction, Protected, Protection
from unisono.comm.actors.wire_format import HEAD_BYTES, BrokenMessage
from unisono.errors import PeerLost

KEY = bytes(range(16))
SECRET = "a word that nobody else may read"
SIZES = [
    0,
    1,
    SINGLE_BYTES - 8,
    SINGLE_BYTES,
    SINGLE_BYTES + 1,
    SEGMENT_BYTES - 1,
    SEGMENT_BYTES,
    SEGMENT_BYTES + 1,
    3 * SEGMENT_BYTES,
    3 * SEGMENT_BYTES + 5,
]
SEVERAL = (5, 0, 70_000, SEGMENT_BYTES, 9, 2 * SEGMENT_BYTES)
MODES = pytest.mark.parametrize("encrypted", [False, True], ids=["authenticated", "encrypted"])


def message(*sizes: int) -> ActorMessage:
    """With tensors of so many bytes."""
    tensors = [torch.arange(size).to(torch.uint8) for size in sizes]
    return ActorMessage("push", {"said": SECRET}, tensors)


def on_the_wire(outgoing: Direction, *messages: ActorMessage) -> bytes:
    pieces = (part for each in messages for part in outgoing.protect(wire_format.encode(each)))
    return b"".join(piece for part in pieces for piece in part)


def arrived(data: bytes, incoming: Direction, count: int = 1) -> list[ActorMessage]:
    """What an actor is told that reads `data`."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def write() -> None:
            with suppress(BrokenPipeError):
                ours.sendall(data)
                ours.shutdown(socket.SHUT_WR)

        writer = threading.Thread(target=write)
        writer.start()
        inbox = Inbox(theirs, 1 << 24, incoming)
        try:
            found = [inbox.read() for _ in range(count)]
            return [
                ActorMessage(x.message.kind, x.message.fields, [y.clone() for y in x.message.tensors]) for x in found
            ]
        finally:
            theirs.shutdown(socket.SHUT_RDWR)
            writer.join()


@MODES
@pytest.mark.parametrize(
    "sizes", [*((size,) for size in SIZES), (), (5, 0, 70_000, SEGMENT_BYTES, 9, 2 * SEGMENT_BYTES)]
)
def test_messages_of_any_size_arrive_one_after_the_other(encrypted: bool, sizes: tuple[int, ...]) -> None:
    sent = [message(*sizes), message(3), message(*sizes)]
    data = on_the_wire(Protected(KEY, encrypted), *sent)
    for ours, theirs in zip(sent, arrived(data, Protected(KEY, encrypted), 3), strict=True):
        assert (theirs.kind, theirs.fields) == (ours.kind, ours.fields)
        assert all(map(torch.equal, theirs.tensors, ours.tensors))
    assert (SECRET.encode() in data) is not encrypted
    assert (bytes(range(100)) in data) is (max(sizes, default=0) >= 100 and not encrypted)


@MODES
def test_a_message_of_the_largest_size_is_taken(encrypted: bool) -> None:
    data = on_the_wire(Protected(KEY, encrypted), message(1 << 24))
    (found,) = arrived(data, Protected(KEY, encrypted))
    assert found.tensors[0].nbytes == 1 << 24


@MODES
def test_no_bit_of_a_message_can_be_altered(encrypted: bool) -> None:
    data = on_the_wire(Protected(KEY, encrypted), message(40))
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1 << place % 8
        with pytest.raises((BrokenMessage, ConnectionResetError)):  # reset: its head announced more than came
            arrived(bytes(altered), Protected(KEY, encrypted))


@MODES
def test_no_segment_can_be_repeated_left_out_or_moved(encrypted: bool) -> None:
    outgoing = Protected(KEY, encrypted)
    parts = [b"".join(part) for part in outgoing.protect(wire_format.encode(message(3 * SEGMENT_BYTES)))]
    assert len(parts[1]) == SEGMENT_BYTES + TAG_BYTES
    for order in ([0, 1, 1, 3], [0, 2, 1, 3], [0, 2, 3, 3], [0, 1, 3, 2]):
        with pytest.raises(BrokenMessage, match="altered, repeated or left out"):
            arrived(b"".join(parts[each] for each in order), Protected(KEY, encrypted))
    whole = b"".join(parts)
    with pytest.raises(BrokenMessage):
        arrived(whole * 2, Protected(KEY, encrypted), 2)
    for other in (Protected(bytes(16), encrypted), Protected(KEY, not encrypted)):
        with pytest.raises(BrokenMessage):
            arrived(whole, other)


@MODES
def test_small_and_large_messages_leave_in_order_from_any_thread(encrypted: bool) -> None:
    ours, theirs = socket.socketpair()
    outbox, inbox = Outbox(ours, "test", Protected(KEY, encrypted)), Inbox(theirs, 1 << 26, Protected(KEY, encrypted))
    sizes = [8, 4 * SEGMENT_BYTES, 8, 40_000, 80_000, 8] * 3
    sent: list[int] = []

    def send(first: int) -> None:
        for number in range(first, len(sizes), 2):
            outbox.send(wire_format.encode(message(sizes[number]), number), lambda number=number: sent.append(number))  # type: ignore[misc]

    threads = [threading.Thread(target=send, args=(first,)) for first in (0, 1)]
    with ours, theirs:
        for thread in threads:
            thread.start()
        found = {}
        for _ in sizes:
            arrival = inbox.read()
            found[arrival.call] = arrival.message.tensors[0].nbytes
            inbox.buffers.give(arrival.buffer)
        for thread in threads:
            thread.join()
        outbox.drained()
        outbox.close()
    assert found == dict(enumerate(sizes))
    assert sorted(sent) == sorted(found)


class Relay:
    """Somebody on the path: passes the handshake on, and what comes after it through `alter`, both ways.

    Attributes:
        passed: what it has seen, client's bytes first.
    """

    def __init__(self, to: tuple[str, int], alter: Callable[[bytes, bool], bytes]) -> None:
        self.passed = (bytearray(), bytearray())
        self._to, self._alter = to, alter
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        with suppress(OSError):
            client, _ = self._door.accept()
            server = socket.create_connection(self._to)
            back = threading.Thread(target=self._pass, args=(server, client, False))
            self._threads.append(back)
            back.start()
            self._pass(client, server, True)

    def _pass(self, here: socket.socket, there: socket.socket, from_client: bool) -> None:
        with suppress(OSError), here:
            while data := here.recv(1 << 16):
                self.passed[not from_client].extend(data)
                there.sendall(self._alter(data, from_client))
        with suppress(OSError):
            there.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._door.close()
        for thread in self._threads:
            thread.join(10.0)


@contextmanager
def relayed(server: Target, alter: Callable[[bytes, bool], bytes]) -> Iterator[tuple[SocketConnection, Relay]]:
    assert isinstance(server.address, tuple)
    with closing(Relay(server.address, alter)) as relay:
        place: ActorAddress = server.connection._actor  # type: ignore[attr-defined]
        through = replace(place, address="127.0.0.1", port=relay.port, nearby="")
        with closing(connect_actor(through, server.token, 1000, 20.0)) as connection:
            yield connection, relay


@pytest.fixture(scope="module")
def server() -> Iterator[Target]:
    with target("network") as made:
        yield made


def test_a_relay_that_alters_what_is_pushed_loses_the_connection(server: Target) -> None:
    before = server.value()
    altering = threading.Event()

    def alter(data: bytes, from_client: bool) -> bytes:
        return data.replace(b"\x00\x00\x80\x3f", b"\x00\x00\x00\x40") if altering.is_set() and from_client else data

    with relayed(server, alter) as (connection, _):
        ones = torch.ones(before.numel())
        assert torch.equal(connection.call(ActorMessage("echo", {}, [ones])).wait().tensors[0], ones)
        altering.set()
        with pytest.raises(PeerLost):
            connection.call(ActorMessage("add", {}, [ones])).wait()
    assert torch.equal(server.value(), before)


def test_a_relay_that_alters_an_answer_loses_the_connection(server: Target) -> None:
    altering = threading.Event()

    def alter(data: bytes, from_client: bool) -> bytes:
        return data[:-20] + b"\x00\x00\x00\x40" + data[-16:] if altering.is_set() and not from_client else data

    with relayed(server, alter) as (connection, _):
        connection.call(ActorMessage("value")).wait()
        altering.set()
        with pytest.raises(PeerLost, match="altered"):
            connection.call(ActorMessage("value")).wait()


def test_a_relay_that_repeats_what_was_pushed_is_not_believed(server: Target) -> None:
    before = server.value()
    repeating = threading.Event()

    def alter(data: bytes, from_client: bool) -> bytes:
        return data * 2 if repeating.is_set() and from_client else data

    with relayed(server, alter) as (connection, _):
        connection.call(ActorMessage("value")).wait()
        repeating.set()
        pushed = torch.ones(before.numel(), dtype=torch.float64)
        connection.call(ActorMessage("add", {}, [pushed])).wait()  # the first of the two is what was sent
    assert torch.equal(server.value(), before + pushed)
    server.connection.call(ActorMessage("add", {}, [-pushed])).wait()


def test_what_was_reached_by_its_local_name_from_elsewhere_is_not_trusted() -> None:
    """A relay that has come in by the server's local name, where frames are bare, for a client on another host."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        token, terms = b"token", ConnectionTerms(1 << 20, Protection.NONE)

        def serve() -> None:
            sock, _ = door.accept()
            with sock:
                challenge_bytes = challenge()
                sock.sendall(challenge_bytes)
                claim_bytes = sock.recv(1000)
                sock.sendall(verify(token, challenge_bytes, claim_bytes, 0, terms)[1])

        thread = threading.Thread(target=serve)
        thread.start()
        with socket.create_connection(door.getsockname()) as sock:
            sock.settimeout(10.0)
            with pytest.raises(Untrusted, match="another process relays it"):
                authenticate(sock, token, 1, 0)
        thread.join()


def test_the_head_alone_is_read_before_its_tag() -> None:
    """What it announces is bounded, whoever wrote it."""
    data = on_the_wire(Protected(KEY, True), message(8))
    with pytest.raises(BrokenMessage, match="at most"):
        arrived(data[: HEAD_BYTES - 8] + b"\xff" * 8 + data[HEAD_BYTES:], Protected(KEY, True))
