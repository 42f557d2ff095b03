"""The coordinator over HTTP: gives the protocol a clock, a disk and a network.

The service responds to a worker's heartbeat when there is news, or when the next heartbeat is due. So news reaches the
worker at once, and the loss of a worker closes a connection.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from unisono.membership.coordinator import Coordinator, Decision, ViewFormed
from unisono.membership.messages import HEARTBEAT_REQUEST, HeartbeatReply, HeartbeatRequest
from unisono.membership.protocol import View, ViewStatus
from unisono.membership.server.response_cache import Reply, ResponseCache, json_reply
from unisono.membership.server.stall_reports import StallReports
from unisono.membership.server.store import Store, describe
from unisono.membership.server.token_auth import Receive, Scope, Send, accepts_gzip, read_body
from unisono.membership.view_delta import view_delta

_LATE_MEMBER_INTERVALS = 8  # after so many heartbeats, a launcher gets a response even if no member is late
_LATE_MEMBER_SECONDS = 2.0  # the longest time until that response


@dataclass(eq=False)
class PendingReply:
    """A worker's request that waits for its response, which `send` sends unless the worker disconnects before."""

    worker: str
    send: Callable[[], None]
    due: asyncio.TimerHandle | None = None


class Service:
    """A `Coordinator` with a clock and a disk.

    Args:
        now: seconds of a clock that never jumps.
        today: seconds since the epoch.
        log: called with each decision as text.

    Attributes:
        update: what workers receive at present.
        stalled_seconds: how long this process was stopped, or waited for a processor, so far.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: Store,
        now: Callable[[], float] = time.monotonic,
        today: Callable[[], float] = time.time,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.coordinator, self.store, self._clock, self._today, self._log = coordinator, store, now, today, log
        self.stalled_seconds = 0.0
        self.update = coordinator.update
        self._view_before = View()
        self._last_due = 0.0
        self.reports = StallReports(int(1000 * today()))
        self._unwritten: list[Decision] = []
        self._pending: set[PendingReply] = set()
        self._late_member = asyncio.Event()  # set for a moment
        self._pending_of: Counter[str] = Counter()  # number of pending replies of a worker
        self._replies = ResponseCache()

    def now(self) -> float:
        """Seconds of a clock that stops while this process is stopped: no worker is late because of that."""
        return self._clock() - self.stalled_seconds

    def decide(self, decisions: Sequence[Decision]) -> None:
        """Write decisions to disk, and send them to workers.

        No worker receives a view, or the end of the training, that is not on disk; what cannot be written now is
        written with the next tick. The end of a view is sent at once: its cause is reported again and again, so a
        coordinator that restarts would decide the same again.
        """
        if any(isinstance(each, ViewFormed) for each in decisions):
            self.reports.view_formed(self.update.view, self.coordinator, self.now())
        self._unwritten += decisions
        binding = any(isinstance(each, ViewFormed) or each.status is ViewStatus.FINISHED for each in self._unwritten)
        if self._unwritten and (binding or not decisions) and not self._write():
            return
        if self.update != self.coordinator.update:
            self._publish()

    def _write(self) -> bool:
        try:
            self.store.save(self.coordinator.saved, self._unwritten, self._today())
        except sqlite3.Error as error:
            self._log(f"decisions cannot be written: {error}")
            return False
        for each in self._unwritten:
            self._log(describe(each))
        self._unwritten = []
        return True

    def _publish(self) -> None:
        if self.update.view != self.coordinator.view:
            self._view_before = self.update.view
        self.update = self.coordinator.update
        self._replies.clear()
        self._wake()

    def report_stalls(self) -> None:
        """Report what delays the current step, if anything does."""
        findings = self.reports.check(self.coordinator, self.now())
        for finding in findings:
            self._log(finding)
        if findings:
            self._wake()

    def release_all(self) -> None:
        """Send all pending replies: this process ends."""
        self._late_member.set()
        self._wake()

    def _wake(self) -> None:
        for pending in self._pending:  # not at once, because the caller has not finished its decisions
            asyncio.get_running_loop().call_soon(self._complete, pending)

    async def tick(self) -> None:
        """Call the coordinator's `tick` periodically; never returns."""
        loop = asyncio.get_running_loop()
        while True:
            self.decide(self.coordinator.tick(self.now()))
            self.report_stalls()
            interval = self.coordinator.heartbeat_seconds
            if self.coordinator.has_late_member(self.now()):
                self._late_member.set()
                self._late_member.clear()
                interval /= 2
            began, at = self._clock(), loop.time()
            pause = interval * (at // interval + 1) - at
            await asyncio.sleep(pause)
            late = self._clock() - began - pause
            if late > interval:
                self.stalled_seconds += late

    def receive(self, request: HeartbeatRequest) -> bool:
        """Process a heartbeat; returns whether there is news for the worker."""
        spent = None if request.spent is None else {phase.value: time for phase, time in request.spent.items()}
        self.reports.receive(request.worker, request.activity, spent, self.now())
        self.decide(self.coordinator.receive(request, self.now()))
        has_all_findings = not request.last_finding or request.last_finding >= self.reports.latest
        known = request.known_view, request.known_status
        return not has_all_findings or known != (self.update.view.number, self.update.status.value)

    def add_pending(self, worker: str, send: Callable[[], None]) -> PendingReply:
        """Call `send` once there is news for `worker`, or its next heartbeat is due."""
        loop, pending = asyncio.get_running_loop(), PendingReply(worker, send)
        pending.due = loop.call_at(self._due(loop.time()), self._complete, pending)
        self._pending.add(pending)
        self._pending_of[worker] += 1
        return pending

    def disconnected(self, pending: PendingReply) -> None:
        """Process that the worker has closed the connection on which it waited for `pending`."""
        if self._remove(pending) and pending.worker not in self._pending_of:
            self.decide(self.coordinator.disconnected(pending.worker, self.now()))

    def _complete(self, pending: PendingReply) -> None:
        if self._remove(pending):
            pending.send()

    def _remove(self, pending: PendingReply) -> bool:
        if pending not in self._pending:
            return False
        assert pending.due is not None
        pending.due.cancel()
        self._pending.remove(pending)
        self._pending_of[pending.worker] -= 1
        if not self._pending_of[pending.worker]:
            del self._pending_of[pending.worker]
        return True

    async def wait_for_late_member(self, receive: Receive) -> bool:
        """Wait until a member is late, the client disconnects, or a while has passed; returns whether one is late."""
        late, closed = (asyncio.ensure_future(each) for each in (self._late_member.wait(), receive()))
        seconds = min(_LATE_MEMBER_SECONDS, _LATE_MEMBER_INTERVALS * self.coordinator.heartbeat_seconds)
        await asyncio.wait((late, closed), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        is_late = late.done()
        late.cancel()
        closed.cancel()
        return is_late

    def _due(self, now: float) -> float:
        """When a worker's next heartbeat is due.

        With few workers, all replies are sent together, at the time of a tick: workers that wait for each other in each
        step are interrupted at the same time, and this process wakes up once. With many workers, news would make all
        intervals start at the same time, so heartbeats are spread over up to two intervals.
        """
        seconds, policy = self.coordinator.heartbeat_seconds, self.coordinator.policy
        if seconds <= policy.heartbeat_seconds:
            return (now + seconds) // seconds * seconds
        spread = self._last_due + 0.5 / policy.heartbeats_per_second
        self._last_due = min(now + 2 * seconds, max(now + seconds, spread))
        return self._last_due

    def reply(self, request: HeartbeatRequest, gzipped: bool) -> Reply:
        """The response to a heartbeat, which has the view only if the worker does not know it."""
        update, reports, seconds = self.update, self.reports, round(self.coordinator.heartbeat_seconds, 3)
        known_view = request.known_view if request.known_status else -1
        last_finding = min(request.last_finding, reports.latest)

        def encode() -> bytes:
            view = None if known_view == update.view.number else update.view
            delta = None
            if view is not None and known_view == self._view_before.number:
                delta = view_delta(self._view_before, view)
            return HeartbeatReply(
                view=None if delta else view,
                change=delta,
                status=update.status,
                heartbeat_seconds=seconds,
                last_finding=reports.latest,
                findings=reports.after(last_finding),
            ).json_text().encode()  # fmt: skip

        return self._replies.get((update.status, seconds, known_view, last_finding, reports.latest), gzipped, encode)


class HeartbeatRoute:
    """Processes heartbeats, which thousands of workers send all the time, without FastAPI."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def receive(self, body: bytes, gzipped: bool, send: Callable[[Reply], None]) -> PendingReply | None:
        """Process a heartbeat.

        Args:
            gzipped: whether the client accepts gzip.
            send: called with the response, now or later.

        Returns:
            the pending reply, if `send` is called later.
        """
        service = self._service
        try:
            request = HEARTBEAT_REQUEST.validate_json(body)
        except ValidationError as error:
            problem = error.json(include_url=False, include_context=False, include_input=False)
            send(json_reply(422, f'{{"detail":{problem}}}'.encode()))
            return None
        if not service.receive(request) and request.waits:
            return service.add_pending(request.worker, lambda: send(service.reply(request, gzipped)))
        send(service.reply(request, gzipped))
        return None

    def disconnected(self, pending: PendingReply) -> None:
        """Process that the client has disconnected before the response `pending` was sent."""
        self._service.disconnected(pending)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a heartbeat that uvicorn has received, as an ASGI application."""
        body = await read_body(receive)
        if body is None:
            return
        response: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        pending = self.receive(body, accepts_gzip(scope["headers"]), response.set_result)
        if pending is not None:
            closed = asyncio.ensure_future(receive())  # after a complete request, only the disconnection can follow
            try:
                await asyncio.wait((response, closed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                closed.cancel()
            if not response.done():
                return self.disconnected(pending)
        for message in response.result().messages():
            await send(message)
