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


class Desk:
    """A service with a clock that is set by hand, and a client of it without a network."""

    def __init__(self, path: Path, policy: Policy | None = None) -> None:
        self.seconds = 100.0
        self.store = Store(path)
        coordinator = Coordinator(
            policy or Policy(expected_workers=2, max_workers=3), self.store.load(), started_at=self.seconds
        )
        self.service = Service(coordinator, self.store, now=lambda: self.seconds, today=lambda: 1e9)
        transport = httpx2.ASGITransport(application(self.service, TOKEN))
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://coordinator", headers=BEARER)

    async def beat(self, worker: str, count: int, **said: object) -> HeartbeatReply:
        message = {"worker": worker, "count": count, **said}
        answer = await self.client.post("/v1/beat", json=message)
        assert answer.status_code == 200, answer.text
        return HeartbeatReply.model_validate_json(answer.content)


def test_a_view_is_formed_said_and_remembered(tmp_path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "store")
        await desk.beat("w0", 1)
        word = await desk.beat("w1", 1)
        assert word.view.number == 1
        assert word.view.members == ("w0", "w1")
        await desk.beat("w0", 2, active_view=1, version={"view": 1, "step": 7, "digest": "x"})
        desk.store.close()
        again = Desk(tmp_path / "store")
        word = await again.beat("w0", 3, active_view=1, version={"view": 1, "step": 9, "digest": "y"})
        assert (word.view.number, word.status) == (1, ViewStatus.ACTIVE)
        status = (await again.client.get("/v1/status")).json()
        assert [worker["step"] for worker in status["workers"]] == [9, 0]
        assert status["happened"][0]["words"] == "view 1: 2 workers (w0, w1) start from step 0"

    asyncio.run(play())


def test_news_reach_who_waits_at_once_and_else_the_answer_comes_when_the_next_beat_is_due(tmp_path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "store", Policy(expected_workers=2, max_workers=3, heartbeat_seconds=20.0))
        waiting = asyncio.create_task(desk.beat("w0", 1, known_view=0, known_status="now"))
        await asyncio.sleep(0)
        while not desk.service.coordinator.last_heartbeats():
            await asyncio.sleep(0.001)
        assert not waiting.done()
        await desk.beat("w1", 1)
        word = await asyncio.wait_for(waiting, 5.0)
        assert word.view is None
        assert word.change.number == 1
        assert word.change.members == ("w0", "w1")

    asyncio.run(play())


def test_a_few_workers_are_answered_at_the_same_moment(tmp_path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "store", Policy(expected_workers=2, max_workers=3, heartbeat_seconds=1.0))
        loop, answered = asyncio.get_running_loop(), {}

        async def beat(worker: str) -> None:
            await desk.beat(worker, 2, active_view=1, known_view=1, known_status="no")
            answered[worker] = loop.time()

        for worker in ("w0", "w1"):
            await desk.beat(worker, 1)
        await asyncio.sleep(1.0 - loop.time() % 0.5)  # just after one of the moments
        first = asyncio.create_task(beat("w0"))
        await asyncio.sleep(0.2)
        await asyncio.gather(first, beat("w1"))
        assert abs(answered["w0"] - answered["w1"]) < 0.1

    asyncio.run(play())


@pytest.mark.parametrize("asked", [("/v1/running", {"workers": []}), ("/v1/beat", {"worker": "w0", "count": 1,
                                   "known_status": "now"})])  # fmt: skip
def test_whoever_waits_is_answered_when_the_coordinator_ends(asked, tmp_path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "store", Policy(expected_workers=2, max_workers=3, heartbeat_seconds=20.0))
        path, message = asked
        waiting = asyncio.create_task(desk.client.post(path, json=message))
        while not waiting.done():
            await asyncio.sleep(0.01)
            desk.service.release_all()
        assert waiting.result().status_code == 200

    asyncio.run(asyncio.wait_for(play(), 10.0))


@pytest.mark.parametrize(("stalled", "over"), [(True, "no"), (False, "now")])
def test_while_the_coordinator_itself_stands_still_nobody_else_is_late(stalled, over, tmp_path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "store")
        for count, working in ((1, {}), (2, {"active_view": 1})):
            for worker in ("w0", "w1"):
                await desk.beat(worker, count, **working)
        if stalled:
            ticking = asyncio.create_task(desk.service.tick())
            await asyncio.sleep(0)
            while not desk.service.stalled_seconds:  # its first sleep lasts for as long as the clock says
                desk.seconds += 60.0
                await asyncio.sleep(0.01)
            ticking.cancel()
        else:
            desk.seconds += 60.0
        desk.service.decide(desk.service.coordinator.tick(desk.service.now()))
        assert desk.service.update.status.value == over

    asyncio.run(play())


def test_nobody_hears_of_what_could_not_be_written(tmp_path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "store")
        other = sqlite3.connect(tmp_path / "store", isolation_level=None)
        desk.store._file.execute("pragma busy_timeout = 0")
        other.execute("begin immediate")  # as good as a full disk
        await desk.beat("w0", 1)
        assert (await desk.beat("w1", 1)).view.number == 0
        other.execute("rollback")
        assert (await desk.beat("w1", 2)).view.number == 1

    asyncio.run(play())


@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"},
                                   {"authorization": f"Bearer {TOKEN} "}])  # fmt: skip
@pytest.mark.parametrize(("verb", "path"), [("POST", "/v1/beat"), ("POST", "/v1/gone"), ("GET", "/v1/status"),
                                            ("GET", "/openapi.json"), ("GET", "/anything")])  # fmt: skip
def test_nothing_is_said_to_who_has_not_the_token(verb, path, given, tmp_path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "store")
        desk.client.headers.pop("authorization")
        answer = await desk.client.request(verb, path, json={"worker": "w0", "count": 1}, headers=given)
        assert answer.status_code == 401
        assert not answer.content
        assert not desk.service.coordinator.last_heartbeats()

    asyncio.run(play())


@pytest.mark.parametrize("message", [
    {}, {"worker": "w0"}, {"worker": "", "count": 1}, {"worker": "w 0", "count": 1}, {"worker": "w0", "count": -1},
    {"worker": "w0", "count": 1 << 70}, {"worker": "w0", "count": "1"}, {"worker": "w0", "count": 1, "more": 1},
    {"worker": "w0", "count": 1, "version": {"step": 1.5}}, {"worker": "w0" * 99, "count": 1}, [], "text", None,
    {"worker": "w0", "count": 1, "unreachable": ["a"] * 9000},
])  # fmt: skip
def test_what_is_no_beat_is_refused_and_changes_nothing(message, tmp_path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "store")
        assert (await desk.client.post("/v1/beat", json=message)).status_code == 422
        assert not desk.service.coordinator.last_heartbeats()

    asyncio.run(play())


def test_a_body_of_any_length_or_of_none_is_refused_before_it_is_read(tmp_path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path / "store")

        async def endless():
            yield b"{"
            raise AssertionError("read")

        assert (await desk.client.post("/v1/beat", content=endless())).status_code == 411
        long = {"content-length": str(MAX_BODY_BYTES + 1)}
        assert (await desk.client.post("/v1/beat", content=endless(), headers=long)).status_code == 413

    asyncio.run(play())


def test_only_the_owner_reads_the_store(tmp_path) -> None:
    Store(tmp_path / "store").close()
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0


def test_another_file_is_not_taken_for_a_store(tmp_path) -> None:
    (tmp_path / "store").write_text("something else, and long enough to be looked at by whoever opens it\n" * 20)
    with pytest.raises(sqlite3.DatabaseError):
        Store(tmp_path / "store")


def test_a_beat_says_over_the_wire_what_it_says_without() -> None:
    request = HeartbeatRequest("w0", 3, 2, 1, StateVersion(2, 9, "x"), ("w1",), True, failed_view=1)
    assert HEARTBEAT_REQUEST.validate_json(HEARTBEAT_REQUEST.dump_json(request, by_alias=True)) == request
