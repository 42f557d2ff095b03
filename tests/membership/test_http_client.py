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


Prove = Callable[[int, bytes], str]  # the proof of a response, from its status and body
Encode = Callable[[Prove], bytes]


def response(body: bytes, status: str = "200 OK", *headers: str) -> Encode:
    """A response with its proof."""

    def encode(prove: Prove) -> bytes:
        proof = f"Unisono-Proof: {prove(int(status[:3]), body)}"
        lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", proof, *headers)
        return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body

    return encode


def just(data: bytes) -> Encode:
    """Only these bytes."""
    return lambda prove: data


class FakeCoordinator:
    """Sends the given responses to any requests, and knows the token; for None it closes the connection."""

    def __init__(self, answers: Sequence[Encode | None]) -> None:
        self.proving = RequestVerifier(TOKEN)
        self.asked: list[bytes] = []
        self.connections = self.challenged = 0
        self.received = threading.Event()
        self._answers = list(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, suppress(ConnectionError):  # the client may disconnect
                self.connections += 1
                while asked := connection.recv(1 << 16):
                    if asked.startswith(b"GET /v1/challenge "):
                        self.challenged += 1
                        connection.sendall(self._challenge())
                        continue
                    self.asked.append(asked)
                    self.received.set()
                    if asked == b"end":
                        return
                    if not self._answers:
                        continue
                    answer = self._answers.pop(0)
                    if answer is None:
                        break
                    connection.sendall(answer(self._prover(asked)))

    def _challenge(self) -> bytes:
        header = f"www-authenticate: Bearer\r\nwww-authenticate: Unisono {self.proving.challenge}\r\n"
        return f"HTTP/1.1 401 Unauthorized\r\n{header}content-length: 0\r\n\r\n".encode()

    def _prover(self, asked: bytes) -> Prove:
        head, _, body = asked.decode("latin-1").partition("\r\n\r\n")
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ")
        (given,) = [line.partition(": ")[2] for line in lines if line.startswith("authorization: ")]
        claim = self.proving.verify(method, path, given)
        assert claim is not None, "no proof, or a replay"
        assert claim.digest == hashlib.sha256(body.encode("latin-1")).hexdigest()
        return lambda status, header: self.proving.proof(claim, status, hashlib.sha256(header).hexdigest())

    def close(self) -> None:
        with socket.create_connection(self._listener.getsockname()) as connection:
            connection.sendall(b"end")
        self._thread.join()
        self._listener.close()


@contextmanager
def asking(*answers: Encode | None, seconds: float = 10.0) -> Iterator[tuple[HttpConnection, FakeCoordinator]]:
    server = FakeCoordinator(answers)
    line = HttpConnection(CoordinatorAddress(server.url, TOKEN), seconds)
    try:
        yield line, server
    finally:
        line.close()
        server.close()


def test_a_request_is_one_packet_with_its_length_and_a_proof_of_the_token() -> None:
    with asking(response(b'{"number": 1}')) as (line, server):
        assert line.request("POST", "/v1/beat", {"worker": "w\u00e4"}, Is) == HttpResponse(200, Is(number=1))
    head, _, body = server.asked[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/beat HTTP/1.1"
    assert f"content-length: {len(body)}" in lines
    assert any(line.startswith("authorization: Unisono ") for line in lines)
    assert TOKEN not in head.decode()
    assert json.loads(body) == {"worker": "w\u00e4"}


def test_later_requests_use_the_same_connection() -> None:
    with asking(response(b"1"), response(b"", "204 No Content"), response(b"3")) as (line, server):
        found = [line.get("/", Number) for _ in range(3)]
        assert found == [number(1), HttpResponse(204, None), number(3)]
        assert server.connections == 1


def test_a_response_may_be_compressed_and_chunked() -> None:
    compressed = gzip.compress(b'{"number": 2}')
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (compressed[:5], compressed[5:], b""))
    head = "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\nunisono-proof: "
    with asking(lambda prove: f"{head}{prove(200, compressed)}\r\n\r\n".encode() + chunks) as (line, _):
        assert line.post("/", {}, Is) == Is(number=2)


@pytest.mark.parametrize("closes", [
    [response(b"1", "200 OK", "Connection: close"), response(b"2")],  # announced
    [response(b"1"), None, response(b"2")],  # not announced
])  # fmt: skip
def test_a_closed_connection_is_reopened(closes) -> None:
    with asking(*closes) as (line, server):
        assert line.get("/", Number) == number(1)
        assert line.get("/", Number) == number(2)
        assert server.connections == 2


@pytest.mark.parametrize("answer", [
    None,
    just(b"no HTTP at all\r\n\r\n"),
    response(b"no JSON"),
    response(b'{"number": 2}'),
    response(b"[" * 100_000),
    response(b"not compressed", "200 OK", "Content-Encoding: gzip"),
    just(b"HTTP/1.1 200 OK\r\nX: " + b"x" * (17 << 20)),
    just(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n2"),
    just(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nunisono-proof: %b\r\n\r\n2" % (b"0" * 64)),
    just(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"),
    lambda prove: response(b"2")(lambda status, body: prove(status, b"3")),
    lambda prove: response(b"2")(lambda status, body: prove(204, body)),
], ids=["closed", "no HTTP", "no JSON", "another message", "nested", "not compressed", "too long", "no proof",
        "a false proof", "a refusal without a proof", "another body's proof", "another status's proof"])  # fmt: skip
def test_an_invalid_response_is_none_and_the_connection_is_reopened(answer) -> None:
    answers = [answer] if answer else [None, None]  # on a closed connection the request is repeated
    with asking(*answers, response(b"2")) as (line, _):
        assert line.get("/", Number) is None
        assert not line.refused
        assert line.get("/", Number) == number(2)


def test_an_error_is_its_status() -> None:
    with asking(response(b"why", "422 Unprocessable Entity")) as (line, _):
        assert line.get("/", Number) == HttpResponse(422, None)


def test_a_late_response_is_none() -> None:
    with asking(seconds=0.1) as (line, _):
        assert line.get("/", Number) is None


def test_a_refused_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = HttpConnection(CoordinatorAddress(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN))
    assert line.get("/", Number) is None
    assert line.refused


def test_a_request_in_flight_can_be_cancelled() -> None:
    with asking(response(b"1")) as (line, server):
        assert line.get("/", Number) == number(1)  # so that the connection is reused
        server.received.clear()
        found: list[HttpResponse | None] = []
        waiting = threading.Thread(target=lambda: found.append(line.get("/", Number)))
        waiting.start()
        assert server.received.wait(10)
        line.cancel()
        waiting.join()
        assert found == [None]
        assert server.connections == 1


@pytest.mark.parametrize("token", ["two\r\nlines", "caf\u00e9"])
def test_a_token_that_is_not_printable_is_refused(token) -> None:
    with pytest.raises(InvalidInput, match="printable"):
        HttpConnection(CoordinatorAddress("http://127.0.0.1:1", token))


def test_a_server_without_the_token_learns_nothing_of_it_and_is_not_trusted() -> None:
    """A server at the coordinator's address, which receives all requests."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = HttpConnection(CoordinatorAddress(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN), 5.0)
        found: list[HttpResponse | None] = []
        asking = threading.Thread(target=lambda: found.append(line.get("/v1/order", Number)))
        asking.start()
        connection, _ = listener.accept()
        with connection:
            received.append(connection.recv(1 << 16))
            challenge = "0" * 32
            connection.sendall(
                f"HTTP/1.1 401 X\r\nwww-authenticate: Unisono {challenge}\r\ncontent-length: 0\r\n\r\n".encode()
            )
            received.append(connection.recv(1 << 16))
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nunisono-proof: %b\r\n\r\n1" % (b"a" * 64))
        asking.join()
        line.close()
    assert found == [None]
    assert not any(TOKEN.encode() in each for each in received)


def test_a_restarted_coordinator_has_another_challenge() -> None:
    def again(server: FakeCoordinator) -> Encode:
        def encode(prove: Prove) -> bytes:
            server.proving = RequestVerifier(TOKEN)
            return server._challenge()

        return encode

    with asking(response(b"1")) as (line, server):
        assert line.get("/", Number) == number(1)
        server._answers += [again(server), response(b"2")]
        assert line.get("/", Number) == number(2)


def test_replays_and_changed_requests_are_refused() -> None:
    proving, signer = RequestVerifier(TOKEN), RequestSigner(TOKEN)
    assert signer.accept_challenge(f"Unisono {proving.challenge}")
    header = signer.authorization("POST", "/v1/gone", b"{}")
    for method, path in (("PUT", "/v1/gone"), ("POST", "/v1/beat")):
        assert proving.verify(method, path, header) is None
    for place in range(1, 6):
        words = header.split(" ")
        words[place] = words[place][:-1] + ("0" if words[place][-1] != "0" else "1")
        assert proving.verify("POST", "/v1/gone", " ".join(words)) is None
    claim = proving.verify("POST", "/v1/gone", header)
    assert claim is not None
    assert claim.digest == hashlib.sha256(b"{}").hexdigest()
    assert proving.verify("POST", "/v1/gone", header) is None, "it was replayed"
    assert RequestVerifier(TOKEN).verify("POST", "/v1/gone", header) is None, "another process has another challenge"
    assert RequestVerifier("another token").verify("POST", "/v1/gone", header) is None


def test_too_many_clients_cause_a_new_challenge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_MAX_CLIENTS", 3)
    proving = RequestVerifier(TOKEN)
    clients = [RequestSigner(TOKEN) for _ in range(4)]
    for client in clients:
        client.accept_challenge(f"Unisono {proving.challenge}")
    received = [client.authorization("GET", "/", b"") for client in clients]
    assert [proving.verify("GET", "/", each) is not None for each in received] == [True, True, True, False]
    assert all(proving.verify("GET", "/", each) is None for each in received)
    for client in clients[:3]:
        client.accept_challenge(f"Unisono {proving.challenge}")
        assert proving.verify("GET", "/", client.authorization("GET", "/", b"")) is not None


def test_siblings_share_the_challenge() -> None:
    with asking(response(b"1"), response(b"2")) as (line, server):
        sibling = line.sibling()
        assert sibling._signer is not line._signer  # each counts its own requests
        assert line.get("/", Number) == number(1)
        line.close()
        assert sibling.get("/", Number) == number(2)
        sibling.close()
    assert server.challenged == 1
