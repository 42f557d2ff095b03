"""What workers report about their activity, and findings about a step that takes too long.

Nothing here decides anything, or survives the coordinator's process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from unisono.membership.coordinator import Coordinator
from unisono.membership.protocol import View, ViewStatus
from unisono.observe.activity import Activity, Phase
from unisono.observe.stall_diagnosis import Liveness, MemberStatus, Stall, diagnose

STALL_SECONDS = 1.0  # from a step's deadline until a finding says which workers the others wait for
COMMON_STALL_SECONDS = 1.5  # the same time, if all workers are late
_USUAL_SECONDS = {Phase.START: 10.0, Phase.EVALUATION: 5.0, Phase.CHECKPOINT: 5.0, Phase.RECOVERY: 5.0}
"""How long a worker may spend in a phase that is no part of a step, before its usual time is known."""
_REMEMBERED = 64  # findings


class StallReports:
    """Keeps the latest report of each worker, and makes findings about stalls from these reports.

    Args:
        first_number: the first finding gets the number ``first_number + 1``. Each later process of the coordinator must
            pass a higher number, so that a number stands for one finding.

    Attributes:
        activities: for each worker, the activity that it reported last, and when this report arrived.
        spent: for each worker, the seconds that it has spent in each phase.
    """

    def __init__(self, first_number: int = 1) -> None:
        self.activities: dict[str, tuple[Activity, float]] = {}
        self.spent: dict[str, Mapping[str, float]] = {}
        self._longest: dict[Phase, float] = {}
        self._number = first_number
        self._findings: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._reported: set[tuple[int, str]] = set()  # (view, lost worker)
        self._frozen: set[str] = set()  # workers that were unresponsive in their current phase
        # By (view, member that the next view lacks): the member's status, and since when it is missing.
        self._missing: dict[tuple[int, str], tuple[MemberStatus, float]] = {}
        self._stalled_at = (0, 0)  # the view and step to which `_again_at` belongs
        self._again_at = 0.0
        self._resumed_at = float("-inf")  # when a worker last came back from a phase that is no part of a step

    @property
    def latest(self) -> int:
        """The number of the latest finding."""
        return self._number

    @property
    def findings(self) -> list[str]:
        """The latest findings."""
        return [text for _, text in self._findings]

    def after(self, number: int) -> list[str]:
        """Findings after the one with this `number`; none if `number` is 0, because the worker is new."""
        return [text for each, text in self._findings if each > number] if number else []

    def receive(self, worker: str, activity: Activity | None, spent: Mapping[str, float] | None, now: float) -> None:
        """Process a worker's report of what it does, and of the time that it has spent in each phase."""
        if activity is not None:
            before, _ = self.activities.get(worker, (activity, now))
            if before.phase is not activity.phase:
                if worker not in self._frozen:  # the time that a worker was frozen does not belong to the phase
                    self._longest[before.phase] = max(self._longest.get(before.phase, 0.0), before.since_seconds)
                self._frozen.discard(worker)
                if before.phase in _USUAL_SECONDS:
                    self._resumed_at = now
            self.activities[worker] = activity, now
        if spent is not None:
            self.spent[worker] = spent

    def view_formed(self, before: View, coordinator: Coordinator, now: float) -> None:
        """Process that the view after `before` is formed.

        A member of `before` that the new view lacks, although it did not leave, may be lost: others can form a view
        before the launcher reports that the member's process has exited.
        """
        for worker in set(before.members).difference(coordinator.view.members):
            member = self._status(worker, coordinator, now)
            if member.liveness is not Liveness.RESPONSIVE and not coordinator.is_leaving(worker):
                self._frozen.add(worker)
                self._missing[before.number, worker] = member, now

    def check(self, coordinator: Coordinator, now: float) -> list[str]:
        """Make new findings, and return them. Takes time linear in the number of workers, if there is a stall."""
        findings = self._past_losses(coordinator, now) + self._losses(coordinator, now)
        if coordinator.saved.status in (ViewStatus.ACTIVE, ViewStatus.ENDING_AT_BOUNDARY):
            findings += self._delays(coordinator, now)
        for text in findings:
            self._number += 1
            self._findings.append((self._number, text))
        return findings

    def _past_losses(self, coordinator: Coordinator, now: float) -> list[str]:
        """Findings about workers that a later view lacks.

        They are made once the launcher has reported that the worker's process has exited, or after `STALL_SECONDS`.
        """
        lost = []
        for (view, worker), (member, since) in list(self._missing.items()):
            liveness = coordinator.liveness(worker, now)
            if liveness is not Liveness.EXITED and now - since < STALL_SECONDS:
                continue
            del self._missing[view, worker]
            if (view, worker) not in self._reported:
                self._reported.add((view, worker))
                lost.append(member if liveness is Liveness.RESPONSIVE else self._status(worker, coordinator, now))
        return [finding.text for finding in diagnose(self._stall(coordinator, now), lost)] if lost else []

    def _losses(self, coordinator: Coordinator, now: float) -> list[str]:
        """Findings about members that are lost; each member is reported once."""
        view, status = coordinator.view, coordinator.saved.status
        if status is ViewStatus.FINISHED or not (coordinator.has_lost_member or status is ViewStatus.ABORTED):
            return []
        lost = [each for each in self._members(coordinator, now) if each.liveness is not Liveness.RESPONSIVE]
        new = [each for each in lost if (view.number, each.worker) not in self._reported]
        self._reported |= {(view.number, each.worker) for each in new}
        return [finding.text for finding in diagnose(self._stall(coordinator, now), new)] if new else []

    def _delays(self, coordinator: Coordinator, now: float) -> list[str]:
        """Findings about members that a step waits for, made again each time that the wait has doubled."""
        stall, step = self._stall(coordinator, now), (coordinator.view.number, coordinator.furthest_step)
        if step != self._stalled_at:
            self._stalled_at, self._again_at = step, 0.0
        late = stall.seconds - coordinator.step_timeout.deadline_seconds
        if late < STALL_SECONDS or now < self._again_at or not coordinator.view.members:
            return []
        members = self._members(coordinator, now)
        absent = [each for each in members if not each.arrived]
        if len(absent) == len(members) and late < COMMON_STALL_SECONDS:
            return []
        if absent and all(self._is_usual(each, coordinator) for each in absent):
            return []
        self._again_at = now + stall.seconds
        return [finding.text for finding in diagnose(stall, members)]

    def _is_usual(self, member: MemberStatus, coordinator: Coordinator) -> bool:
        """Whether the member is in a phase that is no part of a step, for no longer than usual."""
        phase = member.activity.phase
        if coordinator.furthest_step == coordinator.view.start.step and phase in (Phase.COMPUTE, Phase.DATA):
            phase = Phase.START  # the first step includes work that is done once
        usual = max(2 * self._longest.get(phase, 0.0), _USUAL_SECONDS[phase]) if phase in _USUAL_SECONDS else 0.0
        responsive = member.liveness is Liveness.RESPONSIVE
        return responsive and member.activity.since_seconds + member.age_seconds < usual

    def _members(self, coordinator: Coordinator, now: float) -> list[MemberStatus]:
        return [self._status(worker, coordinator, now) for worker in coordinator.view.members]

    def _status(self, worker: str, coordinator: Coordinator, now: float) -> MemberStatus:
        activity, at = self.activities.get(worker, (Activity(Phase.START), coordinator.started_at))
        return MemberStatus(worker, coordinator.liveness(worker, now), max(0.0, now - at), activity)

    def _stall(self, coordinator: Coordinator, now: float) -> Stall:
        timeout = coordinator.step_timeout
        began = now if timeout.last is None else max(timeout.last, self._resumed_at)
        return Stall(coordinator.furthest_step, now - began, timeout.usual_seconds)
