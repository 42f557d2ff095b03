"""A run whose processes, network, coordinator and clock are all made up: the trainer and the protocol are the real
ones, and whatever happens follows from a seed.

    faults ──► processes (threads, one of which runs at a time) ◄── words ── the coordinator ◄── beats ── agents
                     └── a communicator of each view, on the same clock
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.comm import Communicator, Link, Lost, Simulated, TorchWorld
from unisono.comm.simulated.communicator import SimulatedWorld
from unisono.comm.simulated.virtual_clock import VirtualScheduler
from unisono.comm.simulated.virtual_work import VirtualWork
from unisono.errors import CommunicationError, PeerLost
from unisono.membership import (
    AbortView,
    Action,
    Agent,
    Coordinator,
    Exit,
    JoinView,
    Policy,
    SavedViews,
    StateVersion,
    View,
    ViewFormed,
)

_MOST_SECONDS = 1e5  # of made-up time: a run that takes longer does not get on


@dataclass(frozen=True)
class VirtualNetwork:
    """Between agents and coordinator: seconds that messages take, and the share that is lost."""

    least_seconds: float = 0.001
    most_seconds: float = 0.02
    lost: float = 0.0


class VirtualRun:
    """Processes that train together as the coordinator says.

    Args:
        policy: of the coordinator.
        processes: how many there ever are; each begins when `begin` is called for it, or never.
        link: of every process.
        seed: of all that happens by chance.
        step_seconds: what a step takes about, before and after it is in the state.
        most_seconds: after which all processes are killed, since the run does not get on.

    Attributes:
        look: called whenever time has passed or something has happened; it must not raise.
    """

    def __init__(
        self, policy: Policy, processes: int, link: Link, network: VirtualNetwork, seed: int, step_seconds: float = 0.1,
        most_seconds: float = _MOST_SECONDS,
    ) -> None:  # fmt: skip
        self.on_change: Callable[[], None] = lambda: None
        self.most_seconds = most_seconds
        self.policy, self.link, self._network, self._step_seconds = policy, link, network, step_seconds
        self.chance = random.Random(seed)
        self.scheduler = VirtualScheduler(processes, seed, self._deadlock)
        self.processes = [Process(self, number) for number in range(processes)]
        self.views: dict[int, _ViewWorld] = {}
        self.formed: list[View] = []
        self.given_up: list[int] = []
        self._coordinator: Coordinator | None = Coordinator(policy, started_at=0.0)
        self._saved = SavedViews()
        self.over = False

    def run(self, live: Callable[[Process], Any]) -> list[Any]:
        """What ``live(process)`` returned in each process, or raised."""
        results: list[Any] = [None] * len(self.processes)

        def alive(number: int) -> None:
            process = self.processes[number]
            try:
                process.wait(lambda: process.begun or self.over)
                results[number] = live(process) if process.begun else None
            except BaseException as error:
                results[number] = error
            process.end()

        self.scheduler.at(0.0, self._tick)
        self.scheduler.run(alive)
        return results

    # What may be done to it, at a moment of the made-up clock.

    def begin(self, number: int) -> None:
        """Process `number` starts."""
        self.processes[number].begin()

    def kill(self, number: int, *, seen: bool = True) -> None:
        """SIGKILL to a process; `seen` by whoever started it."""
        process = self.processes[number]
        process.die()
        if seen:
            self._later(
                lambda: self._notify_coordinator(
                    lambda coordinator: coordinator.worker_exited(process.name, self.scheduler.now)
                )
            )

    def freeze(self, number: int, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        self.processes[number].frozen_until = self.scheduler.now + seconds

    def cut(self, number: int, seconds: float) -> None:
        """Nothing reaches the process, nor leaves it, for so long; who waits for it does not learn why."""
        self.processes[number].cut_until = self.scheduler.now + seconds

    def kill_coordinator(self, seconds: float) -> None:
        """It is gone; the next one has only what was on disk."""
        self._coordinator = None
        self.scheduler.at(self.scheduler.now + seconds, self._start_coordinator)

    # Between agents and coordinator.

    def send(self, process: Process) -> None:
        """What the process has to say goes to the coordinator, and an answer comes back."""
        if not process.reachable:
            return
        if process.leave_requested:
            process.do(process.agent.request_leave())
        beat = process.agent.heartbeat()
        self._later(lambda: self._notify_coordinator(lambda coordinator: coordinator.receive(beat, self.scheduler.now)))
        self._later(lambda: self._answer(process), trips=2)

    def _notify_coordinator(self, to: Callable[[Coordinator], Sequence[object]]) -> None:
        if self._coordinator is None:
            return
        happened = to(self._coordinator)
        self._saved = self._coordinator.saved
        for each in happened:
            if isinstance(each, ViewFormed):
                self.formed.append(each.view)
                self.given_up += each.abandoned_views
        if happened:
            self.on_change()
            for process in self.processes:
                self._later(lambda process=process: self._answer(process))  # type: ignore[misc]

    def _answer(self, process: Process) -> None:
        if self._coordinator is not None and process.reachable:
            process.do(process.agent.receive(self._coordinator.update))

    def _later(self, event: Callable[[], None], trips: int = 1) -> None:
        network = self._network
        if self.chance.random() < network.lost:
            return
        seconds = sum(self.chance.uniform(network.least_seconds, network.most_seconds) for _ in range(trips))
        self.scheduler.at(self.scheduler.now + seconds, event)

    def busy(self, process: Process) -> None:
        """The process computes for a while, in which it may die or freeze."""
        self.scheduler.advance(process.number, self.chance.uniform(0, self._step_seconds))

    def _tick(self) -> None:
        self.over = self.over or all(process.over or not process.begun for process in self.processes)
        if self.over or self.scheduler.now > self.most_seconds:
            for process in self.processes:
                process.die()
                process.wake()
            return
        self._notify_coordinator(lambda coordinator: coordinator.tick(self.scheduler.now))
        for process in self.processes:
            self.send(process)
        self.on_change()
        self.scheduler.at(self.scheduler.now + self.policy.heartbeat_seconds, self._tick)

    def _start_coordinator(self) -> None:
        self._coordinator = Coordinator(self.policy, self._saved, started_at=self.scheduler.now)

    def _deadlock(self) -> None:
        raise AssertionError("every process waits, and nothing will ever happen")


class Process:
    """A process of the run; the `Session` of what it trains."""

    stop_requested, elastic = False, True

    def __init__(self, run: VirtualRun, number: int) -> None:
        self.number, self.name, self._run = number, str(number), run
        self.agent = Agent(self.name, StateVersion())
        self.view, self.rank = View(), 0
        self.begun = self.dead = self.over = self._dismissed = self.leave_requested = False
        self.frozen_until = self.cut_until = 0.0
        self._waiting: View | None = None

    # As the run sees it.

    @property
    def reachable(self) -> bool:
        """Whether its agent hears and is heard."""
        now = self._run.scheduler.now
        return self.begun and not self.dead and not self.over and now >= max(self.frozen_until, self.cut_until)

    def begin(self) -> None:
        """It starts."""
        self.begun = True
        self.wake()

    def die(self) -> None:
        """It is gone in the midst of whatever it does."""
        self.dead = True
        for world in self._run.views.values():
            world.lose_process(self)
        self.wake()

    def end(self) -> None:
        """It has come to its end."""
        self.over = True

    def wake(self) -> None:
        """Let it look again at what it waits for."""
        self._run.scheduler.wake(self.number, self._run.scheduler.now)

    def wait(self, until: Callable[[], bool]) -> None:
        """Until that is so. Raises `Lost` once it is dead."""
        while not until():
            if self.dead:
                raise Lost(f"process {self.name} is dead")
            self._run.scheduler.wait(self.number, float("inf"), float("inf"))

    def do(self, actions: Sequence[Action]) -> None:
        """What the agent wants done."""
        for action in actions:
            match action:
                case AbortView(number):
                    self._waiting = None
                    if number in self._run.views:
                        self._run.views[number].break_off(self)
                case JoinView(view):
                    self._waiting = view
                case Exit():
                    self._dismissed = True
        self.wake()

    # As the training sees it.

    def next_view(self) -> bool:
        self.wait(lambda: self._waiting is not None or self._dismissed)
        if self._waiting is None:
            return False
        self.view, self._waiting = self._waiting, None
        self.rank = self.view.members.index(self.name)
        return True

    def rendezvous(self, device: torch.device) -> _VirtualRendezvous:
        run = self._run
        world = run.views.setdefault(self.view.number, _ViewWorld(run, self.view))
        if run.formed and run.formed[-1].number > self.view.number:
            world.break_off(self)
        return _VirtualRendezvous(world, self.rank)

    @property
    def view_end_requested(self) -> bool:
        return self.agent.votes_to_end

    def joined(self, step: int, digest: str) -> None:
        self.agent.joined(self.view.number, step, digest)
        self._run.send(self)

    def worker_name(self, rank: int) -> str:
        return self.view.members[rank]

    def leave(self) -> None:
        self.leave_requested = True

    def check(self) -> None:
        world = self._run.views[self.view.number]
        self._run.busy(self)
        world.check(self.rank)
        if self.name in world.broken_off:
            raise PeerLost([], "step", _CHANGED)

    def stepped(self) -> None:
        pass

    def committed(self, steps: int = 1) -> None:
        self._run.busy(self)
        self._run.views[self.view.number].check(self.rank)
        self.agent.add_steps(self.view.number, steps=steps)
        self._run.on_change()

    def end_view(self, digest: str, error: CommunicationError | None = None) -> None:
        if error is None:
            self.do(self.agent.end_view(self.view.number, digest))
        elif not isinstance(error, PeerLost):
            raise error
        else:
            self.do(self.agent.fail_view(self.view.number, digest=digest))
        self._run.send(self)

    def finish(self) -> None:
        self.agent.finish()
        self._run.send(self)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _VirtualRendezvous:
    """Where the members of a view meet; see `Rendezvous`."""

    world: _ViewWorld
    rank: int

    def connect(self, ranks: Sequence[int], name: str = "") -> Communicator:
        return Simulated(self.world, self.rank)

    def open_world(self) -> TorchWorld:
        raise NotImplementedError("torch's own groups have no made-up clock")


class _ViewScheduler:
    """The clock of a run's processes, by the ranks of one view."""

    def __init__(self, scheduler: VirtualScheduler, numbers: Sequence[int]) -> None:
        self._scheduler, self._numbers = scheduler, numbers
        self.at, self.own_random, self.drawing_from = scheduler.at, scheduler.own_random, scheduler.drawing_from

    @property
    def now(self) -> float:
        return self._scheduler.now

    @property
    def clock(self) -> list[float]:
        return [self._scheduler.clock[number] for number in self._numbers]

    def wake(self, rank: int, time: float) -> None:
        self._scheduler.wake(self._numbers[rank], time)

    def wait(self, rank: int, at: float, until: float) -> None:
        self._scheduler.wait(self._numbers[rank], at, until)

    def advance(self, rank: int, seconds: float) -> None:
        self._scheduler.advance(self._numbers[rank], seconds)


class _ViewWorld(SimulatedWorld):
    """What is under way between the members of one view."""

    def __init__(self, run: VirtualRun, view: View) -> None:
        super().__init__(len(view.members), run.link, run.most_seconds)
        self._members = [run.processes[int(name)] for name in view.members]
        self.scheduler: Any = _ViewScheduler(run.scheduler, [process.number for process in self._members])
        self.broken_off: set[str] = set()
        for process in self._members:
            if process.dead:
                self.lose_process(process)

    def lose_process(self, process: Process) -> None:
        """It is dead."""
        if process in self._members:
            self.lose(self._members.index(process), f"process {process.name} is dead")

    def break_off(self, process: Process) -> None:
        """Whatever `process` does here fails from now on."""
        self.broken_off.add(process.name)
        rank = self._members.index(process)
        for work in self.unfinished(rank):
            self._fail([work], PeerLost([], "view", _CHANGED))

    def check(self, rank: int) -> None:
        process = self._members[rank]
        still = max(process.frozen_until, process.cut_until) - self.scheduler.now
        if still > 0 and not process.dead:
            self.scheduler.advance(rank, still)
        if process.dead:
            raise Lost(f"process {process.name} is dead")
        super().check(rank)

    def enter(self, work: VirtualWork) -> None:
        super().enter(work)
        if self._members[work.rank].name in self.broken_off:
            self._fail([work], PeerLost([], "view", _CHANGED))


_CHANGED = "the coordinator counts on other workers"
