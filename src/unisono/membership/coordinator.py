"""The coordinator's half of the protocol: which workers make up the next view.

    no view ──► gathering ──► formed ──► gathering ──► ...
                   ▲                         │  └── somebody has the result ──► over for ever
                   └── a member is lost (NOW), or somebody waits or leaves (AT_A_BOUNDARY)

It decides only who is present. It is never on the path of a step: members of a view go on without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from unisono.membership.choice import acquainted, best, seated, unproven
from unisono.membership.diagnosis import Presence
from unisono.membership.pulse import Pulse
from unisono.membership.values import Beat, Over, Policy, Standing, View, Word

_LINEAGE = 16  # views remembered; a worker that was away for longer cannot prove what was not committed


@dataclass(frozen=True)
class Formed:
    """A view is there.

    Args:
        given_up: the numbers of views some of whose steps may have been committed, and are not in the state that this
            one starts from: nobody who could tell was heard of in time.
    """

    view: View
    given_up: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ended:
    """The view of this number goes on only to the next boundary, or not at all; `why` in words."""

    view: int
    over: Over
    why: str


Happened = Formed | Ended


@dataclass(frozen=True)
class Saved:
    """What has to outlive the coordinator's process, and is to be on disk before anybody hears of it.

    Args:
        lineage: the latest views whose states follow from each other, the current one last.
        over: whether that goes on.
    """

    lineage: tuple[View, ...] = ()
    over: Over = Over.NOW


@dataclass
class _Heard:
    """A worker, as last heard."""

    beat: Beat
    pulse: Pulse


@dataclass
class _Quarrel:
    """Two workers that could not reach each other."""

    until: float
    seconds: float


@dataclass
class Coordinator:
    """Decides views. Every call is given the time, in seconds of a clock that does not jump; it changes what is
    `saved` or answered only then, and returns what happened.

    Args:
        policy: what the user decides.
        saved: of the process before this one.
        began: when this process did; who was a member is not overdue before it had time to be heard.
    """

    policy: Policy
    saved: Saved = field(default_factory=Saved)
    began: float = 0.0
    _heard: dict[str, _Heard] = field(default_factory=dict, init=False)
    _gone: set[str] = field(default_factory=set, init=False)
    _arriving: set[str] = field(init=False)  # members not known to work in the view yet
    _staying: set[str] = field(init=False)  # members not known to have ended it
    _quarrels: dict[tuple[str, str], _Quarrel] = field(default_factory=dict, init=False)
    _steps: Pulse = field(init=False)
    _furthest: tuple[int, int] = field(default=(0, 0), init=False)
    _ended_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._steps, self._ended_at = Pulse(1.0, last=self.began), self.began
        self._arriving, self._staying = set(self.view.members), set(self.view.members)
        for member in self.view.members:
            self._heard[member] = _Heard(Beat(member, 0), self._pulse(self.began))

    @property
    def view(self) -> View:
        """The latest."""
        return self.saved.lineage[-1] if self.saved.lineage else View()

    @property
    def word(self) -> Word:
        """What any worker is to know, in answer to a beat and whenever something happened."""
        return Word(self.view, self.saved.over)

    def heard(self) -> list[tuple[Beat, float]]:
        """Every worker's last beat, and when it came."""
        return [(known.beat, known.pulse.last or self.began) for known in self._heard.values()]

    @property
    def steps(self) -> Pulse:
        """Of the present view."""
        return self._steps

    @property
    def furthest(self) -> int:
        """Steps that somebody has done."""
        return self._furthest[1]

    @property
    def lost(self) -> bool:
        """Whether the process of a member has ended."""
        return not self._gone.isdisjoint(self.view.members)

    def presence(self, worker: str, now: float) -> Presence:
        """Whether that member of the view is there."""
        if worker in self._gone:
            return Presence.GONE
        return Presence.SILENT if self._silent(worker, now) else Presence.HEARD

    def hear(self, beat: Beat, now: float) -> list[Happened]:
        """A worker said `beat`."""
        if beat.worker in self._gone or self.saved.over is Over.FOR_EVER:
            return []
        if beat.finished:
            return [self._end(Over.FOR_EVER, f"{beat.worker} has the result", now)]
        known = self._heard.setdefault(beat.worker, _Heard(Beat(beat.worker, 0), self._pulse(now)))
        if beat.count <= known.beat.count:
            return []
        before, known.beat = known.beat, beat
        known.pulse.beat(now)
        if beat.missed and beat.ended > before.ended:
            self._note_quarrels(beat, now)
        if beat.works_in == self.view.number:
            self._arriving.discard(beat.worker)
            self._note_progress(beat.standing, now)
        if beat.ended >= self.view.number:
            self._staying.discard(beat.worker)
        told = (before.works_in, before.ended, before.leaving) == (beat.works_in, beat.ended, beat.leaving)
        return [] if told and before.count else list(self._decide([beat.worker], now))

    def gone(self, worker: str, now: float) -> list[Happened]:
        """The process of `worker` has ended, as who started it has seen."""
        self._gone.add(worker)
        return self.tick(now)

    def tick(self, now: float) -> list[Happened]:
        """Time has passed."""
        self._forget()
        return list(self._decide(self.view.members, now))

    def _decide(self, about: Sequence[str], now: float) -> Iterator[Happened]:
        if self.saved.over is Over.FOR_EVER:
            return
        if self.saved.over is not Over.NOW:
            why = self._loss([worker for worker in about if worker in self.view.members], now)
            if why:
                yield self._end(Over.NOW, why, now)
        if self.saved.over is Over.NO:
            why = self._wish(now)
            if why:
                yield self._end(Over.AT_A_BOUNDARY, why, now)
        if self.saved.over is not Over.NO:
            formed = self._next(now)
            if formed is not None:
                self._take(formed.view, now)
                yield formed

    def _loss(self, members: Sequence[str], now: float) -> str:
        """Why, for one of `members`, the view cannot go on."""
        for member in members:
            known = self._heard[member]
            if member in self._gone:
                return f"{member} has ended"
            ended, stuck = known.beat.ended >= self.view.number, self._steps.overdue(now)
            if ended and (stuck or self.saved.over is Over.NO):
                return f"{member} has lost the others"
            # Steps are all members' together: as long as they come, nobody is missing, whoever cannot be heard here.
            if stuck and self._silent(member, now):
                return f"nothing is heard of {member}, and no step is done"
        return ""

    def _wish(self, now: float) -> str:
        """Why the view should not go on for ever."""
        if self._arriving:
            return ""
        for member in self.view.members:
            if self._heard[member].beat.leaving:
                return f"{member} leaves"
        seats = self._seats([*self.view.members, *(w for w in self._ready(now) if w not in self.view.members)], now)
        more = [worker for worker in seats if worker not in self.view.members]
        return f"{', '.join(more)} may join" if len(seats) > len(self.view.members) else ""

    def _next(self, now: float) -> Formed | None:
        """The view after this one, once all that can be heard of it have ended it, and those that are needed are
        there."""
        if not all(self._silent(member, now) for member in self._staying):
            return None
        ready = self._ready(now)
        late = now - self._ended_at > self.policy.patience_seconds
        wanted = self.policy.minimum if self.view.number or late else self.policy.expected
        last_resort: Formed | None = None
        # Whoever leaves may have what the others lack, and then stays for one view more.
        for asked in ([w for w in ready if not self._heard[w].beat.leaving], list(ready)):
            seats = self._seats(asked, now)
            if len(seats) < max(wanted, self.policy.unit):
                continue
            start, sources = best({worker: ready[worker] for worker in seats})
            missing = unproven(self.saved.lineage, start, ready)
            places = tuple(self._heard[worker].beat.place for worker in seats)
            view = View(self.view.number + 1, tuple(seats), start, sources, places)
            if not missing:
                return Formed(view)
            if not start.view:  # none of them has ever trained: what was kept is more
                view = View(view.number, view.members, places=places)
            if late or all(m in self._gone or m in ready for old in missing for m in old.members):
                last_resort = Formed(view, tuple(old.number for old in missing))
        return last_resort

    def _silent(self, worker: str, now: float) -> bool:
        return worker in self._gone or self._heard[worker].pulse.overdue(now)

    def _ready(self, now: float) -> dict[str, Standing]:
        """How those stand that can be heard and are in no view, nor ever in this one again."""
        return {
            worker: known.beat.standing for worker, known in self._heard.items()
            if known.beat.count and known.beat.ended >= self.view.number and not self._silent(worker, now)
        }  # fmt: skip

    def _seats(self, workers: list[str], now: float) -> list[str]:
        ordered = seated(self.view.members, workers, 1, len(workers))
        apart = [pair for pair, quarrel in self._quarrels.items() if now < quarrel.until]
        return seated(self.view.members, acquainted(ordered, apart), self.policy.unit, self.policy.maximum)

    def _end(self, over: Over, why: str, now: float) -> Ended:
        self.saved = Saved(self.saved.lineage, over)
        self._ended_at = now
        return Ended(self.view.number, over, why)

    def _take(self, view: View, now: float) -> None:
        lineage = [old for old in self.saved.lineage if old.number <= view.start.view]
        self.saved = Saved((*lineage, view)[-_LINEAGE:], Over.NO)
        self._arriving, self._staying = set(view.members), set(view.members)
        self._furthest = (view.number, view.start.step)
        self._steps.restart(now)

    def _note_progress(self, standing: Standing, now: float) -> None:
        if (standing.view, standing.step) > self._furthest:
            self._furthest = (standing.view, standing.step)
            self._steps.beat(now)

    def _note_quarrels(self, beat: Beat, now: float) -> None:
        for other in beat.missed:
            pair = (min(beat.worker, other), max(beat.worker, other))
            known = self._quarrels.setdefault(pair, _Quarrel(now, self.policy.estranged_seconds / 2))
            if now >= known.until:
                known.seconds *= 2
                known.until = now + known.seconds

    def _forget(self) -> None:
        """Workers that have ended, and are in no view any more."""
        past = [w for w in self._gone if w in self._heard and w not in self.view.members]
        for worker in past:
            del self._heard[worker]
        if past:
            self._quarrels = {pair: q for pair, q in self._quarrels.items() if not set(pair) & set(past)}

    def _pulse(self, now: float) -> Pulse:
        return Pulse(self.policy.beat_seconds, 3 * self.policy.beat_seconds, last=now)
