"""Attacks on a run by processes without its token, started by `tests.campaigns.security`.

They run in their own network namespace, or as another user of a host. On SIGTERM they write their findings to
``--report`` as JSON; ``broken`` lists, as text, what should not have been possible.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import select
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from unisono.comm.actors import handshake
from unisono.membership import CoordinatorAddress
from unisono.membership.http_client import EmptyBody, HttpConnection

ROUTES = [
    "/v1/challenge",
    "/v1/order",
    "/v1/status",
    "/v1/beat",
    "/v1/running",
    "/docs",
    "/openapi.json",
    "/",
    "/../etc/passwd",
]
WRONG = ["", "Bearer x", "Bearer " + "0" * 43, "Basic dTpw", "unisono 0:0:0"]
TRACE = "/tmp/unisono-strangers-command"
DANGEROUS = {"task": "os:system", "arguments": {"command": f"touch {TRACE}"}, "settings": {}, "run": "/tmp", "began": 0}
_CONNECTIONS = 900
_STORE_SECONDS = 3.0


class Stranger:
    """Attacks one address again and again.

    Args:
        address: of a host of the run.
        coordinator: the port of its coordinator.
    """

    def __init__(self, address: str, coordinator: int, seed: int) -> None:
        self.address, self.coordinator, self.seed, self.random = address, coordinator, seed, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.broken: list[str] = []
        self.ports: list[int] = []
        self.squatted: list[socket.socket] = []
        self.made: list[Path] = []

    def leave(self) -> None:
        """Nothing of this one stays behind."""

    def scan(self) -> None:
        """Which ports of the usual range are open."""
        found = []
        for first in range(1024, 61000, 512):
            poller, wires = select.poll(), {}
            for port in range(first, min(first + 512, 61000)):
                wire = socket.socket()
                wire.setblocking(False)
                wire.connect_ex((self.address, port))
                wires[wire.fileno()] = (wire, port)
                poller.register(wire, select.POLLOUT)
            until = time.monotonic() + 0.3
            while wires and time.monotonic() < until:
                for number, event in poller.poll(20):
                    wire, port = wires.pop(number)
                    poller.unregister(number)
                    if not event & (select.POLLERR | select.POLLHUP):
                        found.append(port)
                    wire.close()
            for wire, _ in wires.values():
                wire.close()
        self.ports = found
        self.done["ports found open"] += len(found)

    def garbage(self) -> None:
        """Bytes that are no message, to every open port."""
        for port in self.ports:
            for size in (1, 8, 88, 5000, 1 << 20):
                with contextlib.suppress(OSError), self._connected(port) as wire:
                    wire.sendall(self.random.randbytes(size))
                    self.done["garbage sent"] += 1

    def flood(self) -> None:
        """Many connections at a time that say nothing."""
        for port in self.ports:
            wires = []
            for _ in range(_CONNECTIONS):
                wire = socket.socket()
                wire.setblocking(False)
                wire.connect_ex((self.address, port))
                wires.append(wire)
            time.sleep(0.2)
            self.done["connections opened"] += len(wires)
            for wire in wires:
                wire.close()

    def claims(self) -> None:
        """Handshakes with actors: a token that is a guess, and what an earlier handshake has said."""
        kept = b""
        for port in self.ports:
            with contextlib.suppress(OSError, handshake.Untrusted), self._connected(port) as wire:
                challenged = wire.recv(handshake.CHALLENGE_BYTES)
                said = kept or handshake.claim(self.random.randbytes(32), challenged, 0, 0)
                wire.sendall(said)
                kept = said
                self.done["claims made"] += 1
                if wire.recv(1):
                    self.broken.append(f"port {port} answers a claim without the token")

    def stores(self) -> None:
        """Keys of a rendezvous as torch's store writes them."""
        forked = multiprocessing.get_context("fork")
        for port in self.ports:
            # torch's client waits without end for a port that accepts and says nothing, and heeds no signal meanwhile.
            attempt = forked.Process(target=write_to_store, args=(self.address, port), daemon=True)
            attempt.start()
            attempt.join(_STORE_SECONDS)
            attempt.kill()
            attempt.join()
            if attempt.exitcode == 0:
                self.broken.append(f"port {port} lets a store be written")
            self.done["stores tried"] += 1

    def relays(self) -> None:
        """What one port says, said to another one as if it were an answer, and back."""
        for one, other in itertools.permutations(self.ports, 2):
            with contextlib.suppress(OSError), self._connected(one) as here, self._connected(other) as there:
                until = time.monotonic() + 0.2
                while (left := until - time.monotonic()) > 0:
                    ready, _, _ = select.select([here, there], [], [], left)
                    for wire in ready:
                        (there if wire is here else here).sendall(wire.recv(1 << 16))
                        self.done["messages relayed"] += 1

    def requests(self) -> None:
        """Every route with tokens that are wrong, and an order that would run a command."""
        for route in ROUTES:
            for method in ("GET", "PUT", "POST"):
                for token in WRONG:
                    status = self._asked(method, route, token)
                    self.done["requests sent"] += 1
                    if status in (200, 204) and route != "/v1/challenge":
                        self.broken.append(f"{method} {route} is answered {status} with the token {token!r}")

    def heads(self) -> None:
        """A request whose head does not end, and a handshake of TLS that does not begin."""
        with contextlib.suppress(OSError), self._secured() as wire:
            wire.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(1000):
                wire.sendall(b"a: " + b"b" * 65_000 + b"\r\n")
                self.done["kilobytes of heads"] += 65
        with contextlib.suppress(OSError), self._connected(self.coordinator) as wire:
            wire.settimeout(20.0)
            began = time.monotonic()
            while wire.recv(1):
                pass
            self.done["silent handshakes"] += 1
            if time.monotonic() - began > 15.0:
                self.broken.append("a silent handshake of TLS is waited for")

    @contextlib.contextmanager
    def _connected(self, port: int) -> Iterator[socket.socket]:
        with socket.create_connection((self.address, port), timeout=2.0) as wire:
            yield wire

    @contextlib.contextmanager
    def _secured(self) -> Iterator[socket.socket]:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with self._connected(self.coordinator) as wire, context.wrap_socket(wire) as secured:
            yield secured

    def _asked(self, method: str, route: str, token: str) -> int:
        body = json.dumps(DANGEROUS).encode()
        head = f"{method} {route} HTTP/1.1\r\nhost: x\r\nauthorization: {token}\r\ncontent-type: application/json\r\n"
        with contextlib.suppress(OSError, ValueError), self._secured() as wire:
            wire.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            return int(wire.recv(1000).split()[1])
        return 0


class OtherUser(Stranger):
    """The same from another user id of the same host, with what such a user sees besides."""

    def names(self) -> None:
        """Local socket names of actors: connected to, and taken."""
        for line in Path("/proc/net/unix").read_text().splitlines():
            name = line.split()[-1]
            if not name.startswith("@unisono"):
                continue
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as wire:
                wire.settimeout(2.0)
                wire.connect("\0" + name[1:])
                wire.sendall(self.random.randbytes(88))
                self.done["names tried"] += 1

    def squat(self) -> None:
        """Names and places like those that the run uses, taken before it does."""
        seen = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@unisono" in line]
        for name in [*seen, "@unisono"]:
            for number in range(8):
                wire = socket.socket(socket.AF_UNIX)
                with contextlib.suppress(OSError):
                    wire.bind(f"\0{name[1:]}{number or ''}")
                    wire.listen()
                    self.done["names taken"] += 1
                    self.squatted.append(wire)
        for place in ("unisono", "unisono-0", f"torchinductor_{self.seed}", "torchinductor_root"):
            with contextlib.suppress(OSError):
                Path("/tmp", place).mkdir(mode=0o777)
                self.made.append(Path("/tmp", place))
                self.done["directories taken"] += 1
        for wire in self.squatted[:-64]:
            wire.close()
        del self.squatted[:-64]

    def leave(self) -> None:
        for wire in self.squatted:
            wire.close()
        for place in self.made:
            with contextlib.suppress(OSError):
                place.rmdir()

    def secrets(self) -> None:
        """What the processes of the run have in memory, environment and files."""
        for process in Path("/proc").glob("[0-9]*"):
            for what in ("environ", "mem", "maps"):
                with contextlib.suppress(OSError):
                    if process.stat().st_uid != os.getuid() and (process / what).read_bytes()[:1]:
                        self.broken.append(f"{what} of another user's process can be read")
        for path in [*Path("/dev/shm").glob("*"), *Path("/tmp").glob("unisono-*")]:
            with contextlib.suppress(OSError):
                if path.stat().st_uid != os.getuid() and (os.listdir(path) if path.is_dir() else path.read_bytes()):
                    self.broken.append(f"{path} can be read")
        self.done["looked for secrets"] += 1


class Member:
    """Knows the run's token, and says what no worker says.

    Args:
        contact: of the coordinator.
    """

    def __init__(self, contact: CoordinatorAddress, seed: int) -> None:
        self._line, self._random = HttpConnection(contact), random.Random(seed)
        self.done: Counter[str] = Counter()
        self.broken: list[str] = []

    def leave(self) -> None:
        """Nothing of this one stays behind."""
        self._line.close()

    def messages(self) -> None:
        """Bodies of every form, to every route that takes one."""
        for route in ("/v1/beat", "/v1/gone", "/v1/running"):
            for body in self._bodies():
                answer = self._line.request("POST", route, body, EmptyBody)
                self.done["messages sent"] += 1
                if answer is not None and answer.status >= 500:
                    self.broken.append(f"POST {route} is answered {answer.status}")

    def _bodies(self) -> Iterator[Any]:
        noise = self._random.randbytes(200).decode("latin-1")
        for odd in (None, -1, 1e308, 10**400, "", noise, "x" * 100_000, [], [noise] * 1000, {}, {noise: noise}):
            yield {"worker": odd, "workers": odd, "launcher": odd, "doing": odd, "step": odd, "view": odd, noise: odd}
            yield odd


def write_to_store(address: str, port: int) -> None:
    """Exits with 0 if a store there takes keys."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        store = stores_module().TCPStore(address, port, None, False, timedelta(seconds=0.2), wait_for_workers=False)
        store.set_timeout(timedelta(seconds=0.2))
        for attempt in range(30):
            store.set(f"attempt/{attempt}/meeting/1/-0-1-2/gloo/listening/0", "no JSON {" * 10_000)
    except RuntimeError:
        raise SystemExit(1) from None


def stores_module() -> Any:
    """torch's stores; imported late, since most of what is here needs no torch."""
    from torch._C import _distributed_c10d as c10d

    return c10d


def serve_orders(port: int, certificate: Path, key: Path, heard: Path) -> None:
    """A coordinator that is none: it answers every request, over TLS or not, with an order to run a command, and keeps
    what it hears in the file `heard`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    body = json.dumps(DANGEROUS).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with socket.create_server(("", port)) as door, heard.open("wb", buffering=0) as file:
        while True:
            wire, _ = door.accept()
            with contextlib.suppress(OSError), wire:
                wire.settimeout(5.0)
                secured = wire.recv(1, socket.MSG_PEEK) == b"\x16"
                with context.wrap_socket(wire, server_side=True) if secured else wire as conversation:
                    while said := conversation.recv(1 << 16):
                        file.write(said)
                        conversation.sendall(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="")
    parser.add_argument("--coordinator", type=int, required=True, help="its port")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--serve", type=Path, metavar="DIR", help="be a coordinator, with the certificate there")
    parser.add_argument("--user", type=int, help="become this user")
    parser.add_argument("--authority", default="", help="be a member: the fingerprint of the coordinator's certificate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1 << 30)
    asked = parser.parse_args()
    if asked.serve:
        serve_orders(asked.coordinator, asked.serve / "certificate.pem", asked.serve / "key.pem", asked.report)
    report = asked.report.open("w")
    # Another user may not be able to read the files of this interpreter.
    "preloaded".encode("idna")
    importlib.import_module("multiprocessing.popen_fork")
    stores_module()
    if asked.user:
        os.setgroups([])
        os.setgid(asked.user)
        os.setuid(asked.user)
    stranger: Stranger | Member
    if asked.authority:
        url = f"https://{asked.address}:{asked.coordinator}"
        stranger = Member(CoordinatorAddress(url, os.environ["UNISONO_TOKEN"], authority=asked.authority), asked.seed)
    else:
        stranger = (OtherUser if asked.user else Stranger)(asked.address, asked.coordinator, asked.seed)
    names = ["scan", "garbage", "flood", "claims", "relays", "stores", "requests", "heads"]
    attacks: list[Callable[[], Any]] = []
    if isinstance(stranger, Stranger):
        attacks += [getattr(stranger, name) for name in names]
    else:
        attacks += [stranger.messages]
    if isinstance(stranger, OtherUser):
        attacks += [stranger.names, stranger.squat, stranger.secrets]

    def end(*_: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, end)
    failed = ""
    try:
        while stranger.done["rounds"] < asked.rounds:
            for attack in attacks:
                attack()
            stranger.done["rounds"] += 1
    except SystemExit:
        pass
    except Exception as error:
        failed = repr(error)
        raise
    finally:
        stranger.leave()
        json.dump({"done": stranger.done, "broken": sorted(set(stranger.broken)), "failed": failed}, report)
        report.close()


if __name__ == "__main__":
    main()
