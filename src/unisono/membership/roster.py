"""What each worker said last, and when: who is here, as far as the coordinator can tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from unisono.membership.protocol import Heartbeat, Policy, StateVersion
from unisono.membership.readmission import Readmission
from unisono.observe.adaptive_timeout import AdaptiveTimeout


@dataclass
class Heard:
    """A worker, as last heard.

    Args:
        hung_up: the connection that it listened on has closed, and nothing was heard of it since.
        readmission: when it may join again after an eviction.
        missed: it was evicted for its silence, and has not been heard since.
        ran: when its process was seen last to want a processor.
    """

    beat: Heartbeat
    pulse: AdaptiveTimeout
    readmission: Readmission
    hung_up: bool = False
    missed: bool = False
    ran: float = float("-inf")


@dataclass
class Roster:
    """All workers. Nothing here takes time with their number, except what says so."""

    policy: Policy
    heard: dict[str, Heard] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    free: set[str] = field(default_factory=set)  # have ended the view, or were never in it

    @property
    def beat_seconds(self) -> float:
        """Between a worker's beats."""
        return max(self.policy.beat_seconds, len(self.heard) / self.policy.beats_per_second)

    @property
    def _least_seconds(self) -> float:
        """The shortest silence that says something."""
        return max(self.policy.silence_seconds, _BEATS * self.beat_seconds)

    def expect(self, worker: str, now: float) -> Heard:
        """That it is there is known from elsewhere."""
        known = self.heard.get(worker)
        if known is None:
            known = self.heard[worker] = Heard(Heartbeat(worker, 0), self._pulse(now), Readmission(now))
        return known

    def hear(self, beat: Heartbeat, view: int, now: float) -> Heartbeat | None:
        """The worker's beat before this one; None if this one is older. `view` is the latest one's number."""
        known = self.expect(beat.worker, now)
        if beat.count <= known.beat.count:
            return None
        before, known.beat = known.beat, beat
        if known.missed:
            known.readmission.come_back(now)
        known.hung_up = known.missed = False
        known.pulse.least_seconds = self._least_seconds
        known.pulse.beat(now)
        if beat.leaving:
            self.leaving.add(beat.worker)
        if beat.ended >= view:
            self.free.add(beat.worker)
        return before

    def formed(self, view: int) -> None:
        """There is a later view, of this number. Takes time with the number of workers."""
        self.free = {worker for worker in self.free if self.heard[worker].beat.ended >= view}

    def join(self, worker: str, now: float) -> None:
        """`worker` joins a view."""
        self.heard[worker].readmission.join(now)

    def evict(self, worker: str, members: int, now: float) -> float:
        """`worker` is silent, and a view of so many members ended for that, or is followed by one without it. Returns
        the seconds that it has to pause once it is back."""
        known = self.heard[worker]
        if not known.missed:
            known.missed = True
            known.readmission.evict(members, now)
        return known.readmission.pause_seconds

    def pauses(self, worker: str, now: float) -> bool:
        """Whether `worker` may not join yet, because it was evicted lately."""
        return self.heard[worker].readmission.pauses(now)

    def silent(self, worker: str, now: float) -> bool:
        """Whether nothing can be heard of it: it has ended, its connection has, or its next beat is overdue."""
        if worker in self.gone:
            return True
        known = self.heard[worker]
        return known.hung_up or (known.pulse.overdue(now) and now - known.ran > _RAN_BEATS * self.beat_seconds)

    def quiet(self, worker: str, now: float) -> bool:
        """Whether it is late, if not so late as to be `silent`, and has not ended."""
        known = self.heard[worker]
        last = max(known.pulse.last or now, known.ran)
        return worker not in self.gone and now - last > _QUIET * known.pulse.deadline_seconds

    def ready(self, now: float) -> dict[str, StateVersion]:
        """How those stand that can be heard and are free, in the order in which they were heard of. Takes time with
        the number of workers."""
        return {
            worker: known.beat.standing
            for worker, known in self.heard.items()
            if worker in self.free and not self.silent(worker, now)
        }

    def forget(self, kept: frozenset[str], now: float) -> list[str]:
        """Who has ended, or was not heard of for long, and is not `kept`. Takes time with the number of workers."""
        longest = self.policy.patience_seconds + self._least_seconds
        past = [
            worker for worker, known in self.heard.items()
            if worker not in kept and (worker in self.gone or now - (known.pulse.last or now) > longest)
        ]  # fmt: skip
        self.drop(past)
        return past

    def drop(self, workers: Iterable[str]) -> None:
        """Nothing is known of them."""
        for worker in workers:
            del self.heard[worker]
            self.leaving.discard(worker)
            self.free.discard(worker)

    def _pulse(self, now: float) -> AdaptiveTimeout:
        return AdaptiveTimeout(self.beat_seconds, self._least_seconds, last=now)


_QUIET = 0.4  # of the silence that says that it is lost; more than a beat, and who is asked still has time to answer
_RAN_BEATS = 2  # for which it counts that its process was seen to want a processor
_BEATS = 3  # that may fail to come before a worker is taken for silent
