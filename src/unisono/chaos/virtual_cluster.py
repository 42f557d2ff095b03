"""A run on virtual processes, network, coordinator and clock. Trainer and membership protocol are the real ones, and a
seed determines all events.

    faults ──► processes (threads, one runs at a time) ◄── updates ── the coordinator ◄── heartbeats ── agents
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

_MOST_SECONDS = 1e5  # a run that takes more virtual time is taken to make no progress


@dataclass(frozen=True)
class VirtualNetwork:
    """The network between agents and coordinator.

    Args:
        least_seconds, most_seconds: bounds of the delay of a message.
        lost: the share of messages that are lost, 0 to 1.
    """

    least_seconds: float = 0.001
    most_seconds: float = 0.02
    lost: float = 0.0


class VirtualRun:
    """A run of virtual processes, which train in the views of a virtual coordinator.

    Args:
        policy: the coordinator's rules for views.
        processes: the maximum number of processes; each starts when `begin` is called for it.
        link: the link of every process.
        network: the network between the processes' agents and the coordinator.
        seed: determines all random events.
        step_seconds: the most virtual time that a process computes at each `check`, and before each commit.
        most_seconds: the virtual time after which all processes are killed, as the run makes no progress.

    Attributes:
        on_change: called whenever time has passed or an event has occurred; it must not raise.
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

    def run(self, run_worker: Callable[[Process], Any]) -> list[Any]:
        """Call ``run_worker(process)`` in each process; returns what each call has returned or raised.

        The result is None for a process that was never started.
        """
        results: list[Any] = [None] * len(self.processes)

        def run_process(number: int) -> None:
            process = self.processes[number]
            try:
                process.wait(lambda: process.begun or self.over)
                results[number] = run_worker(process) if process.begun else None
            except BaseException as error:
                results[number] = error
            process.end()

        self.scheduler.at(0.0, self._tick)
        self.scheduler.run(run_process)
        return results

    # Faults, which take effect at the current time of the virtual clock.

    def begin(self, number: int) -> None:
        """Start process `number`."""
        self.processes[number].begin()

    def kill(self, number: int, *, seen: bool = True) -> None:
        """Kill process `number`, as by SIGKILL; if `seen`, its launcher reports the exit to the coordinator."""
        process = self.processes[number]
        process.die()
        if seen:
            self._later(
                lambda: self._notify_coordinator(
                    lambda coordinator: coordinator.worker_exited(process.name, self.scheduler.now)
                )
            )

    def freeze(self, number: int, seconds: float) -> None:
        """Freeze process `number` for `seconds`, as by SIGSTOP and SIGCONT."""
        self.processes[number].frozen_until = self.scheduler.now + seconds

    def cut(self, number: int, seconds: float) -> None:
        """Drop all messages from and to process `number` for `seconds`; peers that wait for it get no error."""
        self.processes[number].cut_until = self.scheduler.now + seconds

    def kill_coordinator(self, seconds: float) -> None:
        """Kill the coordinator. After `seconds` the next coordinator starts, with nothing but what was saved."""
        self._coordinator = None
        self.scheduler.at(self.scheduler.now + seconds, self._start_coordinator)

    # Between agents and coordinator.

    def send(self, process: Process) -> None:
        """Send the heartbeat of `process` to the coordinator, which answers with an update."""
        if not process.reachable:
            return
        if process.leave_requested:
            process.do(process.agent.request_leave())
        heartbeat = process.agent.heartbeat()
        self._later(
            lambda: self._notify_coordinator(lambda coordinator: coordinator.receive(heartbeat, self.scheduler.now))
        )
        self._later(lambda: self._answer(process), trips=2)

    def _notify_coordinator(self, to: Callable[[Coordinator], Sequence[object]]) -> None:
        if self._coordinator is None:
            return
        events = to(self._coordinator)
        self._saved = self._coordinator.saved
        for each in events:
            if isinstance(each, ViewFormed):
                self.formed.append(each.view)
                self.given_up += each.abandoned_views
        if events:
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
        """Let the process compute for a while, during which it may be killed or frozen."""
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
        raise AssertionError("deadlock: every process waits, and no event is scheduled")


class Process:
    """A process of the run, and the `Session` of its training."""

    stop_requested, elastic = False, True

    def __init__(self, run: VirtualRun, number: int) -> None:
        self.number, self.name, self._run = number, str(number), run
        self.agent = Agent(self.name, StateVersion())
        self.view, self.rank = View(), 0
        self.begun = self.killed = self.over = self._dismissed = self.leave_requested = False
        self.frozen_until = self.cut_until = 0.0
        self._waiting: View | None = None

    # Called by the run.

    @property
    def reachable(self) -> bool:
        """Whether the process's agent can send and receive messages."""
        now = self._run.scheduler.now
        return self.begun and not self.killed and not self.over and now >= max(self.frozen_until, self.cut_until)

    def begin(self) -> None:
        """Start the process."""
        self.begun = True
        self.wake()

    def die(self) -> None:
        """Kill the process, in the middle of its operation."""
        self.killed = True
        for world in self._run.views.values():
            world.lose_process(self)
        self.wake()

    def end(self) -> None:
        """Mark the process as finished."""
        self.over = True

    def wake(self) -> None:
        """Make the process check again whether what it waits for has happened."""
        self._run.scheduler.wake(self.number, self._run.scheduler.now)

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until ``until()`` is true. Raises `Lost` once the process is killed."""
        while not until():
            if self.killed:
                raise Lost(f"process {self.name} was killed")
            self._run.scheduler.wait(self.number, float("inf"), float("inf"))

    def do(self, actions: Sequence[Action]) -> None:
        """Execute the agent's actions."""
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

    # Called by the training.

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
    """The rendezvous of the members of a view; see `Rendezvous`."""

    world: _ViewWorld
    rank: int

    def connect(self, ranks: Sequence[int], name: str = "") -> Communicator:
        return Simulated(self.world, self.rank)

    def open_world(self) -> TorchWorld:
        raise NotImplementedError("torch's own groups have no virtual clock")


class _ViewScheduler:
    """The scheduler of a run's processes, by the ranks of one view."""

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
    """The operations in flight between the members of one view."""

    def __init__(self, run: VirtualRun, view: View) -> None:
        super().__init__(len(view.members), run.link, run.most_seconds)
        self._members = [run.processes[int(name)] for name in view.members]
        self.scheduler: Any = _ViewScheduler(run.scheduler, [process.number for process in self._members])
        self.broken_off: set[str] = set()
        for process in self._members:
            if process.killed:
                self.lose_process(process)

    def lose_process(self, process: Process) -> None:
        """Record that `process` was killed."""
        if process in self._members:
            self.lose(self._members.index(process), f"process {process.name} was killed")

    def break_off(self, process: Process) -> None:
        """Fail all operations of `process` in this view, those in flight and later ones."""
        self.broken_off.add(process.name)
        rank = self._members.index(process)
        for work in self.unfinished(rank):
            self._fail([work], PeerLost([], "view", _CHANGED))

    def check(self, rank: int) -> None:
        process = self._members[rank]
        still = max(process.frozen_until, process.cut_until) - self.scheduler.now
        if still > 0 and not process.killed:
            self.scheduler.advance(rank, still)
        if process.killed:
            raise Lost(f"process {process.name} was killed")
        super().check(rank)

    def enter(self, work: VirtualWork) -> None:
        super().enter(work)
        if self._members[work.rank].name in self.broken_off:
            self._fail([work], PeerLost([], "view", _CHANGED))


_CHANGED = "the coordinator has formed another view"
