"""A client's connection: its requests, the answers that it reads, and those that it rejects."""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
from pydantic import BaseModel, RootModel

from unisono.errors import InvalidInput
from unisono.membership import CoordinatorAddress, proof
from unisono.membership.http_client import HttpConnection, HttpResponse
from unisono.membership.proof import RequestSigner, RequestVerifier

TOKEN = "a token of a run"


class Is(BaseModel):
    number: int


class Number(RootModel[int]):
    pass


def number(value: int) -> HttpResponse[Number]:
    return HttpResponse(200, Number(value))


Prove = Callable[[int, bytes], str]  # the proof of an answer to what was asked, of its status and body
Say = Callable[[Prove], bytes]


def told(body: bytes, status: str = "200 OK", *headers: str) -> Say:
    """An answer with its proof."""

    def say(prove: Prove) -> bytes:
        proof = f"Unisono-Proof: {prove(int(status[:3]), body)}"
        lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", proof, *headers)
        return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body

    return say


def just(data: bytes) -> Say:
    """No more than these bytes."""
    return lambda prove: data


class Desk:
    """Answers what it was given, whatever it is asked, and knows the token; after None it closes the connection."""

    def __init__(self, answers: Sequence[Say | None]) -> None:
        self.proving = RequestVerifier(TOKEN)
        self.asked: list[bytes] = []
        self.connections = self.challenged = 0
        self.hears = threading.Event()
        self._answers = list(answers)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            wire, _ = self._door.accept()
            with wire, suppress(ConnectionError):  # who asks may have enough
                self.connections += 1
                while asked := wire.recv(1 << 16):
                    if asked.startswith(b"GET /v1/challenge "):
                        self.challenged += 1
                        wire.sendall(self._challenge())
                        continue
                    self.asked.append(asked)
                    self.hears.set()
                    if asked == b"end":
                        return
                    if not self._answers:
                        continue
                    answer = self._answers.pop(0)
                    if answer is None:
                        break
                    wire.sendall(answer(self._prover(asked)))

    def _challenge(self) -> bytes:
        said = f"www-authenticate: Bearer\r\nwww-authenticate: Unisono {self.proving.challenge}\r\n"
        return f"HTTP/1.1 401 Unauthorized\r\n{said}content-length: 0\r\n\r\n".encode()

    def _prover(self, asked: bytes) -> Prove:
        head, _, body = asked.decode("latin-1").partition("\r\n\r\n")
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ")
        (given,) = [line.partition(": ")[2] for line in lines if line.startswith("authorization: ")]
        claim = self.proving.verify(method, path, given)
        assert claim is not None, "it is no proof, or was heard before"
        assert claim.digest == hashlib.sha256(body.encode("latin-1")).hexdigest()
        return lambda status, said: self.proving.proof(claim, status, hashlib.sha256(said).hexdigest())

    def close(self) -> None:
        with socket.create_connection(self._door.getsockname()) as wire:
            wire.sendall(b"end")
        self._thread.join()
        self._door.close()


@contextmanager
def asking(*answers: Say | None, seconds: float = 10.0) -> Iterator[tuple[HttpConnection, Desk]]:
    desk = Desk(answers)
    line = HttpConnection(CoordinatorAddress(desk.url, TOKEN), seconds)
    try:
        yield line, desk
    finally:
        line.close()
        desk.close()


def test_a_request_is_one_packet_with_its_length_and_a_proof_of_the_token() -> None:
    with asking(told(b'{"number": 1}')) as (line, desk):
        assert line.request("POST", "/v1/beat", {"worker": "w\u00e4"}, Is) == HttpResponse(200, Is(number=1))
    head, _, body = desk.asked[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/beat HTTP/1.1"
    assert f"content-length: {len(body)}" in lines
    assert any(line.startswith("authorization: Unisono ") for line in lines)
    assert TOKEN not in head.decode()
    assert json.loads(body) == {"worker": "w\u00e4"}


def test_what_follows_is_asked_on_the_same_connection() -> None:
    with asking(told(b"1"), told(b"", "204 No Content"), told(b"3")) as (line, desk):
        found = [line.get("/", Number) for _ in range(3)]
        assert found == [number(1), HttpResponse(204, None), number(3)]
        assert desk.connections == 1


def test_an_answer_may_be_packed_and_come_in_chunks() -> None:
    packed = gzip.compress(b'{"number": 2}')
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (packed[:5], packed[5:], b""))
    head = "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\nunisono-proof: "
    with asking(lambda prove: f"{head}{prove(200, packed)}\r\n\r\n".encode() + chunks) as (line, _):
        assert line.post("/", {}, Is) == Is(number=2)


@pytest.mark.parametrize("closes", [
    [told(b"1", "200 OK", "Connection: close"), told(b"2")],  # it is said
    [told(b"1"), None, told(b"2")],  # it is not
])  # fmt: skip
def test_a_connection_that_was_closed_is_made_again(closes) -> None:
    with asking(*closes) as (line, desk):
        assert line.get("/", Number) == number(1)
        assert line.get("/", Number) == number(2)
        assert desk.connections == 2


@pytest.mark.parametrize("answer", [
    None,
    just(b"no HTTP at all\r\n\r\n"),
    told(b"no JSON"),
    told(b'{"number": 2}'),
    told(b"[" * 100_000),
    told(b"not packed", "200 OK", "Content-Encoding: gzip"),
    just(b"HTTP/1.1 200 OK\r\nX: " + b"x" * (17 << 20)),
    just(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n2"),
    just(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nunisono-proof: %b\r\n\r\n2" % (b"0" * 64)),
    just(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"),
    lambda prove: told(b"2")(lambda status, body: prove(status, b"3")),
    lambda prove: told(b"2")(lambda status, body: prove(204, body)),
], ids=["closed", "no HTTP", "no JSON", "another message", "nested", "not packed", "too long", "no proof",
        "a false proof", "a refusal without a proof", "another body's proof", "another status's proof"])  # fmt: skip
def test_no_answer_is_none_and_is_asked_anew(answer) -> None:
    answers = [answer] if answer else [None, None]  # what was closed meanwhile is asked once more
    with asking(*answers, told(b"2")) as (line, _):
        assert line.get("/", Number) is None
        assert not line.refused
        assert line.get("/", Number) == number(2)


def test_an_error_is_its_status() -> None:
    with asking(told(b"why", "422 Unprocessable Entity")) as (line, _):
        assert line.get("/", Number) == HttpResponse(422, None)


def test_who_answers_too_late_is_away() -> None:
    with asking(seconds=0.1) as (line, _):
        assert line.get("/", Number) is None


def test_nobody_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        line = HttpConnection(CoordinatorAddress(f"http://127.0.0.1:{door.getsockname()[1]}", TOKEN))
    assert line.get("/", Number) is None
    assert line.refused


def test_who_waits_for_an_answer_can_be_cut_off() -> None:
    with asking(told(b"1")) as (line, desk):
        assert line.get("/", Number) == number(1)  # so that the connection is one that was used
        desk.hears.clear()
        found: list[HttpResponse | None] = []
        waiting = threading.Thread(target=lambda: found.append(line.get("/", Number)))
        waiting.start()
        assert desk.hears.wait(10)
        line.cancel()
        waiting.join()
        assert found == [None]
        assert desk.connections == 1


@pytest.mark.parametrize("token", ["two\r\nlines", "caf\u00e9"])
def test_a_token_that_cannot_be_said_is_refused(token) -> None:
    with pytest.raises(InvalidInput, match="printable"):
        HttpConnection(CoordinatorAddress("http://127.0.0.1:1", token))


def test_whoever_does_not_know_the_token_learns_nothing_of_it_and_is_not_believed() -> None:
    """A server that answers at the coordinator's address, and has all that clients say."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as door:
        line = HttpConnection(CoordinatorAddress(f"http://127.0.0.1:{door.getsockname()[1]}", TOKEN), 5.0)
        found: list[HttpResponse | None] = []
        asking = threading.Thread(target=lambda: found.append(line.get("/v1/order", Number)))
        asking.start()
        wire, _ = door.accept()
        with wire:
            heard.append(wire.recv(1 << 16))
            challenge = "0" * 32
            wire.sendall(
                f"HTTP/1.1 401 X\r\nwww-authenticate: Unisono {challenge}\r\ncontent-length: 0\r\n\r\n".encode()
            )
            heard.append(wire.recv(1 << 16))
            wire.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nunisono-proof: %b\r\n\r\n1" % (b"a" * 64))
        asking.join()
        line.close()
    assert found == [None]
    assert not any(TOKEN.encode() in each for each in heard)


def test_a_coordinator_that_was_started_again_has_another_challenge() -> None:
    def again(desk: Desk) -> Say:
        def say(prove: Prove) -> bytes:
            desk.proving = RequestVerifier(TOKEN)
            return desk._challenge()

        return say

    with asking(told(b"1")) as (line, desk):
        assert line.get("/", Number) == number(1)
        desk._answers += [again(desk), told(b"2")]
        assert line.get("/", Number) == number(2)


def test_nothing_is_heard_twice_nor_under_another_path_or_body() -> None:
    proving, asking_ = RequestVerifier(TOKEN), RequestSigner(TOKEN)
    assert asking_.accept_challenge(f"Unisono {proving.challenge}")
    said = asking_.authorization("POST", "/v1/gone", b"{}")
    for method, path in (("PUT", "/v1/gone"), ("POST", "/v1/beat")):
        assert proving.verify(method, path, said) is None
    for place in range(1, 6):
        words = said.split(" ")
        words[place] = words[place][:-1] + ("0" if words[place][-1] != "0" else "1")
        assert proving.verify("POST", "/v1/gone", " ".join(words)) is None
    claim = proving.verify("POST", "/v1/gone", said)
    assert claim is not None
    assert claim.digest == hashlib.sha256(b"{}").hexdigest()
    assert proving.verify("POST", "/v1/gone", said) is None, "it was replayed"
    assert RequestVerifier(TOKEN).verify("POST", "/v1/gone", said) is None, "another process has another challenge"
    assert RequestVerifier("another token").verify("POST", "/v1/gone", said) is None


def test_when_too_many_clients_were_seen_all_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_MAX_CLIENTS", 3)
    proving = RequestVerifier(TOKEN)
    clients = [RequestSigner(TOKEN) for _ in range(4)]
    for client in clients:
        client.accept_challenge(f"Unisono {proving.challenge}")
    heard = [client.authorization("GET", "/", b"") for client in clients]
    assert [proving.verify("GET", "/", each) is not None for each in heard] == [True, True, True, False]
    assert all(proving.verify("GET", "/", each) is None for each in heard)
    for client in clients[:3]:
        client.accept_challenge(f"Unisono {proving.challenge}")
        assert proving.verify("GET", "/", client.authorization("GET", "/", b"")) is not None


def test_what_one_connection_learns_of_the_coordinator_another_beside_it_knows() -> None:
    with asking(told(b"1"), told(b"2")) as (line, desk):
        beside = line.sibling()
        assert beside._signer is not line._signer  # each counts its own requests
        assert line.get("/", Number) == number(1)
        line.close()
        assert beside.get("/", Number) == number(2)
        beside.close()
    assert desk.challenged == 1
