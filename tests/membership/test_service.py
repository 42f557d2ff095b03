"""The coordinator over HTTP: its answers, when and to whom, and its state after a restart."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import httpx2
import pytest

from unisono.membership import Coordinator, Policy, StateVersion, ViewStatus
from unisono.membership.messages import HEARTBEAT_REQUEST, HeartbeatReply, HeartbeatRequest
from unisono.membership.server.app import application
from unisono.membership.server.service import Service
from unisono.membership.server.store import Store
from unisono.membership.server.token_auth import MAX_BODY_BYTES

TOKEN = "a token of this run"
BEARER = {"authorization": f"Bearer {TOKEN}"}


class Served:
    """A service with a clock set by the test, and a client of it without a network."""

    def __init__(self, path: Path, policy: Policy | None = None) -> None:
        self.seconds = 100.0
        self.store = Store(path)
        coordinator = Coordinator(
            policy or Policy(expected_workers=2, max_workers=3), self.store.load(), started_at=self.seconds
        )
        self.service = Service(coordinator, self.store, now=lambda: self.seconds, today=lambda: 1e9)
        transport = httpx2.ASGITransport(application(self.service, TOKEN))
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://coordinator", headers=BEARER)

    async def send(self, worker: str, count: int, **fields: object) -> HeartbeatReply:
        message = {"worker": worker, "count": count, **fields}
        answer = await self.client.post("/v1/beat", json=message)
        assert answer.status_code == 200, answer.text
        return HeartbeatReply.model_validate_json(answer.content)


def test_a_view_is_formed_sent_and_restored_from_disk(tmp_path) -> None:
    async def run() -> None:
        served = Served(tmp_path / "store")
        await served.send("w0", 1)
        update = await served.send("w1", 1)
        assert update.view.number == 1
        assert update.view.members == ("w0", "w1")
        await served.send("w0", 2, active_view=1, version={"view": 1, "step": 7, "digest": "x"})
        served.store.close()
        again = Served(tmp_path / "store")
        update = await again.send("w0", 3, active_view=1, version={"view": 1, "step": 9, "digest": "y"})
        assert (update.view.number, update.status) == (1, ViewStatus.ACTIVE)
        status = (await again.client.get("/v1/status")).json()
        assert [worker["step"] for worker in status["workers"]] == [9, 0]
        assert status["happened"][0]["words"] == "view 1: 2 workers (w0, w1) start from step 0"

    asyncio.run(run())


def test_a_response_is_sent_when_there_is_news_or_when_the_next_heartbeat_is_due(tmp_path) -> None:
    async def run() -> None:
        served = Served(tmp_path / "store", Policy(expected_workers=2, max_workers=3, heartbeat_seconds=20.0))
        waiting = asyncio.create_task(served.send("w0", 1, known_view=0, known_status="now"))
        await asyncio.sleep(0)
        while not served.service.coordinator.last_heartbeats():
            await asyncio.sleep(0.001)
        assert not waiting.done()
        await served.send("w1", 1)
        update = await asyncio.wait_for(waiting, 5.0)
        assert update.view is None
        assert update.change.number == 1
        assert update.change.members == ("w0", "w1")

    asyncio.run(run())


def test_responses_to_few_workers_are_sent_at_the_same_moment(tmp_path) -> None:
    async def run() -> None:
        served = Served(tmp_path / "store", Policy(expected_workers=2, max_workers=3, heartbeat_seconds=1.0))
        loop, responses = asyncio.get_running_loop(), {}

        async def send(worker: str) -> None:
            await served.send(worker, 2, active_view=1, known_view=1, known_status="no")
            responses[worker] = loop.time()

        for worker in ("w0", "w1"):
            await served.send(worker, 1)
        await asyncio.sleep(1.0 - loop.time() % 0.5)  # just after a tick
        first = asyncio.create_task(send("w0"))
        await asyncio.sleep(0.2)
        await asyncio.gather(first, send("w1"))
        assert abs(responses["w0"] - responses["w1"]) < 0.1

    asyncio.run(run())


@pytest.mark.parametrize("asked", [("/v1/running", {"workers": []}), ("/v1/beat", {"worker": "w0", "count": 1,
                                   "known_status": "now"})])  # fmt: skip
def test_pending_requests_get_responses_when_the_coordinator_ends(asked, tmp_path) -> None:
    async def run() -> None:
        served = Served(tmp_path / "store", Policy(expected_workers=2, max_workers=3, heartbeat_seconds=20.0))
        path, message = asked
        waiting = asyncio.create_task(served.client.post(path, json=message))
        while not waiting.done():
            await asyncio.sleep(0.01)
            served.service.release_all()
        assert waiting.result().status_code == 200

    asyncio.run(asyncio.wait_for(run(), 10.0))


@pytest.mark.parametrize(("stalled", "over"), [(True, "no"), (False, "now")])
def test_no_worker_is_late_because_the_coordinator_was_stopped(stalled, over, tmp_path) -> None:
    async def run() -> None:
        served = Served(tmp_path / "store")
        for count, working in ((1, {}), (2, {"active_view": 1})):
            for worker in ("w0", "w1"):
                await served.send(worker, count, **working)
        if stalled:
            ticking = asyncio.create_task(served.service.tick())
            await asyncio.sleep(0)
            while not served.service.stalled_seconds:  # its first sleep lasts for as long as the clock says
                served.seconds += 60.0
                await asyncio.sleep(0.01)
            ticking.cancel()
        else:
            served.seconds += 60.0
        served.service.decide(served.service.coordinator.tick(served.service.now()))
        assert served.service.update.status.value == over

    asyncio.run(run())


def test_a_view_that_could_not_be_written_is_not_sent(tmp_path) -> None:
    async def run() -> None:
        served = Served(tmp_path / "store")
        other = sqlite3.connect(tmp_path / "store", isolation_level=None)
        served.store._file.execute("pragma busy_timeout = 0")
        other.execute("begin immediate")  # like a full disk
        await served.send("w0", 1)
        assert (await served.send("w1", 1)).view.number == 0
        other.execute("rollback")
        assert (await served.send("w1", 2)).view.number == 1

    asyncio.run(run())


@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"},
                                   {"authorization": f"Bearer {TOKEN} "}])  # fmt: skip
@pytest.mark.parametrize(("verb", "path"), [("POST", "/v1/beat"), ("POST", "/v1/gone"), ("GET", "/v1/status"),
                                            ("GET", "/openapi.json"), ("GET", "/anything")])  # fmt: skip
def test_a_client_without_the_token_learns_nothing(verb, path, given, tmp_path) -> None:
    async def run() -> None:
        served = Served(tmp_path / "store")
        served.client.headers.pop("authorization")
        answer = await served.client.request(verb, path, json={"worker": "w0", "count": 1}, headers=given)
        assert answer.status_code == 401
        assert not answer.content
        assert not served.service.coordinator.last_heartbeats()

    asyncio.run(run())


@pytest.mark.parametrize("message", [
    {}, {"worker": "w0"}, {"worker": "", "count": 1}, {"worker": "w 0", "count": 1}, {"worker": "w0", "count": -1},
    {"worker": "w0", "count": 1 << 70}, {"worker": "w0", "count": "1"}, {"worker": "w0", "count": 1, "more": 1},
    {"worker": "w0", "count": 1, "version": {"step": 1.5}}, {"worker": "w0" * 99, "count": 1}, [], "text", None,
    {"worker": "w0", "count": 1, "unreachable": ["a"] * 9000},
])  # fmt: skip
def test_an_invalid_heartbeat_is_refused_and_changes_nothing(message, tmp_path) -> None:
    async def run() -> None:
        served = Served(tmp_path / "store")
        assert (await served.client.post("/v1/beat", json=message)).status_code == 422
        assert not served.service.coordinator.last_heartbeats()

    asyncio.run(run())


def test_a_body_that_is_too_long_or_of_unknown_length_is_refused_before_it_is_read(tmp_path) -> None:
    async def run() -> None:
        served = Served(tmp_path / "store")

        async def endless():
            yield b"{"
            raise AssertionError("read")

        assert (await served.client.post("/v1/beat", content=endless())).status_code == 411
        long = {"content-length": str(MAX_BODY_BYTES + 1)}
        assert (await served.client.post("/v1/beat", content=endless(), headers=long)).status_code == 413

    asyncio.run(run())


def test_only_the_owner_reads_the_store(tmp_path) -> None:
    Store(tmp_path / "store").close()
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0


def test_another_file_is_refused_as_a_store(tmp_path) -> None:
    (tmp_path / "store").write_text("something else, and long enough to be read as a database\n" * 20)
    with pytest.raises(sqlite3.DatabaseError):
        Store(tmp_path / "store")


def test_a_heartbeat_is_equal_after_encoding_and_decoding() -> None:
    request = HeartbeatRequest("w0", 3, 2, 1, StateVersion(2, 9, "x"), ("w1",), True, failed_view=1)
    assert HEARTBEAT_REQUEST.validate_json(HEARTBEAT_REQUEST.dump_json(request, by_alias=True)) == request
