"""What workers say of themselves beside the protocol, what that says of a step that takes too long, and who heard it.

Nothing here decides anything, nor outlives the coordinator's process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.membership.coordinator import Coordinator
from unisono.membership.protocol import View, ViewStatus
from unisono.observe.activity import Activity, Phase
from unisono.observe.stall_diagnosis import Liveness, MemberStatus, Stall, diagnose

HELD_UP_SECONDS = 1.0  # beyond a step's deadline, from when it is said that workers wait for others
TOGETHER_SECONDS = 1.5  # the same, where all take longer alike
_BY_CHANCE = {Phase.START: 10.0, Phase.EVALUATION: 5.0, Phase.CHECKPOINT: 5.0, Phase.RECOVERY: 5.0}
"""How long a worker may be in a phase that is no part of a step, in seconds, before it is known how long it takes."""
_REMEMBERED = 64  # sentences


@dataclass
class Reports:
    """The latest of each worker.

    Args:
        began_number: of the first sentence; later processes of the coordinator begin with higher ones.
    """

    began_number: int = 1
    doings: dict[str, tuple[Activity, float]] = field(default_factory=dict)  # and when they came
    spent: dict[str, Mapping[str, float]] = field(default_factory=dict)
    _longest: dict[Phase, float] = field(default_factory=dict)
    _said: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _number: int = field(init=False)
    _lost: set[tuple[int, str]] = field(default_factory=set)
    _held: set[str] = field(default_factory=set)  # workers that were silent in the phase that they are in
    _left_behind: dict[tuple[int, str], tuple[MemberStatus, float]] = field(default_factory=dict)  # and when
    _about: tuple[int, int] = (0, 0)  # the view and the step that was last spoken about
    _again_at: float = 0.0
    _back_at: float = float("-inf")  # when somebody last came back from what is no part of a step

    def __post_init__(self) -> None:
        self._number = self.began_number

    @property
    def latest(self) -> int:
        """The number of the latest sentence."""
        return self._number

    @property
    def sentences(self) -> list[str]:
        """The latest."""
        return [words for _, words in self._said]

    def after(self, number: int) -> list[str]:
        """The sentences after the one of that `number`, for whoever has heard any before."""
        return [words for each, words in self._said if each > number] if number else []

    def hear(self, worker: str, doing: Activity | None, spent: Mapping[str, float] | None, now: float) -> None:
        """A worker said what it does, and where its time went."""
        if doing is not None:
            before, _ = self.doings.get(worker, (doing, now))
            if before.phase is not doing.phase:
                if worker not in self._held:  # how long a worker was frozen says nothing about the phase
                    self._longest[before.phase] = max(self._longest.get(before.phase, 0.0), before.since_seconds)
                self._held.discard(worker)
                if before.phase in _BY_CHANCE:
                    self._back_at = now
            self.doings[worker] = doing, now
        if spent is not None:
            self.spent[worker] = spent

    def formed(self, before: View, coordinator: Coordinator, now: float) -> None:
        """The view after `before` is there. Who is missing in it unasked may be lost: others may notice that, and go
        on, before anybody has said here that its process has ended."""
        for worker in set(before.members).difference(coordinator.view.members):
            seen = self._seen(worker, coordinator, now)
            if seen.presence is not Liveness.HEARD and not coordinator.leaves(worker):
                self._held.add(worker)
                self._left_behind[before.number, worker] = seen, now

    def look(self, coordinator: Coordinator, now: float) -> list[str]:
        """What is to be said now. Takes time with the number of workers, if something is wrong."""
        found = self._past_losses(coordinator, now) + self._losses(coordinator, now)
        if coordinator.saved.over in (ViewStatus.NO, ViewStatus.AT_A_BOUNDARY):
            found += self._delays(coordinator, now)
        for words in found:
            self._number += 1
            self._said.append((self._number, words))
        return found

    def _past_losses(self, coordinator: Coordinator, now: float) -> list[str]:
        """Those who were left behind, once it is known how they ended, or nobody has said so for a while."""
        told = []
        for (view, worker), (seen, since) in list(self._left_behind.items()):
            presence = coordinator.presence(worker, now)
            if presence is not Liveness.GONE and now - since < HELD_UP_SECONDS:
                continue
            del self._left_behind[view, worker]
            if (view, worker) not in self._lost:
                self._lost.add((view, worker))
                back = presence is Liveness.HEARD
                told.append(seen if back else self._seen(worker, coordinator, now))
        return [finding.words for finding in diagnose(self._stuck(coordinator, now), told)] if told else []

    def _losses(self, coordinator: Coordinator, now: float) -> list[str]:
        """Members that are not there any more, each once."""
        view = coordinator.view
        if coordinator.saved.over is ViewStatus.FOR_EVER or not (
            coordinator.lost or coordinator.saved.over is ViewStatus.NOW
        ):
            return []
        away = [seen for seen in self.members(coordinator, now) if seen.presence is not Liveness.HEARD]
        new = [seen for seen in away if (view.number, seen.worker) not in self._lost]
        self._lost |= {(view.number, seen.worker) for seen in new}
        return [finding.words for finding in diagnose(self._stuck(coordinator, now), new)] if new else []

    def _delays(self, coordinator: Coordinator, now: float) -> list[str]:
        """Members for whom a step waits, each time that has become twice as long."""
        stuck, about = self._stuck(coordinator, now), (coordinator.view.number, coordinator.furthest)
        if about != self._about:
            self._about, self._again_at = about, 0.0
        late = stuck.seconds - coordinator.steps.deadline_seconds
        if late < HELD_UP_SECONDS or now < self._again_at or not coordinator.view.members:
            return []
        members = self.members(coordinator, now)
        absent = [seen for seen in members if not seen.arrived]
        if len(absent) == len(members) and late < TOGETHER_SECONDS:
            return []
        if absent and all(self._may_be_away(seen, coordinator) for seen in absent):
            return []
        self._again_at = now + stuck.seconds
        return [finding.words for finding in diagnose(stuck, members)]

    def _may_be_away(self, seen: MemberStatus, coordinator: Coordinator) -> bool:
        """It does what is no part of a step, for no longer than that takes."""
        phase = seen.doing.phase
        if coordinator.furthest == coordinator.view.start.step and phase in (Phase.COMPUTE, Phase.DATA):
            phase = Phase.START  # what is done once is done in the first step
        usual = max(2 * self._longest.get(phase, 0.0), _BY_CHANCE.get(phase, 0.0)) if phase in _BY_CHANCE else 0.0
        return seen.presence is Liveness.HEARD and seen.doing.since_seconds + seen.silent_seconds < usual

    def members(self, coordinator: Coordinator, now: float) -> list[MemberStatus]:
        """All of the latest view, as last heard."""
        return [self._seen(worker, coordinator, now) for worker in coordinator.view.members]

    def _seen(self, worker: str, coordinator: Coordinator, now: float) -> MemberStatus:
        doing, at = self.doings.get(worker, (Activity(), coordinator.began))
        return MemberStatus(worker, coordinator.presence(worker, now), max(0.0, now - at), doing)

    def _stuck(self, coordinator: Coordinator, now: float) -> Stall:
        steps = coordinator.steps
        began = now if steps.last is None else max(steps.last, self._back_at)
        return Stall(coordinator.furthest, now - began, steps.usual_seconds)
