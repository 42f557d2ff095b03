"""Fuzzes a real coordinator: ``python -m tests.campaigns.membership_fuzz --seconds 60``.

Sends what its OpenAPI schema allows and what it does not, with the token, without it and with others; bytes that are no
HTTP; and requests that do not end. With the token, no request causes a server error, and the server keeps serving.
Without it every request is answered by 401, and neither the files on disk nor the reported status change by a byte.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from unisono.membership.coordinator import Coordinator
from unisono.membership.endpoint import Endpoint
from unisono.membership.protocol import Policy
from unisono.membership.server.http_server import CoordinatorServer
from unisono.membership.server.store import Store

TOKEN = "the token of this run"
BEARER = {"authorization": f"Bearer {TOKEN}"}
POLICY = Policy(min_workers=2, expected_workers=2, max_workers=4, heartbeat_seconds=0.02, join_timeout_seconds=1.0)
PATIENT = replace(POLICY, heartbeat_seconds=100.0)  # no worker is overdue, and nothing changes without a request
GARBAGE = st.one_of(
    st.binary(min_size=1, max_size=400),
    st.sampled_from([
        b"GET / HTTP/1.1\r\n\r\n", b"POST /v1/beat HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET " + b"a" * 70000 + b" HTTP/1.1\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    ]),
)  # fmt: skip
BODIES = st.one_of(
    st.binary(max_size=400),
    st.sampled_from([
        b"[" * 100_000, b'{"worker":' * 5000, b'{"worker":"\xff\xfe","count":1}', b'{"worker":"w","count":1e400}',
        b'{"worker":"\\ud800","count":1}', b'{"worker":"w","count":NaN}', b"null", b"1" * 100_000, b"\xef\xbb\xbf{}",
        b'{"worker":"w","count":1,"count":2}', b'{"worker":"w","count":99999999999999999999999999}',
    ]),
)  # fmt: skip
FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "right": lambda body: b"content-length: %d\r\n\r\n%b" % (len(body), body),
    "none": lambda body: b"\r\n" + body,
    "too short": lambda body: b"content-length: %d\r\n\r\n%b" % (len(body) // 2, body),
    "huge": lambda body: b"content-length: 99999999999999999999\r\n\r\n" + body,
    "long": lambda body: b"content-length: 20000000\r\n\r\n" + body,
    "negative": lambda body: b"content-length: -1\r\n\r\n" + body,
    "no number": lambda body: "content-length: ¹²\r\n\r\n".encode() + body,
    "twice": lambda body: b"content-length: 1\r\ncontent-length: 2\r\n\r\n" + body,
    "chunked": lambda body: b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
    "both": lambda body: b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n" + body,
}
TOKENS = st.one_of(
    st.none(),
    st.sampled_from(["", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"bearer {TOKEN}", f"Bearer {TOKEN}x",
                     f"Bearer {TOKEN[:-1]}", f"Bearer  {TOKEN}", f"Bearer {TOKEN.upper()}"]),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40),
)  # fmt: skip


@contextmanager
def running_coordinator(state: Path, policy: Policy = POLICY) -> Iterator[str]:
    """A coordinator's URL."""
    served = CoordinatorServer(Endpoint(), policy, state, TOKEN)
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        yield served.url
    finally:
        served.stop()
        thread.join()


class Fuzz:
    """Sends requests, and counts the responses by status."""

    def __init__(self, url: str, seed: int, answered: Counter[str]) -> None:
        self.url, self.seed, self.answered = url, seed, answered
        self.client = httpx2.Client(base_url=url, headers=BEARER, timeout=20.0)
        self.schema = schemathesis.openapi.from_dict(self.client.get("/openapi.json").json())
        self.operations = [found.ok() for found in self.schema.get_all_operations()]

    def cases(self) -> st.SearchStrategy[schemathesis.Case]:
        """Requests that the API describes, and others."""
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        return st.one_of(*(op.as_strategy(generation_mode=mode) for op in self.operations for mode in modes))

    def repeat(self, what: st.SearchStrategy[object], send: Callable[..., None], seconds: float) -> None:
        """Send requests for so long; hypothesis shrinks those that fail."""
        until, seed = time.monotonic() + seconds, self.seed

        @settings(max_examples=50, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(what)
        def some(each: object) -> None:
            send(each)

        while time.monotonic() < until:
            hypothesis_seed(seed)(some)()
            seed += 1

    def with_the_token(self, case: schemathesis.Case) -> None:
        """No request with the token causes a server error."""
        answer = case.call(base_url=self.url, headers=BEARER)
        self.answered[f"with the token: {answer.status_code}"] += 1
        assert answer.status_code < 500, (answer.status_code, case.as_curl_command())

    def without(self, each: tuple[schemathesis.Case, str | None]) -> None:
        """Every request without the token is answered by 401."""
        case, token = each
        headers = {} if token is None else {"authorization": token}
        answer = case.call(base_url=self.url, headers=headers)
        self.answered[f"without it: {answer.status_code}"] += 1
        assert (answer.status_code, answer.content) == (401, b""), (answer.status_code, case.as_curl_command())

    def raw(self, each: tuple[bytes, bytes, str, bool] | bytes) -> None:
        """The response is HTTP, or the connection closes; the server does not wait for more than was announced."""
        if isinstance(each, tuple):
            path, body, frame, bears = each
            token = b"authorization: Bearer %b\r\n" % TOKEN.encode() if bears else b""
            each = b"POST %b HTTP/1.1\r\nhost: a\r\n%b%b" % (path, token, FRAMES[frame](body))
        answer = exchange(self.url, each)
        status = answer[9:12].decode("ascii", "replace") if answer.startswith(b"HTTP/1.1 ") else "closed"
        self.answered[f"raw: {status}"] += 1
        assert status == "closed" or status[0] in "24", answer[:200]

    def status(self) -> dict[str, object]:
        """The status, without the age of heartbeats."""
        answer = self.client.get("/v1/status")
        assert answer.status_code == 200
        status = answer.json()
        for worker in status["workers"]:
            del worker["silent_seconds"]
        return status


def hypothesis_seed(seed: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """The same requests for the same number."""
    from hypothesis import seed as seeded

    return seeded(seed)


def exchange(url: str, sent: bytes, seconds: float = 5.0) -> bytes:
    """The response until the other end closes; this end sends nothing more. Raises TimeoutError."""
    parts, received = urlsplit(url), b""
    with (
        suppress(ConnectionError),
        socket.create_connection((parts.hostname, parts.port), seconds) as connection,
    ):
        connection.sendall(sent)
        with suppress(OSError):  # the other end has closed already
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(1 << 16):
            received += part
    return received


def files(state: Path) -> dict[str, bytes]:
    """The files on disk."""
    return {
        path.name: path.read_bytes() for path in sorted(state.parent.glob(f"{state.name}*")) if "-shm" not in path.name
    }


def play(seconds: float, seed: int, folder: Path) -> Counter[str]:
    """A third of the time each.

    Raises:
        AssertionError: a response is wrong.
    """
    state = folder / "state"
    answered: Counter[str] = Counter()
    with running_coordinator(state, PATIENT) as url:
        fuzz = Fuzz(url, seed, answered)
        for count in (1, 2):
            for worker in ("a", "b"):
                fuzz.client.post("/v1/beat", json={"worker": worker, "count": count, "waits": False})
        before = files(state), fuzz.status()
        assert before[1]["view"]["number"] == 1, before[1]
        fuzz.repeat(st.tuples(fuzz.cases(), TOKENS), fuzz.without, seconds / 3)
        assert (files(state), fuzz.status()) == before, "a request without the token changed something"
    with running_coordinator(state) as url:
        fuzz = Fuzz(url, seed, answered)
        fuzz.repeat(fuzz.cases(), fuzz.with_the_token, seconds / 3)
        paths = st.sampled_from([b"/v1/beat", b"/v1/gone", b"/v1/status", b"/", b"*", b"/v1/beat?x=%ff", b"/%00"])
        framed = st.tuples(paths, BODIES, st.sampled_from(sorted(FRAMES)), st.booleans())
        fuzz.repeat(st.one_of(GARBAGE, framed, framed), fuzz.raw, seconds / 3)
        status = fuzz.status()
        number = status["view"]["number"]
    store = Store(state)
    saved = store.load()
    store.close()
    assert [view.number for view in saved.lineage] == sorted({view.number for view in saved.lineage})
    assert all(len(set(view.members)) == len(view.members) for view in saved.lineage)
    assert Coordinator(POLICY, saved).view.number == number, "the reported view is not the stored one"
    return answered


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(dict(sorted(play(asked.seconds, asked.seed, Path(made)).items())), indent=1))
