"""The coordinator's half of the protocol: which workers make up the next view.

    no view ──► gathering ──► formed ──► gathering ──► ...
                   ▲                         │  └── somebody has the result ──► over for ever
                   └── a member is lost (NOW), or somebody waits or leaves (AT_A_BOUNDARY)

It decides only who is present. It is never on the path of a step: members of a view go on without it. What it does for
a beat with which nothing changes takes no time with the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unisono.membership.protocol import Heartbeat, Policy, StateVersion, StepCount, View, ViewStatus, ViewUpdate
from unisono.membership.roster import Roster
from unisono.membership.selection import acquainted, best, seated, unproven
from unisono.membership.unreachable_pairs import UnreachablePairs
from unisono.observe.adaptive_timeout import AdaptiveTimeout
from unisono.observe.stall_diagnosis import Liveness

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
    over: ViewStatus
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
    over: ViewStatus = ViewStatus.NOW


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
    _roll: Roster = field(init=False)
    _quarrels: UnreachablePairs = field(init=False)
    _members: frozenset[str] = field(init=False)
    _arriving: set[str] = field(init=False)  # members not known to work in the view yet
    _staying: set[str] = field(init=False)  # members not known to have ended it
    _waited_for: str = field(default="", init=False)  # one of these, who can be heard
    _steps: AdaptiveTimeout = field(init=False)
    _begun: bool = field(default=False, init=False)  # a step was done in the view
    _held_up: bool = field(default=False, init=False)  # the step in hand, by a member of which nothing was heard
    _furthest: tuple[int, int] = field(default=(0, 0), init=False)
    _known: bool = field(default=False, init=False)  # with how many steps the view began
    _taken: int = field(default=0, init=False)
    _ended_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._roll, self._quarrels = Roster(self.policy), UnreachablePairs(self.policy.estranged_seconds)
        self._steps, self._ended_at = AdaptiveTimeout(1.0, last=self.began, guessed=True), self.began
        self._seat(self.view)
        for member in self.view.members:
            self._roll.expect(member, self.began)

    @property
    def view(self) -> View:
        """The latest."""
        return self.saved.lineage[-1] if self.saved.lineage else View()

    @property
    def word(self) -> ViewUpdate:
        """What any worker is to know, in answer to a beat and whenever something happened."""
        return ViewUpdate(self.view, self.saved.over)

    @property
    def beat_seconds(self) -> float:
        """After which a worker's next beat is due: the more workers, the later."""
        return self._roll.beat_seconds

    def heard(self) -> list[tuple[Heartbeat, float]]:
        """Every worker's last beat, and when it came."""
        return [(known.beat, known.pulse.last or self.began) for known in self._roll.heard.values()]

    @property
    def steps(self) -> AdaptiveTimeout:
        """Of the present view."""
        return self._steps

    @property
    def furthest(self) -> int:
        """Steps that somebody has done."""
        return self._furthest[1]

    @property
    def step_count(self) -> StepCount:
        """As far as members have said."""
        return StepCount(self._taken, self.furthest)

    @property
    def lost(self) -> bool:
        """Whether the process of a member has ended."""
        return not self._roll.gone.isdisjoint(self._members)

    def leaves(self, worker: str) -> bool:
        """Whether it has said so."""
        return worker in self._roll.leaving

    def presence(self, worker: str, now: float) -> Liveness:
        """Whether that member of this view, or of the one before, is there."""
        if worker in self._roll.gone:
            return Liveness.GONE
        return Liveness.SILENT if self._roll.silent(worker, now) else Liveness.HEARD

    def hear(self, beat: Heartbeat, now: float) -> list[Happened]:
        """A worker said `beat`."""
        if self.saved.over is ViewStatus.FOR_EVER:
            return []
        if beat.finished:
            return [self._end(ViewStatus.FOR_EVER, f"{beat.worker} has the result", now)]
        if beat.worker in self._roll.gone:
            return []
        self._held_up = self._held_up or self._overdue(beat.worker, now)
        before = self._roll.hear(replace(beat, missed=()) if beat.missed else beat, self.view.number, now)
        if before is None:
            return []
        # Of a view that is past, a worker that was frozen missed the others because they had gone on.
        if beat.missed and beat.ended > before.ended and beat.broke >= self.view.number:
            self._quarrels.note(beat.worker, beat.missed, now)
        if beat.works_in == self.view.number:
            self._arriving.discard(beat.worker)
        if beat.standing.view == self.view.number:
            self._note_progress(beat.standing, now)
        if beat.ended >= self.view.number:
            self._staying.discard(beat.worker)
        told = (before.works_in, before.ended, before.leaving) == (beat.works_in, beat.ended, beat.leaving)
        return [] if told and before.count else list(self._decide([beat.worker], now))

    def gone(self, worker: str, now: float) -> list[Happened]:
        """The process of `worker` has ended, as who started it has seen."""
        self._roll.gone.add(worker)
        self._forget(now)
        return list(self._decide([worker], now))

    def running(self, worker: str, now: float) -> None:
        """Who started `worker` sees that its process computes, or would if there was a processor for it: so it is not
        lost, though nothing be heard of it."""
        if worker in self._roll.heard:
            self._roll.heard[worker].ran = now

    def doubtful(self, now: float) -> bool:
        """Whether a member is late, so that `running` is of use. Takes time with the number of workers."""
        return any(worker in self._roll.heard and self._roll.quiet(worker, now) for worker in self.view.members)

    def hung_up(self, worker: str, now: float) -> list[Happened]:
        """The connection on which `worker` listened has closed, and it has made no other since.

        It may be back with its next beat: no view ends for this. But one that has ended does not wait for it.
        """
        if worker not in self._roll.heard:
            return []
        self._roll.heard[worker].hung_up = True
        return list(self._decide([], now))

    def tick(self, now: float) -> list[Happened]:
        """Time has passed. Takes time with the number of workers."""
        self._forget(now)
        return list(self._decide(self.view.members if self._steps.overdue(now) else [], now))

    def _decide(self, about: Iterable[str], now: float) -> Iterator[Happened]:
        if self.saved.over in (ViewStatus.NO, ViewStatus.AT_A_BOUNDARY):
            why = self._loss([worker for worker in about if worker in self._members], now)
            if why:
                yield self._end(ViewStatus.NOW, why, now)
        if self.saved.over is ViewStatus.NO:
            why = self._wish(now)
            if why:
                yield self._end(ViewStatus.AT_A_BOUNDARY, why, now)
        if self.saved.over not in (ViewStatus.NO, ViewStatus.FOR_EVER):
            yield from self._next(now)

    def _loss(self, members: Sequence[str], now: float) -> str:
        """Why, for one of `members`, the view cannot go on."""
        stuck = self._steps.overdue(now)
        for member in members:
            known = self._roll.heard[member]
            if member in self._roll.gone:
                return f"{member} has ended"
            ended = known.beat.ended >= self.view.number
            if ended and (stuck or self.saved.over is ViewStatus.NO or known.beat.broke >= self.view.number):
                return f"{member} has lost the others"
            # Steps are all members' together: as long as they come, nobody is missing, whoever cannot be heard here.
            if stuck and self._roll.silent(member, now):
                pause = self._roll.evict(member, len(self._members), now)
                why = f"nothing is heard of {member}, and no step is done"
                return f"{why}; once it is back, it pauses for {pause:g} s" if pause else why
        return ""

    def _wish(self, now: float) -> str:
        """Why the view should not go on for ever."""
        leaving = self._roll.leaving & self._members
        if self._arriving or not (leaving or self._roll.free):
            return ""
        if leaving:  # where all do, the group stops by itself, as one
            who = named(member for member in self.view.members if member in leaving)
            return f"{who} leaves" if len(leaving) < len(self._members) else ""
        ready = [w for w in self._roll.ready(now) if w not in self._members and w not in self._roll.leaving]
        coming = self._unpaused(ready, now)
        seats = self._seats([*self.view.members, *coming], now)
        more = [worker for worker in seats if worker not in self._members]
        return f"{named(more)} may join" if len(seats) > len(self.view.members) else ""

    def _next(self, now: float) -> Iterator[Happened]:
        """The view after this one, once all that can be heard of it have ended it, and those that are needed are
        there."""
        late = now - self._ended_at > self.policy.patience_seconds
        wanted = max(self.policy.unit, self.policy.minimum if self.view.number or late else self.policy.expected)
        if len(self._roll.free) < wanted and not self._roll.leaving:
            return
        if self._waits(now):
            return
        ready = self._roll.ready(now)
        staying = [worker for worker in ready if worker not in self._roll.leaving]
        if self.view.number and not staying:
            wanted = self.policy.unit  # all leave: a view of them, however few, stops and saves its state
        unpaused = self._unpaused(staying, now)
        formed = self._formed(self._seats(unpaused, now), ready, wanted, late)
        if (formed is None or formed.given_up) and len(unpaused) < len(staying):  # the others are needed
            formed = self._formed(self._seats(staying, now), ready, wanted, late) or formed
        if formed is None or formed.given_up:
            lacking = bool(self._unproven(staying, ready))
            if lacking or not staying:
                formed = self._formed(self._handing_over(staying, ready, now), ready, wanted, late) or formed
            if formed is None and self._may_go(ready, late or not lacking or not staying):
                yield self._end(ViewStatus.WITH_TOO_FEW, "who leaves may go", self._ended_at)
        if formed is not None:
            self._take(formed.view, now)
            yield formed

    def _waits(self, now: float) -> bool:
        """Whether somebody who can be heard has not ended the view: mostly whoever it was the last time."""
        if self._waited_for not in self._staying or self._roll.silent(self._waited_for, now):
            heard = (member for member in self._staying if not self._roll.silent(member, now))
            self._waited_for = next(heard, "")
        return bool(self._waited_for)

    def _formed(
        self, seats: Sequence[str], ready: Mapping[str, StateVersion], wanted: int, late: bool
    ) -> Formed | None:
        """A view of those who have `seats`, if they are enough, and know all that was committed or may give it up."""
        if len(seats) < wanted:
            return None
        start, sources = best({worker: ready[worker] for worker in seats})
        missing = unproven(self.saved.lineage, start, ready)
        places = tuple(self._roll.heard[worker].beat.place for worker in seats)
        view = View(self.view.number + 1, tuple(seats), start, sources, places)
        if not missing:
            return Formed(view)
        if not start.view:  # none of them has ever trained: what was kept is more
            view = View(view.number, view.members, places=places)
        if late or all(m in self._roll.gone or m in ready for old in missing for m in old.members):
            return Formed(view, tuple(old.number for old in missing))
        return None

    def _handing_over(self, staying: Sequence[str], ready: Mapping[str, StateVersion], now: float) -> list[str]:
        """Who leaves may have what the others lack: then a replica of them stays for one view more. Where all leave,
        they stop together."""
        leaving = {worker: standing for worker, standing in ready.items() if worker not in staying}
        if not leaving or not staying:
            return self._seats(list(leaving), now)
        _, furthest = best(leaving)
        replica = seated(self.view.members, furthest, self.policy.unit, self.policy.unit)
        asked = [*self._seats(staying, now), *replica]
        return self._seats(asked, now, len(asked))

    def _unpaused(self, workers: Iterable[str], now: float) -> list[str]:
        return [worker for worker in workers if not self._roll.pauses(worker, now)]

    def _unproven(self, workers: Sequence[str], ready: Mapping[str, StateVersion]) -> list[View]:
        start = best({worker: ready[worker] for worker in workers})[0] if workers else StateVersion()
        return unproven(self.saved.lineage, start, ready)

    def _may_go(self, ready: Mapping[str, StateVersion], needless: bool) -> bool:
        return needless and self.saved.over is not ViewStatus.WITH_TOO_FEW and not self._roll.leaving.isdisjoint(ready)

    def _seats(self, workers: Sequence[str], now: float, maximum: int | None = None) -> list[str]:
        ordered = seated(self.view.members, workers, 1, len(workers))
        known = acquainted(ordered, self._quarrels.missing(now))
        most = maximum or self.policy.maximum
        return seated(self.view.members, known, self.policy.unit, most, self.policy.shares)

    def _end(self, over: ViewStatus, why: str, now: float) -> Ended:
        self.saved = Saved(self.saved.lineage, over)
        self._ended_at = now
        return Ended(self.view.number, over, why)

    def _take(self, view: View, now: float) -> None:
        lineage = [old for old in self.saved.lineage if old.number <= view.start.view]
        self.saved = Saved((*lineage, view)[-_LINEAGE:], ViewStatus.NO)
        self._note_changes(self._members, view, now)
        self._seat(view)
        self._roll.formed(view.number)
        self._furthest, self._known = (view.number, view.start.step), view.start.view > 0
        self._steps.restart(now)
        self._begun = False

    def _note_changes(self, before: frozenset[str], view: View, now: float) -> None:
        after = frozenset(view.members)
        for worker in after - before:
            self._roll.join(worker, now)
        for worker in before - after - self._roll.gone:
            if self._roll.silent(worker, now):
                self._roll.evict(worker, len(before), now)

    def _seat(self, view: View) -> None:
        self._members = frozenset(view.members)
        self._arriving, self._staying = set(view.members), set(view.members)

    def _note_progress(self, standing: StateVersion, now: float) -> None:
        if not self._known:  # it began with what was kept: whoever has met knows what that is
            self._known, self._furthest = True, (standing.view, standing.step)
        elif (standing.view, standing.step) > self._furthest:
            self._taken += standing.step - self._furthest[1]
            self._furthest = (standing.view, standing.step)
            held_up = self._held_up or (self._steps.overdue(now) and any(self._overdue(m, now) for m in self._members))
            if self._begun and not held_up:
                self._steps.beat(now)
            else:  # workers have met, and perhaps received a state, or one was frozen: no step takes as long
                self._steps.restart(now)
            self._begun, self._held_up = True, False

    def _overdue(self, worker: str, now: float) -> bool:
        """Whether that worker is a member whose next beat should have come by now."""
        return worker in self._members and self._roll.heard[worker].pulse.overdue(now)

    def _forget(self, now: float) -> None:
        """Workers that have ended, and are in no view any more."""
        if len(self._roll.heard) > len(self._members):
            past = self._roll.forget(self._members, now)
            if past:
                self._quarrels.forget(past)


def named(workers: Iterable[str]) -> str:
    """In words, however many they are."""
    them = list(workers)
    more = len(them) - _NAMED
    return ", ".join(them[:_NAMED]) + (f" and {more} more" if more > 0 else "")


_NAMED = 8
