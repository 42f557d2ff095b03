"""Virtual workers, a coordinator and a network: everything that can happen to the protocol, from a seed.

A step is done when all members of a view have reached it; each member learns of that at a moment of its own. The state
is the list of steps, each with the view in which it was done, so that two groups that do the same step have different
states. The members of a view share out the micro-batches of each step; a member that reaches the step has counted its
own.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.membership import (
    AbortView,
    Action,
    Agent,
    Coordinator,
    Exit,
    Heartbeat,
    JoinView,
    Policy,
    SavedViews,
    StateVersion,
    View,
    ViewFormed,
    ViewUpdate,
    WorkerAddress,
)

MICRO_BATCHES = 32  # of a step
ALL = (1 << MICRO_BATCHES) - 1


@dataclass(frozen=True)
class Network:
    """Seconds that messages take, and how many are lost."""

    least_seconds: float = 0.001
    most_seconds: float = 0.02
    lost: float = 0.0


@dataclass(frozen=True)
class State:
    """What training has made: a step, the view that it was done in, and the state that it was done to."""

    step: int = 0
    view: int = 0
    before: State | None = field(default=None, repr=False, compare=False)
    digest: str = ""

    def after(self, view: int) -> State:
        """One step more."""
        said = f"{self.digest} {self.step + 1} {view}"
        return State(self.step + 1, view, self, hashlib.blake2b(said.encode(), digest_size=8).hexdigest())

    @property
    def steps(self) -> list[tuple[int, int]]:
        """All (step, view) in it, in their order."""
        found: list[tuple[int, int]] = []
        at: State | None = self
        while at is not None and at.before is not None:
            found.append((at.step, at.view))
            at = at.before
        return found[::-1]


@dataclass(eq=False)
class Worker:
    """A process: its half of the protocol, its state, and what befell it."""

    agent: Agent
    state: State = State()
    alive: bool = True
    frozen: bool = False
    exited: bool = False
    island: int = 0  # only workers of the same one reach each other
    offline: bool = False  # the coordinator cannot be reached
    heard: ViewUpdate | None = None
    stalled_until: float = 0.0  # its own code holds it up


@dataclass(eq=False)
class Group:
    """The members of a view as they meet and take steps."""

    view: View
    there: dict[str, State] = field(default_factory=dict)
    arrived: dict[int, dict[str, bool]] = field(default_factory=lambda: defaultdict(dict))
    broken: bool = False
    missed: dict[int, tuple[object, tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = frozenset(self.view.members)
        self.ranks = {member: rank for rank, member in enumerate(self.view.members)}

    def share(self, member: str) -> int:
        """The micro-batches that are `member`'s, as bits."""
        return sum(1 << i for i in range(self.ranks[member], MICRO_BATCHES, len(self.ranks)))


class World:
    """A run of `workers` under `policy`, to step `total`; everything that happens follows from `seed`."""

    def __init__(
        self,
        policy: Policy,
        workers: int,
        seed: int,
        network: Network | None = None,
        step_seconds: float = 0.05,
        total: int | None = None,
    ) -> None:
        self.policy, self.network = policy, network or Network()
        self.random = random.Random(seed)
        self.now = 0.0
        self.workers: dict[str, Worker] = {}
        self.groups: dict[int, Group] = {}
        self.views: dict[int, View] = {}
        self.applied: dict[tuple[int, int], set[str]] = defaultdict(set)  # (view, step) to who has it
        self.confirmed: dict[int, tuple[int, int]] = {}  # step to what all members of a view have of it
        self.happened: list[object] = []
        self.counted: dict[tuple[int, int], int] = defaultdict(int)  # (view, step) to its micro-batches, as bits
        self.step_seconds, self.total = step_seconds, total
        self.over = False  # somebody said that there is a result, and was heard
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._saved = SavedViews()
        self.coordinator: Coordinator | None = Coordinator(policy, started_at=0.0)
        for _ in range(workers):
            self.start()
        self._tick()

    # What may be done to it.

    def start(self) -> str:
        """A process more, which has yet to join."""
        name = f"w{next(self._names)}"
        worker = self.workers[name] = Worker(Agent(name, StateVersion(), WorkerAddress(f"host of {name}")))
        self._after(self.random.uniform(0, 0.1), self._beat_on, worker)
        return name

    def kill(self, name: str, *, seen: bool) -> None:
        """SIGKILL; `seen` by whoever started it. Its connections are closed."""
        self.workers[name].alive = False
        self._tear(name)
        self._after(self._delay(), self._hung_up, name)
        if seen:
            self._after(self._delay(), self._told_gone, name)

    def unplug(self, name: str) -> None:
        """Its host has no power: nothing more is heard of it, nor that it is gone."""
        self.workers[name].alive = False
        for group in self._latest(name):
            self._stall(group)

    def hang_up(self, name: str) -> None:
        """Its connection to the coordinator breaks; it will make another."""
        self._after(self._delay(), self._hung_up, name)

    def stall(self, name: str, seconds: float) -> None:
        """Its own code lets no other of its threads run."""
        self.workers[name].stalled_until = self.now + seconds

    def leave(self, name: str) -> None:
        """SIGTERM."""
        self._do(self.workers[name], self.workers[name].agent.request_leave())

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.workers[name].frozen = True

    def thaw(self, name: str) -> None:
        """SIGCONT; what it missed comes now."""
        self.workers[name].frozen = False

    def part(self, islands: list[list[str]]) -> None:
        """Only workers of one island reach each other."""
        for number, island in enumerate(islands):
            for name in island:
                self.workers[name].island = number
        for group in self.groups.values():
            if not group.broken and len({self.workers[m].island for m in group.view.members}) > 1:
                self._stall(group)

    def heal(self) -> None:
        """Everybody reaches everybody; nobody is frozen, and the coordinator is there."""
        for name, worker in self.workers.items():
            worker.island, worker.offline = 0, False
            if worker.frozen:
                self.thaw(name)
        if self.coordinator is None:
            self.restart_coordinator()

    def crash_coordinator(self) -> None:
        """What it had not on disk is forgotten."""
        self.coordinator = None

    def restart_coordinator(self) -> None:
        """From what it had on disk."""
        self.coordinator = Coordinator(self.policy, self._saved, started_at=self.now)

    def check(self) -> None:
        """Nothing that was committed is lost, and no step is missing or there twice, nor any sample.

        Raises:
            AssertionError: naming what does not hold.
        """
        names = [name for name, worker in self.workers.items() if worker.alive and worker.agent.version.view]
        if names:
            state = self.workers[max(names, key=lambda name: self.workers[name].agent.version)].state.steps
            assert [step for step, _ in state] == list(range(1, len(state) + 1)), "steps are missing, or there twice"
            assert all(self.counted[view, step] == ALL for step, view in state), "samples are missing"
            lost = set(self.confirmed.values()) - set(state)
            assert not lost, f"lost (step, view): {sorted(lost)[:5]}"

    def is_spare(self, name: str) -> bool:
        """Whether others that run have all that was committed, and one of them can tell that nobody else has more."""
        step, view = self.confirmed.get(self.steps, (0, 0))
        others = [other for other in self.present() if other != name]
        standings = (self.workers[other].agent.version for other in others)
        witness = not self.views or any(other in self.views[max(self.views)].members for other in others)
        return witness and any((each.view, each.step) >= (view, step) for each in standings)

    @property
    def steps(self) -> int:
        """Done by all members of a view."""
        return max(self.confirmed, default=0)

    def present(self) -> list[str]:
        """Processes that run."""
        return [name for name, worker in self.workers.items() if worker.alive and not worker.exited]

    def run(self, seconds: float) -> None:
        """Let `seconds` pass."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, what, about = heapq.heappop(self._events)
            what(*about)
        self.now = until

    # The network.

    def _after(self, seconds: float, what: Callable[..., None], *about: object) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what, about))

    def _delay(self) -> float:
        return self.random.uniform(self.network.least_seconds, self.network.most_seconds)

    def _lost(self) -> bool:
        return self.network.lost > 0 and self.random.random() < self.network.lost

    def _at(self, worker: Worker, seconds: float, what: Callable[..., None], *about: object) -> None:
        """After `seconds`, or once `worker` is held up no longer; never, if it has died by then."""
        self._after(seconds, self._then, worker, what, about)

    def _then(self, worker: Worker, what: Callable[..., None], about: tuple[object, ...]) -> None:
        if worker.frozen or self.now < worker.stalled_until:
            self._after(0.05, self._then, worker, what, about)
        elif worker.alive and not worker.exited:
            what(*about)

    # Between workers and coordinator.

    def _beat_on(self, worker: Worker) -> None:
        self._beat(worker)
        seconds = self.coordinator.heartbeat_seconds if self.coordinator else self.policy.heartbeat_seconds
        self._at(worker, seconds * self.random.uniform(0.9, 1.1), self._beat_on, worker)

    def _beat(self, worker: Worker) -> None:
        beat = worker.agent.heartbeat()
        if not worker.offline and not self._lost():
            self._after(self._delay(), self._hear, worker, beat)

    def _hear(self, worker: Worker, beat: Heartbeat) -> None:
        if self.coordinator is not None and not worker.offline:
            self.over = self.over or beat.finished
            self._tell(self.coordinator.receive(beat, self.now))
            self._answer(worker, again=beat.leaving)

    def _hung_up(self, name: str) -> None:
        if self.coordinator is not None:
            self._tell(self.coordinator.disconnected(name, self.now))

    def _told_gone(self, name: str) -> None:
        if self.coordinator is not None:
            self._tell(self.coordinator.worker_exited(name, self.now))

    def _tick(self) -> None:
        if self.coordinator is not None:
            self._tell(self.coordinator.tick(self.now))
        seconds = self.coordinator.heartbeat_seconds if self.coordinator else self.policy.heartbeat_seconds
        self._after(seconds / 2, self._tick)

    def _tell(self, happened: list[object]) -> None:
        if not happened:
            return
        assert self.coordinator is not None
        self._saved = self.coordinator.saved
        self.happened += happened
        for each in happened:
            if isinstance(each, ViewFormed):
                assert each.view.number not in self.views, "two views of one number"
                assert not self.over, "a view after all was done"
                self.views[each.view.number] = each.view
                kept = {of for of in self.confirmed.items() if of[1][1] not in each.abandoned_views}
                self.confirmed = dict(kept)
        for name in self.present():
            self._answer(self.workers[name])

    def _answer(self, worker: Worker, again: bool = False) -> None:
        """What is news to `worker`, or what it has heard before once `again`."""
        assert self.coordinator is not None
        word = self.coordinator.update
        if (again or word != worker.heard) and not worker.offline and not self._lost():
            self._at(worker, self._delay(), self._take, worker, word)

    def _take(self, worker: Worker, word: ViewUpdate) -> None:
        assert word.view.number == 0 or self.views[word.view.number] == word.view, "two views of one number"
        actions = worker.agent.receive(word)
        self._do(worker, actions)
        if word != worker.heard or actions:  # something may have changed that the coordinator waits for
            worker.heard = word
            self._beat(worker)

    def _do(self, worker: Worker, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case AbortView(view):
                    group = self.groups[view]
                    self._break(group)
                    self._at(worker, self._delay(), self._lose, worker, group)
                case JoinView(view):
                    self._meet(worker, view)
                case Exit():
                    worker.exited = True
                    self._tear(worker.agent.worker)

    # Between workers.

    def _meet(self, worker: Worker, view: View) -> None:
        group = self.groups.setdefault(view.number, Group(view))
        group.there[worker.agent.worker] = worker.state
        if len(group.there) == len(view.members) and self._joined(group):
            state = self._state(view, group)
            for member in view.members:
                other = self.workers[member]
                self._at(other, self._delay() * 3, self._met, other, group, state)
        else:
            patience = max(1.0, 6 * self.network.most_seconds)
            self._at(worker, patience, self._missed, worker, group)

    def _state(self, view: View, group: Group) -> State:
        if not view.sources:
            return State()
        states = {group.there[source] for source in view.sources}
        assert {(state.digest, state.step) for state in states} == {(view.start.digest, view.start.step)}
        return states.pop()

    def _joined(self, group: Group) -> bool:
        """Whether its members reach each other."""
        islands = {self.workers[m].island for m in group.view.members}
        return len(islands) == 1 and all(self.workers[m].alive for m in group.view.members)

    def _missed(self, worker: Worker, group: Group) -> None:
        name = worker.agent.worker
        if worker.agent.view.number == group.view.number and not worker.agent.working:
            missed = self._out_of_reach(worker.island, group)
            group.broken = True
            self._do(worker, worker.agent.fail_view(group.view.number, tuple(m for m in missed if m != name)))
            self._beat(worker)

    def _out_of_reach(self, island: int, group: Group) -> tuple[str, ...]:
        key = (len(group.there), island)
        if group.missed.get(island, (None,))[0] != key:
            missed = tuple(
                m for m in group.view.members
                if m not in group.there or not self.workers[m].alive or self.workers[m].island != island
            )  # fmt: skip
            group.missed[island] = (key, missed)
        return group.missed[island][1]

    def _met(self, worker: Worker, group: Group, state: State) -> None:
        if worker.agent.view.number != group.view.number:
            return
        if group.broken:
            self._lose(worker, group)
            return
        worker.state = state
        worker.agent.joined(group.view.number, state.step, state.digest)
        self._beat(worker)
        self._compute(worker, group)

    def _compute(self, worker: Worker, group: Group) -> None:
        seconds = self.step_seconds * self.random.uniform(0.5, 1.5)
        self._at(worker, seconds, self._arrive, worker, group)

    def _arrive(self, worker: Worker, group: Group) -> None:
        if worker.agent.view.number != group.view.number:
            return
        if group.broken:
            self._lose(worker, group)
            return
        step, name = worker.agent.version.step + 1, worker.agent.worker
        arrived = group.arrived[step]
        arrived[name] = worker.agent.votes_to_end
        self.counted[group.view.number, step] += group.share(name)  # a sum, as gradients are: twice would show
        if len(arrived) == len(group.members):
            boundary = any(arrived.values())
            # Where all leave, that is the end of the run.
            last = step == self.total or all(self.workers[m].agent.is_leaving for m in group.members)
            for member in group.view.members:
                other = self.workers[member]
                self._at(other, self._delay(), self._done, other, group, step, boundary, last)

    def _done(self, worker: Worker, group: Group, step: int, boundary: bool, last: bool) -> None:
        """The sum came; as it would have if some of it broke while it was under way, for some."""
        number, name = group.view.number, worker.agent.worker
        if worker.agent.view.number != number or not worker.agent.working or worker.agent.version.step != step - 1:
            return
        if group.broken and self.random.random() < 0.5:
            self._lose(worker, group)
            return
        worker.state = worker.state.after(number)
        self.applied[number, step].add(name)
        if self.applied[number, step] == set(group.view.members):
            assert self.confirmed.setdefault(step, (step, number)) == (step, number), "a step was done twice"
        worker.agent.add_steps(number, worker.state.digest)
        if last:
            self._at(worker, self._delay() * 5, self._finish, worker)
        elif boundary:
            self._do(worker, worker.agent.end_view(number))
            self._beat(worker)
        else:
            self._compute(worker, group)

    def _latest(self, name: str) -> list[Group]:
        """Groups that it may be in."""
        number = max(self.groups, default=0)
        return [g for n, g in self.groups.items() if n >= number - 2 and name in g.members and not g.broken]

    def _finish(self, worker: Worker, tries: int = 20) -> None:
        """Its part of the result lies where it belongs; it says so until it was heard, or nobody hears."""
        actions = worker.agent.finish()
        self._beat(worker)
        if self.over or not tries:
            self._do(worker, actions)
        else:
            self._at(worker, 0.2, self._finish, worker, tries - 1)

    def _tear(self, name: str) -> None:
        """Its connections are closed."""
        for group in self._latest(name):
            self._break(group)

    def _break(self, group: Group) -> None:
        """Members that wait are woken."""
        if group.broken:
            return
        group.broken = True
        for member in group.view.members:
            worker = self.workers[member]
            if self.random.random() < 0.7:  # the others find out when they come to it
                self._at(worker, self._delay(), self._lose, worker, group)
            else:
                self._at(worker, 1.0, self._lose, worker, group)

    def _stall(self, group: Group) -> None:
        """Nothing more arrives; who waits gives up at its deadline."""
        if not group.broken:
            group.broken = True
            for member in group.view.members:
                worker = self.workers[member]
                self._at(worker, self.random.uniform(0.5, 1.0), self._lose, worker, group)

    def _lose(self, worker: Worker, group: Group) -> None:
        if worker.agent.view.number == group.view.number:
            self._do(worker, worker.agent.fail_view(group.view.number))
            self._beat(worker)
