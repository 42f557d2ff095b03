"""A client's connection: what it says, what it reads, and what it takes for no answer."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
from pydantic import BaseModel, RootModel

from unisono.errors import InvalidInput
from unisono.membership import Contact
from unisono.membership.line import Answer, Line

TOKEN = "a token of a run"


class Is(BaseModel):
    number: int


class Number(RootModel[int]):
    pass


def number(value: int) -> Answer[Number]:
    return Answer(200, Number(value))


def told(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers))
    return head.encode() + b"\r\n" + body


class Desk:
    """Answers what it was given, whatever it is asked; after None it closes the connection."""

    def __init__(self, answers: Sequence[bytes | None]) -> None:
        self.asked: list[bytes] = []
        self.connections = 0
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
                    self.asked.append(asked)
                    self.hears.set()
                    if asked == b"end":
                        return
                    if not self._answers:
                        continue
                    answer = self._answers.pop(0)
                    if answer is None:
                        break
                    wire.sendall(answer)

    def close(self) -> None:
        with socket.create_connection(self._door.getsockname()) as wire:
            wire.sendall(b"end")
        self._thread.join()
        self._door.close()


@contextmanager
def asking(*answers: bytes | None, seconds: float = 10.0) -> Iterator[tuple[Line, Desk]]:
    desk = Desk(answers)
    line = Line(Contact(desk.url, TOKEN), seconds)
    try:
        yield line, desk
    finally:
        line.close()
        desk.close()


def test_a_request_is_one_packet_with_its_length_and_the_token() -> None:
    with asking(told(b'{"number": 1}')) as (line, desk):
        assert line.ask("POST", "/v1/beat", {"worker": "w\u00e4"}, Is) == Answer(200, Is(number=1))
    head, _, body = desk.asked[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/beat HTTP/1.1"
    assert f"content-length: {len(body)}" in lines
    assert f"authorization: Bearer {TOKEN}" in lines
    assert json.loads(body) == {"worker": "w\u00e4"}


def test_what_follows_is_asked_on_the_same_connection() -> None:
    with asking(told(b"1"), told(b"", "204 No Content"), told(b"3")) as (line, desk):
        found = [line.get("/", Number) for _ in range(3)]
        assert found == [number(1), Answer(204, None), number(3)]
        assert desk.connections == 1


def test_an_answer_may_be_packed_and_come_in_chunks() -> None:
    packed = gzip.compress(b'{"number": 2}')
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (packed[:5], packed[5:], b""))
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
    with asking(head + chunks) as (line, _):
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
    b"no HTTP at all\r\n\r\n",
    told(b"no JSON"),
    told(b'{"number": 2}'),
    told(b"[" * 100_000),
    told(b"not packed", "200 OK", "Content-Encoding: gzip"),
    b"HTTP/1.1 200 OK\r\nX: " + b"x" * (17 << 20),
], ids=["closed", "no HTTP", "no JSON", "another message", "nested", "not packed", "too long"])  # fmt: skip
def test_no_answer_is_none_and_is_asked_anew(answer) -> None:
    with asking(answer, told(b"2")) as (line, _):
        assert line.get("/", Number) is None
        assert not line.refused
        assert line.get("/", Number) == number(2)


def test_an_error_is_its_status() -> None:
    with asking(told(b"why", "422 Unprocessable Entity")) as (line, _):
        assert line.get("/", Number) == Answer(422, None)


def test_who_answers_too_late_is_away() -> None:
    with asking(seconds=0.1) as (line, _):
        assert line.get("/", Number) is None


def test_nobody_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        line = Line(Contact(f"http://127.0.0.1:{door.getsockname()[1]}", TOKEN))
    assert line.get("/", Number) is None
    assert line.refused


def test_who_waits_for_an_answer_can_be_cut_off() -> None:
    with asking(told(b"1")) as (line, desk):
        assert line.get("/", Number) == number(1)  # so that the connection is one that was used
        desk.hears.clear()
        found: list[Answer | None] = []
        waiting = threading.Thread(target=lambda: found.append(line.get("/", Number)))
        waiting.start()
        assert desk.hears.wait(10)
        line.cut()
        waiting.join()
        assert found == [None]
        assert desk.connections == 1


@pytest.mark.parametrize("token", ["two\r\nlines", "caf\u00e9"])
def test_a_token_that_cannot_be_said_is_refused(token) -> None:
    with pytest.raises(InvalidInput, match="printable"):
        Line(Contact("http://127.0.0.1:1", token))
