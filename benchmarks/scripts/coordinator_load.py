"""Thousands of agents in one process, which send heartbeats to a real coordinator as `CoordinatorClient` does.

Each has the real `Agent` and two connections. It long-polls on one; the other is opened when it has to send something.
Nothing between workers is simulated: an agent that is told of a view has joined it at once, and one that is told of its
end has left it. An answer that is the same for all is parsed once. Run by `benchmarks.elasticity.coordinator`; writes a
JSON object to ``--report``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import uvloop

from unisono.membership import (
    AbortView,
    Agent,
    CoordinatorAddress,
    Exit,
    JoinView,
    StateVersion,
    View,
    ViewStatus,
    ViewUpdate,
    WorkerAddress,
)
from unisono.membership.http_client import fetch
from unisono.membership.messages import HeartbeatReply, StatusMessage
from unisono.membership.proof import CHALLENGE_PATH, RequestSigner

HEARTBEATS_PER_SECOND = 200  # of all workers together, besides those that long-poll
STEP_SECONDS = 0.5
ACTIVITY = (
    '{"phase":"communication","step":1234,"micro_batch":-1,"since_seconds":0.0123,"waits_for":"sum of 9610 elements",'
    '"missing":[],"line":"train.py:57 train_step"}'
)


class Connection(asyncio.Protocol):
    """One connection with one request at a time. Requests prove the token, as a worker's do. Proofs of replies are not
    checked, because that is a worker's own time."""

    def __init__(self, head: bytes, signer: RequestSigner) -> None:
        self.head, self.signer = head, signer
        self.request = b"", b""
        self.on_reply: Callable[[bytes], None] | None = None
        self.chunks: list[bytes] = []
        self.missing_bytes = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, path: bytes, body: bytes, on_reply: Callable[[bytes], None]) -> None:
        assert self.on_reply is None
        self.on_reply, self.request = on_reply, (path, body)
        self.send()

    def send(self) -> None:
        if not self.signer.challenge:
            self.transport.write(
                b"GET %b HTTP/1.1\r\n%bcontent-length: 0\r\n\r\n" % (CHALLENGE_PATH.encode(), self.head)
            )
            return
        path, body = self.request
        proof = self.signer.authorization("POST", path.decode(), body).encode()
        head = b"POST %b HTTP/1.1\r\n%bauthorization: %b\r\n" % (path, self.head, proof)
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))

    def data_received(self, data: bytes) -> None:
        if self.missing_bytes < 0:
            head, _, body = data.partition(b"\r\n\r\n")
            if head.startswith(b"HTTP/1.1 401") and not self.signer.challenge:
                self.signer.accept_challenge(head.decode().rpartition("www-authenticate: ")[2].split("\r\n")[0])
                return self.send()
            if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 204")):
                raise SystemExit(f"unexpected reply: {head!r} {body!r}")
            at = head.find(b"content-length: ")
            self.missing_bytes = int(head[at + 16 :].split(b"\r", 1)[0]) if at >= 0 else 0
            data = body
        self.chunks.append(data)
        self.missing_bytes -= len(data)
        if self.missing_bytes > 0:
            return
        whole = b"".join(self.chunks)
        self.chunks, self.missing_bytes = [], -1
        on_reply, self.on_reply = self.on_reply, None
        assert on_reply is not None
        on_reply(whole)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.on_reply is not None:
            raise SystemExit(f"the connection closed before the reply: {exc}")


class ReplyParser:
    """Parses replies of the coordinator; a reply that several workers receive is parsed once."""

    def __init__(self) -> None:
        self.parsed: dict[tuple[bytes, int], tuple[ViewUpdate, float]] = {}
        self.views: dict[int, View] = {0: View()}
        self.bytes = 0

    def read(self, body: bytes, known: int) -> tuple[ViewUpdate, float]:
        self.bytes += len(body)
        found = self.parsed.get((body, known))
        if found is None:
            reply = HeartbeatReply.model_validate_json(zlib.decompress(body, 31) if body[:2] == b"\x1f\x8b" else body)
            update = reply.update(ViewUpdate(self.views[known], ViewStatus.ACTIVE))
            self.views[update.view.number] = update.view
            found = self.parsed[body, known] = update, reply.heartbeat_seconds
        return found


class Worker:
    """One worker's half of the protocol."""

    def __init__(self, load: LoadGenerator, number: int) -> None:
        name = f"w{number:04d}-{load.random.randbytes(4).hex()}"
        address = WorkerAddress(
            f"node-{number // 8:03d}", f"tcp://10.1.{number // 250}.{number % 250}:{20000 + number}"
        )
        self.load, self.agent = load, Agent(name, StateVersion(), address)
        address_json = json.dumps({"host": address.host, "meets_at": address.rendezvous_url})
        self.tail = f',"unreachable":[],"finished":false,"address":{address_json},"activity":{ACTIVITY}'
        self.sender: Connection | None = None  # opened for the first heartbeat that does not wait
        self.known = ViewUpdate(View(), ViewStatus.ACTIVE)
        self.has_reply = self.send_again = self.is_sending = False
        self.alive = True

    async def connect(self) -> None:
        self.receiver = await self.load.connect()

    def poll(self) -> None:
        at, known = time.perf_counter(), self.known
        self.receiver.ask(
            b"/v1/beat", self.heartbeat_body(waits=True), lambda body: self.on_poll_reply(body, known, at)
        )

    def on_poll_reply(self, body: bytes, known_before: ViewUpdate, at: float) -> None:
        took = time.perf_counter() - at
        update, seconds = self.load.reader.read(body, known_before.view.number)
        if (update.view.number, update.status) == (known_before.view.number, known_before.status) and self.has_reply:
            self.load.waited(took, seconds)
        self.apply(update, from_poll=True)
        if self.alive:
            self.poll()  # also reports that it has left or joined a view
            if self.agent.working:
                self.load.count_joined(self.agent)

    def send_heartbeat(self, asked_at: float | None = None) -> None:
        """Sends a heartbeat at once, or after the reply to the one in flight."""
        if self.is_sending:
            self.send_again = True
            return
        self.is_sending = True
        if self.sender is None:
            self.load.start(self.open(asked_at or time.perf_counter(), asked_at))
        else:
            self.post(self.sender, asked_at or time.perf_counter(), asked_at)

    async def open(self, at: float, probe: float | None) -> None:
        self.sender = await self.load.connect(self.receiver.signer.sibling())
        self.post(self.sender, at, probe)

    def post(self, connection: Connection, at: float, probe: float | None) -> None:
        known = self.known
        connection.ask(
            b"/v1/beat", self.heartbeat_body(waits=False), lambda body: self.answered(body, known, at, probe)
        )

    def answered(self, body: bytes, known_before: ViewUpdate, at: float, probe: float | None) -> None:
        took = time.perf_counter() - at
        self.load.answered(took, probe is not None)
        update, _ = self.load.reader.read(body, known_before.view.number)
        self.apply(update)
        self.is_sending = False
        if self.send_again:
            self.send_again = False
            self.send_heartbeat()

    def apply(self, update: ViewUpdate, *, from_poll: bool = False) -> None:
        self.has_reply = True
        if (update.view.number, update.status is not ViewStatus.ACTIVE) >= (
            self.known.view.number,
            self.known.status is not ViewStatus.ACTIVE,
        ):
            self.known = update
        actions = self.agent.receive(update)
        while actions:
            more = []
            for action in actions:
                match action:
                    case AbortView(view):
                        more += self.agent.fail_view(view, digest="")
                        if not from_poll:
                            self.send_heartbeat()
                    case JoinView(view):
                        self.agent.joined(view.number, view.start.step, view.start.digest)
                        if not from_poll:
                            self.send_heartbeat()
                    case Exit():
                        raise SystemExit("no worker should exit")
            actions = more

    def heartbeat_body(self, *, waits: bool) -> bytes:
        if self.agent.working:  # all workers take steps at the same times
            self.agent.add_steps(self.agent.view.number, steps=self.load.step - self.agent.version.step)
        sent, known = self.agent.heartbeat(), self.known
        version = sent.version
        return (
            f'{{"worker":"{sent.worker}","count":{sent.count},"active_view":{sent.active_view},"ended_view":{sent.ended_view},'
            f'"failed_view":{sent.failed_view},"version":{{"view":{version.view},"step":{version.step},"digest":'
            f'"{version.digest}"}},"leaving":false,"known_view":{known.view.number},"known_status":'
            f'"{known.status.value if self.has_reply else ""}","waits":{"true" if waits else "false"}{self.tail}}}'
        ).encode()


class LoadGenerator:
    """All workers, and what is measured."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self.address, self.contact = (parts.hostname, parts.port), CoordinatorAddress(url, token)
        self.head = b"host: coordinator\r\ncontent-type: application/json\r\naccept-encoding: gzip\r\n"
        self.random = random.Random(1)
        self.reader = ReplyParser()
        self.workers: list[Worker] = []
        self.tasks: set[asyncio.Future[None]] = set()
        self.answers: list[float] = []
        self.overshoots: list[float] = []
        self.measures, self.start_time = False, time.perf_counter()
        self.lateness: list[float] = []
        self.joined: set[str] = set()  # workers that have joined a view later than `after`
        self.all_joined = asyncio.Event()
        self.after = self.wanted = 0

    @property
    def step(self) -> int:
        """The current step of all workers."""
        return int((time.perf_counter() - self.start_time) / STEP_SECONDS)

    async def connect(self, signer: RequestSigner | None = None) -> Connection:
        loop, mine = asyncio.get_running_loop(), signer or RequestSigner(self.contact.token)
        _, connection = await loop.create_connection(lambda: Connection(self.head, mine), *self.address)
        return connection

    def start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)  # the event loop has only a weak reference
        task.add_done_callback(self.tasks.discard)

    def waited(self, took: float, seconds: float) -> None:
        if self.measures:
            self.overshoots.append(took - seconds)

    def answered(self, took: float, probe: bool) -> None:
        if self.measures and probe:
            self.answers.append(took)

    def count_joined(self, agent: Agent) -> None:
        if agent.view.number > self.after:
            self.joined.add(agent.worker)
            if len(self.joined) >= self.wanted:
                self.all_joined.set()

    async def start_workers(self, workers: int) -> float:
        self.workers = [Worker(self, number) for number in range(workers)]
        gate = asyncio.Semaphore(256)

        async def start_worker(worker: Worker) -> None:
            async with gate:
                await worker.connect()
            worker.poll()

        self.wanted = workers
        start_time = time.perf_counter()
        await asyncio.gather(*(start_worker(worker) for worker in self.workers))
        await asyncio.wait_for(self.all_joined.wait(), 120.0)
        return time.perf_counter() - start_time

    async def generate_for(self, seconds: float) -> None:
        self.measures = True
        until = time.perf_counter() + seconds
        due = time.perf_counter()
        while due < until:
            due += self.random.expovariate(HEARTBEATS_PER_SECOND)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self.lateness.append(max(0.0, time.perf_counter() - due))
            worker = self.random.choice(self.workers)
            if not worker.is_sending and worker.alive:
                worker.send_heartbeat(asked_at=due)  # delays of this process count
        self.measures = False

    async def kill_one(self) -> tuple[float, float]:
        """Kills one worker and reports its exit as its launcher does.

        Returns the seconds until all others are in the new view, and the CPU seconds of this process meanwhile."""
        worker = self.random.choice([worker for worker in self.workers if worker.alive])
        worker.alive = False
        self.wanted, self.after = self.wanted - 1, worker.agent.view.number
        self.joined.clear()
        self.all_joined.clear()
        start_time, own = time.perf_counter(), time.process_time()
        for connection in filter(None, (worker.receiver, worker.sender)):
            connection.on_reply = None
            connection.transport.abort()
        connection = await self.connect()
        connection.ask(b"/v1/gone", json.dumps({"worker": worker.agent.worker}).encode(), lambda body: None)
        await asyncio.wait_for(self.all_joined.wait(), 120.0)
        await self.wait_reported()
        return time.perf_counter() - start_time, time.process_time() - own

    async def wait_reported(self) -> None:
        """Waits until all workers have reported to the coordinator that they are in its view."""
        while True:
            status = await asyncio.to_thread(fetch, self.contact, "/v1/status", StatusMessage)
            works = sum(worker.active_view == status.view.number for worker in status.workers)
            if works == len(status.view.members) == self.wanted:
                return


def quantiles(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=1000, method="inclusive")
    named = {"p50": cuts[499], "p90": cuts[899], "p99": cuts[989], "p99.9": cuts[998], "most": max(seconds)}
    return {name: round(1000 * value, 3) for name, value in named.items()} | {"count": len(seconds)}


def memory_mib(process: int) -> float:
    """The peak resident set of a process."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise SystemExit("no VmHWM in /proc")


def cpu_seconds(process: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(url: str, token: str, server: int, workers: int, seconds: float, deaths: int) -> dict[str, object]:
    load = LoadGenerator(url, token)
    started = await load.start_workers(workers)
    started_mib = memory_mib(server)
    await asyncio.sleep(2.0)
    theirs, own, start_time = cpu_seconds(server), time.process_time(), time.perf_counter()
    heartbeats = sum(worker.agent._count for worker in load.workers)
    await load.generate_for(seconds)
    took = time.perf_counter() - start_time
    heartbeats = sum(worker.agent._count for worker in load.workers) - heartbeats
    steady = {
        "beats_per_second": round(heartbeats / took, 1),
        "server_cpu": round((cpu_seconds(server) - theirs) / took, 3),
        "generator_cpu": round((time.process_time() - own) / took, 3),
    }
    changes = []
    for _ in range(deaths):
        before = cpu_seconds(server), load.reader.bytes
        whole, mine = await load.kill_one()
        changes.append(
            {
                "seconds": round(whole, 3),
                "generator_cpu_seconds": round(mine, 3),
                "server_cpu_seconds": round(cpu_seconds(server) - before[0], 3),
                "mib_answered": round((load.reader.bytes - before[1]) / 2**20, 1),
            }
        )
        await asyncio.sleep(2.0)
    return {
        "workers": workers,
        "all_begun_seconds": round(started, 3),
        "answer_ms": quantiles(load.answers),
        "overshoot_ms": quantiles(load.overshoots),
        "generator_lateness_ms": quantiles(load.lateness),
        "steady": steady,
        "changes": changes,
        "server_mib": round(memory_mib(server), 1),
        "server_mib_when_all_had_begun": round(started_mib, 1),
        "generator_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--deaths", type=int, default=3)
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()
    token = random.SystemRandom().randbytes(16).hex()
    command = [sys.executable, str(Path(__file__).with_name("coordinator_process.py")), str(args.workers)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "UNISONO_TOKEN": token}
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        found = uvloop.run(measure(url, token, server.pid, args.workers, args.seconds, args.deaths))
        assert server.stdin is not None
        server.stdin.close()
    args.report.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
