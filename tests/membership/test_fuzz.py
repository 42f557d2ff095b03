"""Malformed requests to the coordinator, hanging connections, TLS: a short `tests.campaigns.membership_fuzz`."""

from __future__ import annotations

import logging
import socket
import ssl
import subprocess
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.campaigns.membership_fuzz import BEARER, PATIENT, POLICY, TOKEN, exchange, play, running_coordinator
from tests.support.coordinator import is_closed
from unisono.membership.endpoint import Endpoint
from unisono.membership.proof import RequestSigner
from unisono.membership.server import request_timeout
from unisono.membership.server.http_server import CoordinatorServer


def test_malformed_requests_are_refused_and_change_nothing(tmp_path) -> None:
    answered = play(4.5, 0, tmp_path)
    for what in ("without it: 401", "with the token: 204", "with the token: 422", "raw: 400"):
        assert answered[what], answered


@pytest.mark.parametrize("begun", [
    b"", b"POST /v1/beat HTTP/1.1\r\nauth",
    b"POST /v1/beat HTTP/1.1\r\nauthorization: Bearer %b\r\ncontent-length: 9\r\n\r\n{" % TOKEN.encode(),
])  # fmt: skip
def test_an_incomplete_request_times_out(begun, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(request_timeout, "REQUEST_SECONDS", 0.3)
    with running_coordinator(tmp_path / "state") as url:
        parts = urlsplit(url)
        connections = [socket.create_connection((parts.hostname, parts.port), 20.0) for _ in range(50)]
        try:
            for connection in connections:
                connection.sendall(begun)
            with httpx2.Client(base_url=url, headers=BEARER) as client:
                assert client.get("/v1/status").status_code == 200
            assert all(is_closed(connection) for connection in connections)
        finally:
            for connection in connections:
                connection.close()


HEADS = {
    "short headers": (b"GET /v1/status HTTP/1.1\r\n", b"a: b\r\n" * 1000),
    "one header": (b"GET /v1/status HTTP/1.1\r\na: ", b"b" * 8000),
    "a path": (b"GET /", b"a" * 8000),
    "headers after another request": (
        b"GET /v1/status HTTP/1.1\r\nauthorization: Bearer %b\r\n\r\nGET / HTTP/1.1\r\n" % TOKEN.encode(),
        b"a: b\r\n" * 1000,
    ),
}


@pytest.mark.parametrize("kind", HEADS)
def test_an_endless_head_takes_no_memory_and_delays_no_request(kind, tmp_path) -> None:
    begun, more = HEADS[kind]
    with (
        running_coordinator(tmp_path / "state") as url,
        httpx2.Client(base_url=url, headers=BEARER, timeout=5.0) as client,
    ):
        parts = urlsplit(url)
        sent = 0
        with socket.create_connection((parts.hostname, parts.port), 20.0) as connection, suppress(ConnectionError):
            connection.sendall(begun)
            while sent < 64 << 20:
                connection.sendall(more)
                sent += len(more)
                if sent % 100 * len(more) == 0:
                    assert client.get("/v1/status").status_code == 200
        # Including what the sockets of both ends buffer.
        assert sent < 16 << 20
        assert client.get("/v1/status").status_code == 200


def test_a_body_may_be_longer_than_the_bound_on_heads(tmp_path) -> None:
    with running_coordinator(tmp_path / "state") as url, httpx2.Client(base_url=url, headers=BEARER) as client:
        order = {"task": "digits", "arguments": {"a": "b" * (request_timeout.MAX_HEAD_BYTES + (200 << 10))}}
        assert client.put("/v1/order", json=order).status_code == 204
        unreachable = [f"{i:0128d}" for i in range(5000)]
        assert client.post("/v1/beat", json={"worker": "a", "count": 1, "unreachable": unreachable}).status_code == 200


def test_a_handshake_that_does_not_start_times_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(request_timeout, "REQUEST_SECONDS", 0.3)
    certificate, key = self_signed(tmp_path, "coordinator")
    served = CoordinatorServer(Endpoint(certificate=certificate, key=key), POLICY, tmp_path / "state", TOKEN)
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        parts = urlsplit(served.url)
        connections = [socket.create_connection((parts.hostname, parts.port), 20.0) for _ in range(20)]
        for connection in connections:
            with connection:
                assert is_closed(connection)
    finally:
        served.stop()
        thread.join()


def test_invalid_http_leaves_few_lines_in_the_log(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(request_timeout.WARNING_THINNER, "_counts", Counter())
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    upgrade = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    with running_coordinator(tmp_path / "state") as url:
        logging.getLogger("uvicorn.error").addHandler(handler)
        for _ in range(40):
            exchange(url, b"\x00\x01")
            exchange(url, upgrade)
        logging.getLogger("uvicorn.error").removeHandler(handler)
    for kind in ("Invalid HTTP request received.", "Unsupported upgrade request."):
        lines = [words for words in messages if words.startswith(kind)]
        assert lines == [kind, *(f"{kind} ({n} times until now)" for n in (2, 4, 8, 16, 32))]


def signed(asking: RequestSigner, path: str, body: bytes, sent: bytes | None = None) -> bytes:
    """A request whose head signs `body`; another one may be `sent`."""
    sent = body if sent is None else sent
    lines = [f"POST {path} HTTP/1.1", "host: a", "content-type: application/json", f"content-length: {len(sent)}",
             f"authorization: {asking.authorization('POST', path, body)}"]  # fmt: skip
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + sent


@pytest.mark.parametrize(("path", "body", "status"), [
    ("/v1/beat", b'{"worker": "a", "count": 1, "waits": false}', 200), ("/v1/gone", b'{"worker": "a"}', 204),
    ("/v1/beat", b"no JSON", 422), ("/v1/gone", b"no JSON", 422), ("/v1/nowhere", b"{}", 404),
])  # fmt: skip
def test_a_signed_request_counts_once_and_its_response_is_signed(path, body, status, tmp_path) -> None:
    with running_coordinator(tmp_path / "state", PATIENT) as url:
        asking = RequestSigner(TOKEN)
        refused = exchange(url, b"GET /v1/challenge HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n").decode()
        (header,) = [line for line in refused.split("\r\n") if line.startswith("www-authenticate: Unisono")]
        assert asking.accept_challenge(header.partition(": ")[2])
        assert exchange(url, signed(asking, path, body, body.replace(b"a", b"b") + b" ")).startswith(b"HTTP/1.1 401")
        request = signed(asking, path, body)
        head, _, answered = exchange(url, request).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status)
        (proof,) = [line for line in head.decode().split("\r\n") if line.lower().startswith("unisono-proof")]
        assert asking.verifies(status, answered, proof.partition(": ")[2])
        assert exchange(url, request).startswith(b"HTTP/1.1 401"), "it was replayed"
        other = RequestSigner("another token")
        other.accept_challenge(f"Unisono {asking.challenge}")
        assert exchange(url, signed(other, path, body)).startswith(b"HTTP/1.1 401")


def self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "2", "-subj", f"/CN={name}",
         "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)  # fmt: skip
    return certificate, key


def test_a_client_that_does_not_trust_the_certificate_does_not_connect(tmp_path) -> None:
    certificate, key = self_signed(tmp_path, "coordinator")
    other, _ = self_signed(tmp_path, "other")
    served = CoordinatorServer(Endpoint(certificate=certificate, key=key), POLICY, tmp_path / "state", TOKEN)
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        assert served.url.startswith("https://")
        with httpx2.Client(verify=ssl.create_default_context(cafile=certificate), headers=BEARER) as client:
            assert client.get(f"{served.url}/v1/status").status_code == 200
        for verify in (True, ssl.create_default_context(cafile=other)):
            with (
                httpx2.Client(verify=verify, headers=BEARER) as client,
                pytest.raises(httpx2.ConnectError, match=r"(?i)certificate"),
            ):
                client.get(f"{served.url}/v1/status")
        with httpx2.Client() as client, pytest.raises(httpx2.HTTPError):
            client.get(served.url.replace("https", "http") + "/v1/status")
    finally:
        served.stop()
        thread.join()
