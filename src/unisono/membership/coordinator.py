"""The coordinator's half of the membership protocol: which workers form the next view.

    no view ──► gathering ──► formed ──► gathering ──► ...
                   ▲                         │  └── a worker has the result ──► FINISHED
                   └── a member is lost (ABORTED), or a worker joins or leaves (ENDING_AT_BOUNDARY)

The coordinator decides only membership. No step waits for it: members of a view train without it. A heartbeat that
changes nothing takes constant time, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unisono.membership.protocol import Heartbeat, Policy, StateVersion, StepCount, View, ViewStatus, ViewUpdate
from unisono.membership.roster import Roster
from unisono.membership.selection import assign_ranks, mutually_reachable, newest_version, unproven_views
from unisono.membership.step_progress import StepProgress
from unisono.membership.unreachable_pairs import UnreachablePairs
from unisono.observe.adaptive_timeout import AdaptiveTimeout
from unisono.observe.stall_diagnosis import Liveness

_LINEAGE = 16  # views remembered; a worker that was away for longer cannot prove which steps were not committed
_NAMED = 8  # workers that a text names at most


@dataclass(frozen=True)
class ViewFormed:
    """The next view is formed.

    Args:
        abandoned_views: numbers of views some of whose committed steps may not be in the state that this view starts
            from, because no worker that has them reported in time.
    """

    view: View
    abandoned_views: tuple[int, ...] = ()


@dataclass(frozen=True)
class ViewEnded:
    """The view whose number is `view` ends, as `status` says, at the next boundary or at once; `reason` says why."""

    view: int
    status: ViewStatus
    reason: str


Decision = ViewFormed | ViewEnded


@dataclass(frozen=True)
class SavedViews:
    """What must survive the coordinator's process; it is on disk before any worker receives it.

    Args:
        lineage: the latest views whose states follow from each other, the current view last.
        status: the status of the current view.
    """

    lineage: tuple[View, ...] = ()
    status: ViewStatus = ViewStatus.ABORTED


@dataclass
class Coordinator:
    """The state machine that decides which workers form a view, and when the view ends.

    It has no clock: callers pass the time, in seconds that never jump. Only `receive`, `worker_exited`, `disconnected`
    and `tick` change `saved` and what workers receive; they return the decisions that they have made.

    Args:
        policy: the user's rules.
        saved: what the coordinator's previous process has saved.
        started_at: when this process started; no member is overdue before it has had time to send a heartbeat.
    """

    policy: Policy
    saved: SavedViews = field(default_factory=SavedViews)
    started_at: float = 0.0
    _roster: Roster = field(init=False)
    _unreachable: UnreachablePairs = field(init=False)
    _progress: StepProgress = field(init=False)
    _members: frozenset[str] = field(init=False)
    _arriving: set[str] = field(init=False)  # members that have not reported yet that they train in the view
    _staying: set[str] = field(init=False)  # members that have not reported yet that they have ended the view
    _awaited: str = field(default="", init=False)  # one of `_staying` that is responsive
    _ended_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._roster = Roster(self.policy)
        self._unreachable = UnreachablePairs(self.policy.quarantine_seconds)
        self._progress, self._ended_at = StepProgress(self.started_at), self.started_at
        self._set_members(self.view)
        for member in self.view.members:
            self._roster.expect(member, self.started_at)

    @property
    def view(self) -> View:
        """The latest view."""
        return self.saved.lineage[-1] if self.saved.lineage else View()

    @property
    def update(self) -> ViewUpdate:
        """What every worker receives, in response to heartbeats and after each decision."""
        return ViewUpdate(self.view, self.saved.status)

    @property
    def heartbeat_seconds(self) -> float:
        """Interval of a worker's heartbeats, which grows with the number of workers."""
        return self._roster.heartbeat_seconds

    def last_heartbeats(self) -> list[tuple[Heartbeat, float]]:
        """Every worker's last heartbeat, and when it arrived."""
        return [(known.heartbeat, known.timeout.last or self.started_at) for known in self._roster.records.values()]

    @property
    def step_timeout(self) -> AdaptiveTimeout:
        """When the next step of the current view is due."""
        return self._progress.timeout

    @property
    def step_count(self) -> StepCount:
        """Steps taken, as far as members have reported."""
        return self._progress.count

    @property
    def furthest_step(self) -> int:
        """The number of steps in the state of the member that is furthest."""
        return self._progress.count.furthest

    @property
    def has_lost_member(self) -> bool:
        """Whether the process of a member has exited."""
        return not self._roster.exited.isdisjoint(self._members)

    def is_leaving(self, worker: str) -> bool:
        """Whether the worker asks to leave."""
        return worker in self._roster.leaving

    def liveness(self, worker: str, now: float) -> Liveness:
        """Whether a member of this view, or of the previous view, is alive."""
        if worker in self._roster.exited:
            return Liveness.EXITED
        return Liveness.UNRESPONSIVE if self._roster.is_unresponsive(worker, now) else Liveness.RESPONSIVE

    def receive(self, heartbeat: Heartbeat, now: float) -> list[Decision]:
        """Process a heartbeat that arrived at `now`."""
        worker = heartbeat.worker
        if self.saved.status is ViewStatus.FINISHED:
            return []
        if heartbeat.finished:
            return [self._end(ViewStatus.FINISHED, f"{worker} has the result", now)]
        if worker in self._roster.exited:
            return []
        if self._is_overdue(worker, now):
            self._progress.disturb()
        kept = replace(heartbeat, unreachable=()) if heartbeat.unreachable else heartbeat
        before = self._roster.receive(kept, self.view.number, now)
        if before is None:
            return []
        # Only the latest view counts: a worker that was frozen cannot reach members of a past view, as they have left.
        ends_view = heartbeat.ended_view > before.ended_view
        if heartbeat.unreachable and ends_view and heartbeat.failed_view >= self.view.number:
            self._unreachable.report(worker, heartbeat.unreachable, now)
        if heartbeat.active_view == self.view.number:
            self._arriving.discard(worker)
        if heartbeat.version.view == self.view.number:
            self._progress.report(heartbeat.version, now, lambda: any(self._is_overdue(m, now) for m in self._members))
        if heartbeat.ended_view >= self.view.number:
            self._staying.discard(worker)
        unchanged = (before.active_view, before.ended_view, before.leaving) == (
            heartbeat.active_view, heartbeat.ended_view, heartbeat.leaving)  # fmt: skip
        return [] if unchanged and before.count else list(self._decide([worker], now))

    def worker_exited(self, worker: str, now: float) -> list[Decision]:
        """Process a launcher's report that the process of `worker` has exited."""
        self._roster.exited.add(worker)
        self._forget_workers(now)
        return list(self._decide([worker], now))

    def worker_running(self, worker: str, now: float) -> None:
        """Process a launcher's report that the process of `worker` is running or runnable. The worker is then not lost,
        even if its heartbeats are late."""
        if worker in self._roster.records:
            self._roster.records[worker].last_running = now

    def has_late_member(self, now: float) -> bool:
        """Whether a member's heartbeat is late, so that `worker_running` is useful.

        Takes time linear in the number of workers.
        """
        return any(worker in self._roster.records and self._roster.is_late(worker, now) for worker in self.view.members)

    def disconnected(self, worker: str, now: float) -> list[Decision]:
        """Process that the connection on which `worker` waited has closed, and that it waits on no other one.

        The worker's next heartbeat may still arrive, so no view ends because of this. But the next view does not wait
        for this worker.
        """
        if worker not in self._roster.records:
            return []
        self._roster.records[worker].disconnected = True
        return list(self._decide([], now))

    def tick(self, now: float) -> list[Decision]:
        """Process that time has passed. Takes time linear in the number of workers."""
        self._forget_workers(now)
        return list(self._decide(self.view.members if self.step_timeout.overdue(now) else [], now))

    def _decide(self, changed: Iterable[str], now: float) -> Iterator[Decision]:
        if self.saved.status in (ViewStatus.ACTIVE, ViewStatus.ENDING_AT_BOUNDARY):
            reason = self._abort_reason([worker for worker in changed if worker in self._members], now)
            if reason:
                yield self._end(ViewStatus.ABORTED, reason, now)
        if self.saved.status is ViewStatus.ACTIVE:
            reason = self._boundary_reason(now)
            if reason:
                yield self._end(ViewStatus.ENDING_AT_BOUNDARY, reason, now)
        if self.saved.status not in (ViewStatus.ACTIVE, ViewStatus.FINISHED):
            yield from self._next_view(now)

    def _abort_reason(self, members: Sequence[str], now: float) -> str:
        """Why the view cannot continue because of one of `members`; empty if it can."""
        stalled = self.step_timeout.overdue(now)
        for member in members:
            record = self._roster.records[member]
            if member in self._roster.exited:
                return f"the process of {member} has exited"
            ended = record.heartbeat.ended_view >= self.view.number
            failed = record.heartbeat.failed_view >= self.view.number
            if ended and (stalled or self.saved.status is ViewStatus.ACTIVE or failed):
                return f"{member} has lost the connection to other members"
            # All members take a step together: while steps continue, no member is lost, even if heartbeats are late.
            if stalled and self._roster.is_unresponsive(member, now):
                pause = self._roster.evict(member, len(self._members), now)
                reason = f"no heartbeat of {member} arrives, and no step is completed"
                return f"{reason}; once it is back, it is quarantined for {pause:g} s" if pause else reason
        return ""

    def _boundary_reason(self, now: float) -> str:
        """Why the view should end at the next boundary; empty if it should not."""
        leaving = self._roster.leaving & self._members
        if self._arriving or not (leaving or self._roster.free):
            return ""
        if leaving:  # if all members leave, they stop together without the coordinator
            names = join_names(member for member in self.view.members if member in leaving)
            return f"{names} leaves" if len(leaving) < len(self._members) else ""
        ready = [w for w in self._roster.ready_workers(now) if w not in self._members and w not in self._roster.leaving]
        joining = self._admissible(ready, now)
        ranked = self._ranked([*self.view.members, *joining], now)
        more = [worker for worker in ranked if worker not in self._members]
        return f"{join_names(more)} may join" if len(ranked) > len(self.view.members) else ""

    def _next_view(self, now: float) -> Iterator[Decision]:
        """Forms the next view, once all responsive members have ended this one and enough workers are ready."""
        policy = self.policy
        late = now - self._ended_at > policy.join_timeout_seconds
        minimum = policy.min_workers if self.view.number or late else policy.expected_workers
        wanted = max(policy.replica_size, minimum)
        if len(self._roster.free) < wanted and not self._roster.leaving:
            return
        if self._awaits_member(now):
            return
        ready = self._roster.ready_workers(now)
        staying = [worker for worker in ready if worker not in self._roster.leaving]
        if self.view.number and not staying:
            wanted = policy.replica_size  # all leave: their view stops and saves its state, even below the minimum
        admissible = self._admissible(staying, now)
        formed = self._form(self._ranked(admissible, now), ready, wanted, late)
        if (formed is None or formed.abandoned_views) and len(admissible) < len(staying):  # needs quarantined workers
            formed = self._form(self._ranked(staying, now), ready, wanted, late) or formed
        if formed is None or formed.abandoned_views:
            lacking = bool(self._unproven(staying, ready))
            if lacking or not staying:
                formed = self._form(self._with_leaving_replica(staying, ready, now), ready, wanted, late) or formed
            if formed is None and self._may_leave(ready, late or not lacking or not staying):
                yield self._end(ViewStatus.BELOW_MINIMUM, "workers that asked to leave may do so", self._ended_at)
        if formed is not None:
            self._start_view(formed.view, now)
            yield formed

    def _awaits_member(self, now: float) -> bool:
        """Whether a responsive member has not ended the view; the member that was found last is checked first."""
        if self._awaited not in self._staying or self._roster.is_unresponsive(self._awaited, now):
            responsive = (member for member in self._staying if not self._roster.is_unresponsive(member, now))
            self._awaited = next(responsive, "")
        return bool(self._awaited)

    def _form(
        self, members: Sequence[str], ready: Mapping[str, StateVersion], wanted: int, late: bool
    ) -> ViewFormed | None:
        """A view of `members`, if they are enough, and have all committed steps or may abandon those that they lack."""
        if len(members) < wanted:
            return None
        start, sources = newest_version({worker: ready[worker] for worker in members})
        missing = unproven_views(self.saved.lineage, start, ready)
        addresses = tuple(self._roster.records[worker].heartbeat.address for worker in members)
        view = View(self.view.number + 1, tuple(members), start, sources, addresses)
        if not missing:
            return ViewFormed(view)
        if not start.view:  # no member has trained in a view: a checkpoint has more steps
            view = View(view.number, view.members, addresses=addresses)
        if late or all(m in self._roster.exited or m in ready for old in missing for m in old.members):
            return ViewFormed(view, tuple(old.number for old in missing))
        return None

    def _with_leaving_replica(self, staying: Sequence[str], ready: Mapping[str, StateVersion], now: float) -> list[str]:
        """The next members, with a replica of leaving workers, which may have the state that the others lack.

        This replica stays for one more view. If all workers leave, all of them are the next members, to stop together.
        """
        leaving = {worker: version for worker, version in ready.items() if worker not in staying}
        if not leaving or not staying:
            return self._ranked(list(leaving), now)
        _, furthest = newest_version(leaving)
        replica = assign_ranks(self.view.members, furthest, self.policy.replica_size, self.policy.replica_size)
        candidates = [*self._ranked(staying, now), *replica]
        return self._ranked(candidates, now, len(candidates))

    def _admissible(self, workers: Iterable[str], now: float) -> list[str]:
        return [worker for worker in workers if not self._roster.is_quarantined(worker, now)]

    def _unproven(self, workers: Sequence[str], ready: Mapping[str, StateVersion]) -> list[View]:
        start = newest_version({worker: ready[worker] for worker in workers})[0] if workers else StateVersion()
        return unproven_views(self.saved.lineage, start, ready)

    def _may_leave(self, ready: Mapping[str, StateVersion], dispensable: bool) -> bool:
        below_minimum = self.saved.status is ViewStatus.BELOW_MINIMUM
        return dispensable and not below_minimum and not self._roster.leaving.isdisjoint(ready)

    def _ranked(self, workers: Sequence[str], now: float, maximum: int | None = None) -> list[str]:
        """A subset of `workers` that may form a view, in the order of their ranks."""
        ordered = assign_ranks(self.view.members, workers, 1, len(workers))
        reachable = mutually_reachable(ordered, self._unreachable.active_reports(now))
        maximum = maximum or self.policy.max_workers
        return assign_ranks(self.view.members, reachable, self.policy.replica_size, maximum, self.policy.micro_batches)

    def _end(self, status: ViewStatus, reason: str, now: float) -> ViewEnded:
        self.saved = SavedViews(self.saved.lineage, status)
        self._ended_at = now
        return ViewEnded(self.view.number, status, reason)

    def _start_view(self, view: View, now: float) -> None:
        lineage = [old for old in self.saved.lineage if old.number <= view.start.view]
        self.saved = SavedViews((*lineage, view)[-_LINEAGE:], ViewStatus.ACTIVE)
        self._record_changes(self._members, view, now)
        self._set_members(view)
        self._roster.start_view(view.number)
        self._progress.start_view(view, now)

    def _record_changes(self, before: frozenset[str], view: View, now: float) -> None:
        after = frozenset(view.members)
        for worker in after - before:
            self._roster.join(worker, now)
        for worker in before - after - self._roster.exited:
            if self._roster.is_unresponsive(worker, now):
                self._roster.evict(worker, len(before), now)

    def _set_members(self, view: View) -> None:
        self._members = frozenset(view.members)
        self._arriving, self._staying = set(view.members), set(view.members)

    def _is_overdue(self, worker: str, now: float) -> bool:
        """Whether the worker is a member whose next heartbeat is overdue."""
        return worker in self._members and self._roster.records[worker].timeout.overdue(now)

    def _forget_workers(self, now: float) -> None:
        """Forget workers that have exited and are in no view."""
        if len(self._roster.records) > len(self._members):
            past = self._roster.forget(self._members, now)
            if past:
                self._unreachable.forget(past)


def join_names(workers: Iterable[str]) -> str:
    """The first of the names `workers` as text, and the number of further names."""
    names = list(workers)
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
