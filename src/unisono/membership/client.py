"""A worker's connection to the coordinator: a thread sends heartbeats, and passes views to the thread that trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from unisono.errors import InvalidInput
from unisono.membership.agent import AbortView, Action, Agent, Exit, JoinView
from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import HEARTBEAT_REQUEST, HeartbeatReply, HeartbeatRequest
from unisono.membership.protocol import CoordinatorAddress, StateVersion, View, ViewUpdate
from unisono.observe.activity import Activity, Phase

LOG = logging.getLogger("unisono")
_CHANGE_SECONDS = 0.1  # shorter than a heartbeat interval
_RETRY_SECONDS = 0.2  # while the coordinator does not respond
_REFUSED_SECONDS = 30.0  # until a worker that never had a response gives up: the run that it was to join has ended
_GONE_SECONDS = 300.0  # until a worker that has had a response gives up: a coordinator may be restarted
_SPENT_SECONDS = 1.0  # between two reports of the seconds that the worker has spent in each phase


class CoordinatorClient:
    """Connects a worker's `Agent` with the coordinator, until this client is closed.

    One thread waits for news: the coordinator responds to this thread's heartbeats when it has news, or when the next
    one is due. Heartbeats that report something are sent at once, on a second connection.

    Args:
        contact: how to reach the coordinator.
        agent: this worker's half of the protocol.
        abort: called with the number of a view whose group must be aborted; at any time, in any thread.
        leaving: returns whether this worker was asked to leave; called before every heartbeat.
        stopping: returns whether the run was asked to stop, so that `next_view` does not wait any longer.
        activity: returns what the worker is doing; called before every heartbeat.
        spent: returns the seconds that the worker has spent in each phase.
        on_finding: called with each finding of the coordinator, a sentence for people.

    Raises:
        InvalidInput: the contact's URL is invalid, or its authority cannot be read.
    """

    def __init__(
        self,
        contact: CoordinatorAddress,
        agent: Agent,
        abort: Callable[[int], None],
        *,
        leaving: Callable[[], bool] = lambda: False,
        stopping: Callable[[], bool] = lambda: False,
        activity: Callable[[], Activity] | None = None,
        spent: Callable[[], Mapping[Phase, float]] | None = None,
        on_finding: Callable[[str], None] = LOG.warning,
    ) -> None:
        self._waiting = HttpConnection(contact)
        self._reporting = self._waiting.sibling()
        self._url = contact.url
        self._refused_at: float | None = None  # since when connections are refused
        self._agent, self._abort, self._leaving, self._stopping = agent, abort, leaving, stopping
        self._activity, self._spent, self._on_finding = activity, spent, on_finding
        self._last_finding, self._spent_at = 0, float("-inf")
        self._known: ViewUpdate | None = None
        self._news = threading.Condition()  # guards the agent and the following fields
        self._view: View | None = None
        self._dismissed = self._closed = self._pausing = False
        self._report_lock, self._finding_lock = threading.Lock(), threading.Lock()
        self._thread = threading.Thread(target=self._wait_for_news, name="unisono membership", daemon=True)
        self._thread.start()

    def next_view(self) -> View | None:
        """Wait for a view to join, and return it.

        The result is None if the training is complete, if the others continue without this worker because it asked to
        leave, if the run was asked to stop, or if this client was closed.

        Raises:
            InvalidInput: the coordinator has not accepted connections for a while.
        """
        began = time.monotonic()
        with self._news:
            self._news.wait_for(
                lambda: self._view or self._dismissed or self._closed or self._is_gone(began) or self._stopping()
            )
            if self._view is None and not (self._dismissed or self._closed) and self._is_gone(began):
                raise InvalidInput(
                    "coordinator",
                    self._url,
                    "it does not respond any more",
                    "a coordinator ends with its run: see how the run ended",
                )
            view, self._view = self._view, None
            return view

    def _is_gone(self, began: float) -> bool:
        """Whether connections have been refused for too long.

        Once the coordinator has responded, only the time since `began` counts, when `next_view` was called.
        """
        if self._refused_at is None:
            return False
        if self._known is None:
            return time.monotonic() - self._refused_at > _REFUSED_SECONDS
        return time.monotonic() - max(began, self._refused_at) > _GONE_SECONDS

    @property
    def votes_to_end(self) -> bool:
        """See `Agent.votes_to_end`."""
        return self._agent.votes_to_end

    @property
    def version(self) -> StateVersion:
        """See `Agent.version`."""
        return self._agent.version

    def joined(self, number: int, step: int, digest: str) -> None:
        """See `Agent.joined`."""
        self._report_change(lambda: self._agent.joined(number, step, digest))

    def add_steps(self, number: int, steps: int = 1) -> None:
        """See `Agent.add_steps`. The next heartbeat reports the steps."""
        self._agent.add_steps(number, steps=steps)  # without a lock: only the training thread changes the version

    def end_view(self, number: int, digest: str) -> None:
        """See `Agent.end_view`."""
        self._report(lambda: self._agent.end_view(number, digest))

    def fail_view(self, number: int, digest: str, unreachable: tuple[str, ...] = ()) -> None:
        """See `Agent.fail_view`."""
        self._report_change(lambda: self._agent.fail_view(number, unreachable, digest))

    def finish(self) -> None:
        """See `Agent.finish`."""
        self._report(self._agent.finish)

    def request_leave(self) -> None:
        """See `Agent.request_leave`."""
        self._report(self._agent.request_leave)

    def close(self) -> None:
        """Send no further heartbeat."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._waiting.cancel()
        self._thread.join()
        for connection in (self._reporting, self._waiting):
            connection.close()

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _report_change(self, change: Callable[[], list[Action] | None]) -> None:
        with self._news:
            self._do(change() or [])
            if self._pausing:  # the waiting thread reports the change, and receives the next view in response
                self._pausing = False
                return
        self._report(list)

    def _report(self, change: Callable[[], list[Action] | None]) -> None:
        with self._news:
            self._do(change() or [])
        with self._report_lock:  # if the coordinator does not respond, a later heartbeat reports the change
            self._exchange(self._reporting, waits=False)

    def _wait_for_news(self) -> None:
        while not self._closed:
            with self._news:
                self._pausing = self._agent.changes_view
                self._news.wait_for(lambda: self._closed or not self._pausing, _CHANGE_SECONDS)
                self._pausing = False
            answered = self._exchange(self._waiting, waits=True)
            with self._news:
                if answered or not self._waiting.refused:
                    self._refused_at = None
                elif self._refused_at is None:
                    self._refused_at = time.monotonic()
                if not answered:
                    self._news.notify_all()
                    self._news.wait_for(lambda: self._closed, _RETRY_SECONDS)

    def _exchange(self, connection: HttpConnection, *, waits: bool) -> bool:
        with self._news:
            if self._leaving():
                self._do(self._agent.request_leave())
            heartbeat, known = self._agent.heartbeat(), self._known if waits else None
        request = HeartbeatRequest(
            **vars(heartbeat),
            known_view=known.view.number if known else 0,
            known_status=known.status.value if known else "",
            waits=waits,
            last_finding=self._last_finding,
            activity=self._activity() if self._activity else None,
            spent=self._spent_now(always=not waits),
        )
        reply = connection.post("/v1/beat", HEARTBEAT_REQUEST.dump_json(request, by_alias=True), HeartbeatReply)
        if reply is None:
            return False
        try:
            update = reply.update(known)
        except ValueError:  # the reply refers to a view that this worker does not have
            return False
        self._pass_findings(reply)
        with self._news:
            self._known = update
            self._do(self._agent.receive(update))
        return True

    def _spent_now(self, *, always: bool) -> dict[Phase, float] | None:
        now = time.monotonic()
        if self._spent is None or not (always or now - self._spent_at >= _SPENT_SECONDS):
            return None
        self._spent_at = now
        return {phase: seconds for phase, seconds in self._spent().items() if seconds}

    def _pass_findings(self, reply: HeartbeatReply) -> None:
        with self._finding_lock:
            new = reply.findings if reply.last_finding > self._last_finding else []
            self._last_finding = max(self._last_finding, reply.last_finding)
        for sentence in new:
            self._on_finding(sentence)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case AbortView(number):
                    self._view = None
                    self._abort(number)
                case JoinView(view):
                    self._view = view
                case Exit():
                    self._dismissed = True
        self._news.notify_all()
