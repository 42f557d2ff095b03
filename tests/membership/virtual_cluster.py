"""Virtual workers, a coordinator and a network: everything that can happen to the protocol, from a seed.

A step is done when all members of a view have reached it; each member learns of that at another time. The state
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
from collections.abc import Callable, Sequence
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
    """The state of a replica: the last step, the view in which it was taken, and the state before."""

    step: int = 0
    view: int = 0
    before: State | None = field(default=None, repr=False, compare=False)
    digest: str = ""

    def after(self, view: int) -> State:
        """The state after one more step."""
        text = f"{self.digest} {self.step + 1} {view}"
        return State(self.step + 1, view, self, hashlib.blake2b(text.encode(), digest_size=8).hexdigest())

    @property
    def steps(self) -> list[tuple[int, int]]:
        """All (step, view) in it, in their order."""
        steps: list[tuple[int, int]] = []
        state: State | None = self
        while state is not None and state.before is not None:
            steps.append((state.step, state.view))
            state = state.before
        return steps[::-1]


@dataclass(eq=False)
class Worker:
    """A process: its half of the protocol, its state, and its faults."""

    agent: Agent
    state: State = State()
    alive: bool = True
    frozen: bool = False
    exited: bool = False
    partition: int = 0  # of the network; workers reach only those of the same one
    offline: bool = False  # the coordinator cannot be reached
    update: ViewUpdate | None = None  # the last one received
    stalled_until: float = 0.0  # user code holds the interpreter's lock


@dataclass(eq=False)
class Group:
    """The members of a view, their rendezvous and their steps."""

    view: View
    connected: dict[str, State] = field(default_factory=dict)
    arrived: dict[int, dict[str, bool]] = field(default_factory=lambda: defaultdict(dict))
    failed: bool = False
    unreachable: dict[int, tuple[object, tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = frozenset(self.view.members)
        self.ranks = {member: rank for rank, member in enumerate(self.view.members)}

    def work_of(self, member: str) -> int:
        """The micro-batches of `member`, as bits."""
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
        self.applied: dict[tuple[int, int], set[str]] = defaultdict(set)  # (view, step) to the workers that have it
        self.confirmed: dict[int, tuple[int, int]] = {}  # step to (step, view), once all members of the view have it
        self.decisions: list[object] = []
        self.counted: dict[tuple[int, int], int] = defaultdict(int)  # (view, step) to its micro-batches, as bits
        self.step_seconds, self.total = step_seconds, total
        self.finished = False  # the coordinator knows that there is a result
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._saved = SavedViews()
        self.coordinator: Coordinator | None = Coordinator(policy, started_at=0.0)
        for _ in range(workers):
            self.start()
        self._tick()

    # Faults.

    def start(self) -> str:
        """Start a worker, which has not joined."""
        name = f"w{next(self._names)}"
        worker = self.workers[name] = Worker(Agent(name, StateVersion(), WorkerAddress(f"host of {name}")))
        self._after(self.random.uniform(0, 0.1), self._send_heartbeats, worker)
        return name

    def kill(self, name: str, *, seen: bool) -> None:
        """SIGKILL, which closes its connections.

        Args:
            seen: the launcher reports the exit.
        """
        self.workers[name].alive = False
        self._close_connections(name)
        self._after(self._delay(), self._disconnected, name)
        if seen:
            self._after(self._delay(), self._report_exit, name)

    def unplug(self, name: str) -> None:
        """Its host loses power: no message arrives, and its exit is not reported."""
        self.workers[name].alive = False
        for group in self._latest(name):
            self._stall(group)

    def disconnect(self, name: str) -> None:
        """Its connection to the coordinator breaks; it opens another one."""
        self._after(self._delay(), self._disconnected, name)

    def stall(self, name: str, seconds: float) -> None:
        """User code lets no other thread of it run."""
        self.workers[name].stalled_until = self.now + seconds

    def leave(self, name: str) -> None:
        """SIGTERM."""
        self._do(self.workers[name], self.workers[name].agent.request_leave())

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.workers[name].frozen = True

    def thaw(self, name: str) -> None:
        """SIGCONT; pending messages arrive now."""
        self.workers[name].frozen = False

    def split_network(self, partitions: list[list[str]]) -> None:
        """Workers reach only those of the same partition."""
        for number, partition in enumerate(partitions):
            for name in partition:
                self.workers[name].partition = number
        for group in self.groups.values():
            if not group.failed and len({self.workers[m].partition for m in group.view.members}) > 1:
                self._stall(group)

    def heal(self) -> None:
        """End all faults: workers reach each other, none is frozen, and the coordinator runs."""
        for name, worker in self.workers.items():
            worker.partition, worker.offline = 0, False
            if worker.frozen:
                self.thaw(name)
        if self.coordinator is None:
            self.restart_coordinator()

    def crash_coordinator(self) -> None:
        """The coordinator exits; only what is on disk remains."""
        self.coordinator = None

    def restart_coordinator(self) -> None:
        """Start a coordinator from what is on disk."""
        self.coordinator = Coordinator(self.policy, self._saved, started_at=self.now)

    def check(self) -> None:
        """Check that no committed step is lost, and that no step or sample is missing or counted twice.

        Raises:
            AssertionError: it does not hold.
        """
        names = [name for name, worker in self.workers.items() if worker.alive and worker.agent.version.view]
        if names:
            state = self.workers[max(names, key=lambda name: self.workers[name].agent.version)].state.steps
            assert [step for step, _ in state] == list(range(1, len(state) + 1)), "steps are missing, or taken twice"
            assert all(self.counted[view, step] == ALL for step, view in state), "samples are missing"
            lost = set(self.confirmed.values()) - set(state)
            assert not lost, f"lost (step, view): {sorted(lost)[:5]}"

    def is_spare(self, name: str) -> bool:
        """Whether other workers have all committed steps, and one of them proves that no other has more."""
        step, view = self.confirmed.get(self.steps, (0, 0))
        others = [other for other in self.present() if other != name]
        versions = (self.workers[other].agent.version for other in others)
        witness = not self.views or any(other in self.views[max(self.views)].members for other in others)
        return witness and any((each.view, each.step) >= (view, step) for each in versions)

    @property
    def steps(self) -> int:
        """Steps taken by all members of a view."""
        return max(self.confirmed, default=0)

    def present(self) -> list[str]:
        """Workers that run."""
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
        """After `seconds`, or once `worker` is neither frozen nor stalled; never, if it has exited by then."""
        self._after(seconds, self._then, worker, what, about)

    def _then(self, worker: Worker, what: Callable[..., None], about: tuple[object, ...]) -> None:
        if worker.frozen or self.now < worker.stalled_until:
            self._after(0.05, self._then, worker, what, about)
        elif worker.alive and not worker.exited:
            what(*about)

    # Between workers and coordinator.

    def _send_heartbeats(self, worker: Worker) -> None:
        self._send_heartbeat(worker)
        seconds = self.coordinator.heartbeat_seconds if self.coordinator else self.policy.heartbeat_seconds
        self._at(worker, seconds * self.random.uniform(0.9, 1.1), self._send_heartbeats, worker)

    def _send_heartbeat(self, worker: Worker) -> None:
        heartbeat = worker.agent.heartbeat()
        if not worker.offline and not self._lost():
            self._after(self._delay(), self._receive, worker, heartbeat)

    def _receive(self, worker: Worker, heartbeat: Heartbeat) -> None:
        if self.coordinator is not None and not worker.offline:
            self.finished = self.finished or heartbeat.finished
            self._publish(self.coordinator.receive(heartbeat, self.now))
            self._answer(worker, again=heartbeat.leaving)

    def _disconnected(self, name: str) -> None:
        if self.coordinator is not None:
            self._publish(self.coordinator.disconnected(name, self.now))

    def _report_exit(self, name: str) -> None:
        if self.coordinator is not None:
            self._publish(self.coordinator.worker_exited(name, self.now))

    def _tick(self) -> None:
        if self.coordinator is not None:
            self._publish(self.coordinator.tick(self.now))
        seconds = self.coordinator.heartbeat_seconds if self.coordinator else self.policy.heartbeat_seconds
        self._after(seconds / 2, self._tick)

    def _publish(self, decisions: Sequence[object]) -> None:
        if not decisions:
            return
        assert self.coordinator is not None
        self._saved = self.coordinator.saved
        self.decisions += decisions
        for each in decisions:
            if isinstance(each, ViewFormed):
                assert each.view.number not in self.views, "two views of one number"
                assert not self.finished, "a view after the end of the run"
                self.views[each.view.number] = each.view
                kept = {of for of in self.confirmed.items() if of[1][1] not in each.abandoned_views}
                self.confirmed = dict(kept)
        for name in self.present():
            self._answer(self.workers[name])

    def _answer(self, worker: Worker, again: bool = False) -> None:
        """Send the update if it is news to `worker`, or `again`."""
        assert self.coordinator is not None
        update = self.coordinator.update
        if (again or update != worker.update) and not worker.offline and not self._lost():
            self._at(worker, self._delay(), self._take, worker, update)

    def _take(self, worker: Worker, update: ViewUpdate) -> None:
        assert update.view.number == 0 or self.views[update.view.number] == update.view, "two views of one number"
        actions = worker.agent.receive(update)
        self._do(worker, actions)
        if update != worker.update or actions:  # the coordinator may wait for a change
            worker.update = update
            self._send_heartbeat(worker)

    def _do(self, worker: Worker, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case AbortView(view):
                    group = self.groups[view]
                    self._fail(group)
                    self._at(worker, self._delay(), self._lose, worker, group)
                case JoinView(view):
                    self._connect(worker, view)
                case Exit():
                    worker.exited = True
                    self._close_connections(worker.agent.worker)

    # Between workers.

    def _connect(self, worker: Worker, view: View) -> None:
        group = self.groups.setdefault(view.number, Group(view))
        group.connected[worker.agent.worker] = worker.state
        if len(group.connected) == len(view.members) and self._all_reachable(group):
            state = self._state(view, group)
            for member in view.members:
                other = self.workers[member]
                self._at(other, self._delay() * 3, self._joined, other, group, state)
        else:
            timeout = max(1.0, 6 * self.network.most_seconds)
            self._at(worker, timeout, self._time_out, worker, group)

    def _state(self, view: View, group: Group) -> State:
        if not view.sources:
            return State()
        states = {group.connected[source] for source in view.sources}
        assert {(state.digest, state.step) for state in states} == {(view.start.digest, view.start.step)}
        return states.pop()

    def _all_reachable(self, group: Group) -> bool:
        """Whether its members reach each other."""
        partitions = {self.workers[m].partition for m in group.view.members}
        return len(partitions) == 1 and all(self.workers[m].alive for m in group.view.members)

    def _time_out(self, worker: Worker, group: Group) -> None:
        name = worker.agent.worker
        if worker.agent.view.number == group.view.number and not worker.agent.working:
            unreachable = self._unreachable(worker.partition, group)
            group.failed = True
            self._do(worker, worker.agent.fail_view(group.view.number, tuple(m for m in unreachable if m != name)))
            self._send_heartbeat(worker)

    def _unreachable(self, partition: int, group: Group) -> tuple[str, ...]:
        key = (len(group.connected), partition)
        if group.unreachable.get(partition, (None,))[0] != key:
            unreachable = tuple(
                m for m in group.view.members
                if m not in group.connected or not self.workers[m].alive or self.workers[m].partition != partition
            )  # fmt: skip
            group.unreachable[partition] = (key, unreachable)
        return group.unreachable[partition][1]

    def _joined(self, worker: Worker, group: Group, state: State) -> None:
        if worker.agent.view.number != group.view.number:
            return
        if group.failed:
            self._lose(worker, group)
            return
        worker.state = state
        worker.agent.joined(group.view.number, state.step, state.digest)
        self._send_heartbeat(worker)
        self._compute(worker, group)

    def _compute(self, worker: Worker, group: Group) -> None:
        seconds = self.step_seconds * self.random.uniform(0.5, 1.5)
        self._at(worker, seconds, self._arrive, worker, group)

    def _arrive(self, worker: Worker, group: Group) -> None:
        if worker.agent.view.number != group.view.number:
            return
        if group.failed:
            self._lose(worker, group)
            return
        step, name = worker.agent.version.step + 1, worker.agent.worker
        arrived = group.arrived[step]
        arrived[name] = worker.agent.votes_to_end
        self.counted[group.view.number, step] += group.work_of(name)  # a sum, like gradients: counting twice would show
        if len(arrived) == len(group.members):
            boundary = any(arrived.values())
            # If all leave, the run ends.
            last = step == self.total or all(self.workers[m].agent.is_leaving for m in group.members)
            for member in group.view.members:
                other = self.workers[member]
                self._at(other, self._delay(), self._done, other, group, step, boundary, last)

    def _done(self, worker: Worker, group: Group, step: int, boundary: bool, last: bool) -> None:
        """The sum is complete; if the group failed while it was in flight, perhaps for some members only."""
        number, name = group.view.number, worker.agent.worker
        if worker.agent.view.number != number or not worker.agent.working or worker.agent.version.step != step - 1:
            return
        if group.failed and self.random.random() < 0.5:
            self._lose(worker, group)
            return
        worker.state = worker.state.after(number)
        self.applied[number, step].add(name)
        if self.applied[number, step] == set(group.view.members):
            assert self.confirmed.setdefault(step, (step, number)) == (step, number), "a step was taken twice"
        worker.agent.add_steps(number, worker.state.digest)
        if last:
            self._at(worker, self._delay() * 5, self._finish, worker)
        elif boundary:
            self._do(worker, worker.agent.end_view(number))
            self._send_heartbeat(worker)
        else:
            self._compute(worker, group)

    def _latest(self, name: str) -> list[Group]:
        """Groups that the worker may be in."""
        number = max(self.groups, default=0)
        return [g for n, g in self.groups.items() if n >= number - 2 and name in g.members and not g.failed]

    def _finish(self, worker: Worker, tries: int = 20) -> None:
        """Its part of the result is stored; it reports this until the coordinator knows, or for some tries."""
        actions = worker.agent.finish()
        self._send_heartbeat(worker)
        if self.finished or not tries:
            self._do(worker, actions)
        else:
            self._at(worker, 0.2, self._finish, worker, tries - 1)

    def _close_connections(self, name: str) -> None:
        """Close the connections of a worker."""
        for group in self._latest(name):
            self._fail(group)

    def _fail(self, group: Group) -> None:
        """Operations of the group fail."""
        if group.failed:
            return
        group.failed = True
        for member in group.view.members:
            worker = self.workers[member]
            if self.random.random() < 0.7:  # others notice it with their next operation
                self._at(worker, self._delay(), self._lose, worker, group)
            else:
                self._at(worker, 1.0, self._lose, worker, group)

    def _stall(self, group: Group) -> None:
        """No message arrives any more; members time out."""
        if not group.failed:
            group.failed = True
            for member in group.view.members:
                worker = self.workers[member]
                self._at(worker, self.random.uniform(0.5, 1.0), self._lose, worker, group)

    def _lose(self, worker: Worker, group: Group) -> None:
        if worker.agent.view.number == group.view.number:
            self._do(worker, worker.agent.fail_view(group.view.number))
            self._send_heartbeat(worker)
