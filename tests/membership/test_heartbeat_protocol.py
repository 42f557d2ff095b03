"""Heartbeats that bypass ASGI: answers are the same, and connections end as they should."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.campaigns.membership_fuzz import PATIENT, TOKEN, running_coordinator
from tests.support.coordinator import is_closed
from unisono.membership.server.service import HeartbeatRoute

LATER = {"worker": "a", "count": 2, "known_view": 0, "known_status": "now"}  # knows the latest update, and waits


def request(
    message: object, path: str = "/v1/beat", version: str = "1.1", token: str = TOKEN, extra: str = ""
) -> bytes:
    body = json.dumps(message)
    head = f"POST {path} HTTP/{version}\r\nhost: a\r\nauthorization: Bearer {token}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}{extra}\r\n{body}".encode()


@contextmanager
def connected(folder: Path) -> Iterator[socket.socket]:
    with running_coordinator(folder / "state", PATIENT) as url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), 20.0) as wire:
            yield wire


def answered(wire: socket.socket) -> tuple[bytes, bytes]:
    """The first line of the response, and its body."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += (more := wire.recv(1 << 16))
        assert more, received
        received = received.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += wire.recv(1 << 16)
    return head.split(b"\r\n")[0], body


@pytest.mark.parametrize("how", [
    {}, {"path": "/v1/beat?"}, {"extra": "expect: 100-continue\r\n"}, {"extra": "connection: close\r\n"},
    {"version": "1.0"},
], ids=["as workers do", "another form of the path", "expect", "closing", "an old version"])  # fmt: skip
def test_responses_do_not_depend_on_the_form_of_the_request(how, tmp_path) -> None:
    with connected(tmp_path) as wire:
        wire.sendall(request({"worker": "a", "count": 1}, **how))
        line, body = answered(wire)
        assert line == b"HTTP/1.1 200 OK"
        assert json.loads(body)["view"]["number"] == 0


@pytest.mark.parametrize(("message", "token", "status"), [
    ({"worker": "a"}, TOKEN, b"422"), ({"worker": "a", "count": 1}, "another", b"401"), ([], TOKEN, b"422"),
])  # fmt: skip
def test_the_status_says_what_is_wrong(message, token, status, tmp_path) -> None:
    with connected(tmp_path) as wire:
        wire.sendall(request(message, token=token))
        assert status in answered(wire)[0]


def test_a_failure_is_an_error_of_the_server(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(HeartbeatRoute, "receive", lambda *_: 1 / 0)
    with connected(tmp_path) as wire:
        wire.sendall(request({"worker": "a", "count": 1}))
        assert b" 500 " in answered(wire)[0]
    assert "ZeroDivisionError" in caplog.text


def test_heartbeats_and_other_requests_alternate_on_one_connection(tmp_path) -> None:
    with connected(tmp_path) as wire:
        for count in (1, 2, 3):
            wire.sendall(request({"worker": "a", "count": count}))
            assert b" 200 " in answered(wire)[0]
            wire.sendall(request({"worker": "x"}, "/v1/gone"))
            assert b" 204 " in wire.recv(1 << 16)


def test_a_second_request_before_the_response_closes_the_connection(tmp_path) -> None:
    with connected(tmp_path) as wire:
        wire.sendall(request(LATER) + request(LATER))
        assert is_closed(wire)


def test_a_disconnect_of_a_waiting_worker_is_noticed(tmp_path, monkeypatch) -> None:
    noticed, received = threading.Event(), threading.Event()
    disconnected, receive = HeartbeatRoute.disconnected, HeartbeatRoute.receive
    monkeypatch.setattr(HeartbeatRoute, "receive", lambda *given: (receive(*given), received.set())[0])
    monkeypatch.setattr(HeartbeatRoute, "disconnected", lambda *given: (disconnected(*given), noticed.set())[0])
    with connected(tmp_path) as wire:
        wire.sendall(request(LATER))
        assert received.wait(20)
        wire.close()
        assert noticed.wait(20)
