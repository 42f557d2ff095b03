"""All workers that the coordinator knows: their last heartbeats, and which of them are responsive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from unisono.membership.protocol import Heartbeat, Policy, StateVersion
from unisono.membership.readmission import Readmission
from unisono.observe.adaptive_timeout import AdaptiveTimeout

_LATE = 0.4  # part of the timeout: more than an interval of heartbeats, and early enough for the launcher to respond
_RUNNING_INTERVALS = 2  # for how many intervals of heartbeats a report counts that the process is running
_TIMEOUT_INTERVALS = 3  # after how many intervals of heartbeats, at least, a worker is taken for unresponsive


@dataclass
class WorkerRecord:
    """What the coordinator knows of a worker.

    Args:
        heartbeat: the worker's last heartbeat.
        timeout: when the next heartbeat is due.
        readmission: when the worker may join again after an eviction.
        disconnected: whether the connection on which it waited has closed, and no heartbeat has arrived since.
        evicted: whether it was evicted as unresponsive, and no heartbeat has arrived since.
        last_running: when its process was last seen running or runnable.
    """

    heartbeat: Heartbeat
    timeout: AdaptiveTimeout
    readmission: Readmission
    disconnected: bool = False
    evicted: bool = False
    last_running: float = float("-inf")


@dataclass
class Roster:
    """All workers that the coordinator knows. Methods take constant time, except where stated otherwise.

    Attributes:
        exited: workers whose processes have exited.
        leaving: workers that asked to leave.
        free: workers that have ended the latest view, or were never in it.
    """

    policy: Policy
    records: dict[str, WorkerRecord] = field(default_factory=dict)
    exited: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    free: set[str] = field(default_factory=set)

    @property
    def heartbeat_seconds(self) -> float:
        """Interval of a worker's heartbeats."""
        return max(self.policy.heartbeat_seconds, len(self.records) / self.policy.heartbeats_per_second)

    @property
    def _min_timeout_seconds(self) -> float:
        return max(self.policy.min_heartbeat_timeout_seconds, _TIMEOUT_INTERVALS * self.heartbeat_seconds)

    def expect(self, worker: str, now: float) -> WorkerRecord:
        """The worker's record. If there is none, it is created, and the worker's first heartbeat is expected."""
        record = self.records.get(worker)
        if record is None:
            timeout = AdaptiveTimeout(self.heartbeat_seconds, self._min_timeout_seconds, last=now)
            record = self.records[worker] = WorkerRecord(Heartbeat(worker, 0), timeout, Readmission(now))
        return record

    def receive(self, heartbeat: Heartbeat, view: int, now: float) -> Heartbeat | None:
        """Record `heartbeat`; returns the worker's previous heartbeat, or None if `heartbeat` is not newer than that.

        Args:
            view: number of the latest view.
        """
        worker = heartbeat.worker
        record = self.expect(worker, now)
        if heartbeat.count <= record.heartbeat.count:
            return None
        before, record.heartbeat = record.heartbeat, heartbeat
        if record.evicted:
            record.readmission.start_quarantine(now)
        record.disconnected = record.evicted = False
        record.timeout.min_seconds = self._min_timeout_seconds
        record.timeout.record(now)
        if heartbeat.leaving:
            self.leaving.add(worker)
        if heartbeat.ended_view >= view:
            self.free.add(worker)
        return before

    def start_view(self, view: int) -> None:
        """Note that `view` is the number of the latest view. Takes time linear in the number of workers."""
        self.free = {worker for worker in self.free if self.records[worker].heartbeat.ended_view >= view}

    def join(self, worker: str, now: float) -> None:
        """Note that the worker joins a view."""
        self.records[worker].readmission.join(now)

    def evict(self, worker: str, members: int, now: float) -> float:
        """Evict an unresponsive worker from a view of `members` workers; returns the seconds of its quarantine."""
        record = self.records[worker]
        if not record.evicted:
            record.evicted = True
            record.readmission.evict(members, now)
        return record.readmission.quarantine_seconds

    def is_quarantined(self, worker: str, now: float) -> bool:
        """Whether the worker may not join yet, because it was evicted."""
        return self.records[worker].readmission.is_quarantined(now)

    def is_unresponsive(self, worker: str, now: float) -> bool:
        """Whether the worker has exited or disconnected, or is overdue with a heartbeat and not reported as running."""
        if worker in self.exited:
            return True
        record = self.records[worker]
        ran = now - record.last_running <= _RUNNING_INTERVALS * self.heartbeat_seconds
        return record.disconnected or (record.timeout.overdue(now) and not ran)

    def is_late(self, worker: str, now: float) -> bool:
        """Whether the worker's heartbeat is late, though perhaps not overdue, and its process has not exited."""
        record = self.records[worker]
        last = max(record.timeout.last or now, record.last_running)
        return worker not in self.exited and now - last > _LATE * record.timeout.deadline_seconds

    def ready_workers(self, now: float) -> dict[str, StateVersion]:
        """State versions of responsive free workers, in the order of their first heartbeats.

        Takes time linear in the number of workers.
        """
        return {
            worker: record.heartbeat.version
            for worker, record in self.records.items()
            if worker in self.free and not self.is_unresponsive(worker, now)
        }

    def forget(self, kept: frozenset[str], now: float) -> list[str]:
        """Forget workers that have exited or sent no heartbeat for long, except `kept`; returns those forgotten.

        Takes time linear in the number of workers.
        """
        longest = self.policy.join_timeout_seconds + self._min_timeout_seconds
        past = [
            worker for worker, record in self.records.items()
            if worker not in kept and (worker in self.exited or now - (record.timeout.last or now) > longest)
        ]  # fmt: skip
        self.drop(past)
        return past

    def drop(self, workers: Iterable[str]) -> None:
        """Forget `workers`."""
        for worker in workers:
            del self.records[worker]
            self.leaving.discard(worker)
            self.free.discard(worker)
