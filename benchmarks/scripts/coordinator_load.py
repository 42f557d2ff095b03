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

SAID_PER_SECOND = 200  # beats that are to be answered at once, of all workers together
STEP_SECONDS = 0.5
DOING = (
    '{"phase":"communication","step":1234,"micro_batch":-1,"since_seconds":0.0123,"waits_for":"sum of 9610 elements",'
    '"missing":[],"line":"train.py:57 train_step"}'
)


class Wire(asyncio.Protocol):
    """One connection; a request is answered before the next is made. Requests prove the token, as a worker's do; the
    proofs of answers are a worker's own time, and are not looked at here."""

    def __init__(self, head: bytes, asking: RequestSigner) -> None:
        self.head, self.asking = head, asking
        self.asked = b"", b""
        self.then: Callable[[bytes], None] | None = None
        self.parts: list[bytes] = []
        self.lacking = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, path: bytes, body: bytes, then: Callable[[bytes], None]) -> None:
        assert self.then is None
        self.then, self.asked = then, (path, body)
        self.send()

    def send(self) -> None:
        if not self.asking.challenge:
            self.transport.write(
                b"GET %b HTTP/1.1\r\n%bcontent-length: 0\r\n\r\n" % (CHALLENGE_PATH.encode(), self.head)
            )
            return
        path, body = self.asked
        proof = self.asking.authorization("POST", path.decode(), body).encode()
        head = b"POST %b HTTP/1.1\r\n%bauthorization: %b\r\n" % (path, self.head, proof)
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))

    def data_received(self, data: bytes) -> None:
        if self.lacking < 0:
            head, _, body = data.partition(b"\r\n\r\n")
            if head.startswith(b"HTTP/1.1 401") and not self.asking.challenge:
                self.asking.accept_challenge(head.decode().rpartition("www-authenticate: ")[2].split("\r\n")[0])
                return self.send()
            if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 204")):
                raise SystemExit(f"answered: {head!r} {body!r}")
            at = head.find(b"content-length: ")
            self.lacking = int(head[at + 16 :].split(b"\r", 1)[0]) if at >= 0 else 0
            data = body
        self.parts.append(data)
        self.lacking -= len(data)
        if self.lacking > 0:
            return
        whole = b"".join(self.parts)
        self.parts, self.lacking = [], -1
        then, self.then = self.then, None
        assert then is not None
        then(whole)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.then is not None:
            raise SystemExit(f"a connection on which an answer was waited for has closed: {exc}")


class Reader:
    """What the coordinator answers, read once for all who are answered the same."""

    def __init__(self) -> None:
        self.known: dict[tuple[bytes, int], tuple[ViewUpdate, float]] = {}
        self.views: dict[int, View] = {0: View()}
        self.bytes = 0

    def read(self, body: bytes, knows: int) -> tuple[ViewUpdate, float]:
        self.bytes += len(body)
        found = self.known.get((body, knows))
        if found is None:
            told = HeartbeatReply.model_validate_json(zlib.decompress(body, 31) if body[:2] == b"\x1f\x8b" else body)
            word = told.update(ViewUpdate(self.views[knows], ViewStatus.ACTIVE))
            self.views[word.view.number] = word.view
            found = self.known[body, knows] = word, told.heartbeat_seconds
        return found


class Worker:
    """One of them."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        name = f"w{number:04d}-{crowd.random.randbytes(4).hex()}"
        place = WorkerAddress(f"node-{number // 8:03d}", f"tcp://10.1.{number // 250}.{number % 250}:{20000 + number}")
        self.crowd, self.agent = crowd, Agent(name, StateVersion(), place)
        address = json.dumps({"host": place.host, "meets_at": place.rendezvous_url})
        self.tail = f',"unreachable":[],"finished":false,"address":{address},"activity":{DOING}'
        self.saying: Wire | None = None  # opened once it has something to say
        self.knows = ViewUpdate(View(), ViewStatus.ACTIVE)
        self.heard_any = self.unsaid = self.talks = False
        self.alive = True

    async def connect(self) -> None:
        self.listening = await self.crowd.connect()

    def listen(self) -> None:
        at, knows = time.perf_counter(), self.knows
        self.listening.ask(b"/v1/beat", self.beat(waits=True), lambda body: self.heard(body, knows, at))

    def heard(self, body: bytes, knew: ViewUpdate, at: float) -> None:
        took = time.perf_counter() - at
        word, seconds = self.crowd.reader.read(body, knew.view.number)
        if (word.view.number, word.status) == (knew.view.number, knew.status) and self.heard_any:
            self.crowd.waited(took, seconds)
        self.take(word, listening=True)
        if self.alive:
            self.listen()  # which says too that it has left a view, or met one
            if self.agent.working:
                self.crowd.met(self.agent)

    def say(self, asked_at: float | None = None) -> None:
        """At once, or once the answer to what was said before has come."""
        if self.talks:
            self.unsaid = True
            return
        self.talks = True
        if self.saying is None:
            self.crowd.start(self.open(asked_at or time.perf_counter(), asked_at))
        else:
            self.tell(self.saying, asked_at or time.perf_counter(), asked_at)

    async def open(self, at: float, probe: float | None) -> None:
        self.saying = await self.crowd.connect(self.listening.asking.sibling())
        self.tell(self.saying, at, probe)

    def tell(self, wire: Wire, at: float, probe: float | None) -> None:
        knows = self.knows
        wire.ask(b"/v1/beat", self.beat(waits=False), lambda body: self.answered(body, knows, at, probe))

    def answered(self, body: bytes, knew: ViewUpdate, at: float, probe: float | None) -> None:
        took = time.perf_counter() - at
        self.crowd.answered(took, probe is not None)
        word, _ = self.crowd.reader.read(body, knew.view.number)
        self.take(word)
        self.talks = False
        if self.unsaid:
            self.unsaid = False
            self.say()

    def take(self, word: ViewUpdate, *, listening: bool = False) -> None:
        self.heard_any = True
        if (word.view.number, word.status is not ViewStatus.ACTIVE) >= (
            self.knows.view.number,
            self.knows.status is not ViewStatus.ACTIVE,
        ):
            self.knows = word
        actions = self.agent.receive(word)
        while actions:
            more = []
            for action in actions:
                match action:
                    case AbortView(view):
                        more += self.agent.fail_view(view, digest="")
                        if not listening:
                            self.say()
                    case JoinView(view):
                        self.agent.joined(view.number, view.start.step, view.start.digest)
                        if not listening:
                            self.say()
                    case Exit():
                        raise SystemExit("nobody was to exit")
            actions = more

    def beat(self, *, waits: bool) -> bytes:
        if self.agent.working:  # all do their steps together
            self.agent.add_steps(self.agent.view.number, steps=self.crowd.step - self.agent.version.step)
        beat, knows = self.agent.heartbeat(), self.knows
        standing = beat.version
        return (
            f'{{"worker":"{beat.worker}","count":{beat.count},"active_view":{beat.active_view},"ended_view":{beat.ended_view},'
            f'"failed_view":{beat.failed_view},"version":{{"view":{standing.view},"step":{standing.step},"digest":'
            f'"{standing.digest}"}},"leaving":false,"known_view":{knows.view.number},"known_status":'
            f'"{knows.status.value if self.heard_any else ""}","waits":{"true" if waits else "false"}{self.tail}}}'
        ).encode()


class Crowd:
    """All workers, and what is measured of them."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self.address, self.contact = (parts.hostname, parts.port), CoordinatorAddress(url, token)
        self.head = b"host: coordinator\r\ncontent-type: application/json\r\naccept-encoding: gzip\r\n"
        self.random = random.Random(1)
        self.reader = Reader()
        self.workers: list[Worker] = []
        self.tasks: set[asyncio.Future[None]] = set()
        self.answers: list[float] = []
        self.overshoots: list[float] = []
        self.measures, self.began = False, time.perf_counter()
        self.lateness: list[float] = []
        self.there: set[str] = set()  # who has met a view later than `after`
        self.all_met = asyncio.Event()
        self.after = self.wanted = 0

    @property
    def step(self) -> int:
        """That all workers do now."""
        return int((time.perf_counter() - self.began) / STEP_SECONDS)

    async def connect(self, asking: RequestSigner | None = None) -> Wire:
        loop, mine = asyncio.get_running_loop(), asking or RequestSigner(self.contact.token)
        _, wire = await loop.create_connection(lambda: Wire(self.head, mine), *self.address)
        return wire

    def start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)  # the loop holds it only weakly
        task.add_done_callback(self.tasks.discard)

    def waited(self, took: float, seconds: float) -> None:
        if self.measures:
            self.overshoots.append(took - seconds)

    def answered(self, took: float, probe: bool) -> None:
        if self.measures and probe:
            self.answers.append(took)

    def met(self, agent: Agent) -> None:
        if agent.view.number > self.after:
            self.there.add(agent.worker)
            if len(self.there) >= self.wanted:
                self.all_met.set()

    async def begin(self, workers: int) -> float:
        self.workers = [Worker(self, number) for number in range(workers)]
        gate = asyncio.Semaphore(256)

        async def come(worker: Worker) -> None:
            async with gate:
                await worker.connect()
            worker.listen()

        self.wanted = workers
        began = time.perf_counter()
        await asyncio.gather(*(come(worker) for worker in self.workers))
        await asyncio.wait_for(self.all_met.wait(), 120.0)
        return time.perf_counter() - began

    async def beat_for(self, seconds: float) -> None:
        self.measures = True
        until = time.perf_counter() + seconds
        due = time.perf_counter()
        while due < until:
            due += self.random.expovariate(SAID_PER_SECOND)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self.lateness.append(max(0.0, time.perf_counter() - due))
            worker = self.random.choice(self.workers)
            if not worker.talks and worker.alive:
                worker.say(asked_at=due)  # what is late here counts
        self.measures = False

    async def lose(self) -> tuple[float, float]:
        """One worker's process is killed, and its launcher says so: seconds until all others are in the new view, and
        of this process's time meanwhile."""
        worker = self.random.choice([worker for worker in self.workers if worker.alive])
        worker.alive = False
        self.wanted, self.after = self.wanted - 1, worker.agent.view.number
        self.there.clear()
        self.all_met.clear()
        began, own = time.perf_counter(), time.process_time()
        for wire in filter(None, (worker.listening, worker.saying)):
            wire.then = None
            wire.transport.abort()
        asking = await self.connect()
        asking.ask(b"/v1/gone", json.dumps({"worker": worker.agent.worker}).encode(), lambda body: None)
        await asyncio.wait_for(self.all_met.wait(), 120.0)
        await self.known()
        return time.perf_counter() - began, time.process_time() - own

    async def known(self) -> None:
        """Until the coordinator has heard of each that it works in its view."""
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
    """The most that it had."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise SystemExit("no VmHWM in /proc")


def cpu_seconds(process: int) -> float:
    """Of user and system."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(url: str, token: str, server: int, workers: int, seconds: float, deaths: int) -> dict[str, object]:
    crowd = Crowd(url, token)
    begun = await crowd.begin(workers)
    begun_mib = memory_mib(server)
    await asyncio.sleep(2.0)
    theirs, own, began = cpu_seconds(server), time.process_time(), time.perf_counter()
    beats = sum(worker.agent._count for worker in crowd.workers)
    await crowd.beat_for(seconds)
    took = time.perf_counter() - began
    beats = sum(worker.agent._count for worker in crowd.workers) - beats
    steady = {
        "beats_per_second": round(beats / took, 1),
        "server_cpu": round((cpu_seconds(server) - theirs) / took, 3),
        "generator_cpu": round((time.process_time() - own) / took, 3),
    }
    changes = []
    for _ in range(deaths):
        before = cpu_seconds(server), crowd.reader.bytes
        whole, mine = await crowd.lose()
        changes.append(
            {
                "seconds": round(whole, 3),
                "generator_cpu_seconds": round(mine, 3),
                "server_cpu_seconds": round(cpu_seconds(server) - before[0], 3),
                "mib_answered": round((crowd.reader.bytes - before[1]) / 2**20, 1),
            }
        )
        await asyncio.sleep(2.0)
    return {
        "workers": workers,
        "all_begun_seconds": round(begun, 3),
        "answer_ms": quantiles(crowd.answers),
        "overshoot_ms": quantiles(crowd.overshoots),
        "generator_lateness_ms": quantiles(crowd.lateness),
        "steady": steady,
        "changes": changes,
        "server_mib": round(memory_mib(server), 1),
        "server_mib_when_all_had_begun": round(begun_mib, 1),
        "generator_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--deaths", type=int, default=3)
    parser.add_argument("--report", type=Path, required=True)
    asked = parser.parse_args()
    token = random.SystemRandom().randbytes(16).hex()
    command = [sys.executable, str(Path(__file__).with_name("coordinator_process.py")), str(asked.workers)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "UNISONO_TOKEN": token}
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        found = uvloop.run(measure(url, token, server.pid, asked.workers, asked.seconds, asked.deaths))
        assert server.stdin is not None
        server.stdin.close()
    asked.report.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
