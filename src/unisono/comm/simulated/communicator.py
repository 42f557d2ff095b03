"""The simulated communicator: virtual workers in one process, on a virtual clock, reproducible to the bit.

It is both the test double of the real communicators and the engine of estimates. Payloads are really exchanged, times
follow `unisono.comm.link_model`, and `SimulatedWorld.lose` can make a worker lost at any point.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from unisono.comm import header_record as record
from unisono.comm import link_model
from unisono.comm.actor import Actor, ActorConnection
from unisono.comm.actors.process import load
from unisono.comm.communicator import Header
from unisono.comm.link_model import Link
from unisono.comm.simulated.actors import SimulatedService
from unisono.comm.simulated.host import SimulatedHost
from unisono.comm.simulated.virtual_clock import VirtualScheduler
from unisono.comm.simulated.virtual_work import VirtualWork
from unisono.errors import CommunicationError, MessageMismatch, PeerLost

T = TypeVar("T")


class Lost(BaseException):
    """Raised in a virtual worker that is lost, at its next operation; ``except Exception`` does not catch this."""


def simulate(
    size: int,
    function: Callable[..., T],
    *arguments: Any,
    link: Link | Sequence[Link] = Link(),
    seed: int = 0,
    timeout_seconds: float = 300.0,
) -> list[T]:
    """Run ``function(comm, *arguments)`` once per virtual worker; returns the results in the order of ranks.

    Args:
        size: the number of virtual workers, each a thread, of which one runs at a time.
        function: what each worker runs; `comm` is the worker's `Simulated` communicator.
        link: the link that each worker has, or one link for each worker.
        seed: seeds each worker's random generators (torch's default one and Python's), together with the rank.
        timeout_seconds: how long to wait for a peer, on the virtual clock.

    Raises:
        BaseException: the error of the worker that failed first on the virtual clock, unchanged. A worker that failed
            counts as lost: the others see `PeerLost`. `outcomes` returns all errors.
    """
    world = SimulatedWorld(size, link, timeout_seconds)
    results = world.run(function, arguments, seed)
    if world.failures:
        raise world.failures[0]
    return cast(list[T], results)


def outcomes(
    size: int,
    function: Callable[..., T],
    *arguments: Any,
    link: Link | Sequence[Link] = Link(),
    seed: int = 0,
    timeout_seconds: float = 300.0,
) -> list[T | BaseException]:
    """As `simulate`, but returns the exception of a worker in place of its result."""
    return SimulatedWorld(size, link, timeout_seconds).run(function, arguments, seed)


class SimulatedWorld:
    """All virtual workers of one run, and their messages in flight."""

    def __init__(self, size: int, link: Link | Sequence[Link], timeout_seconds: float) -> None:
        self.size, self.timeout_seconds = size, timeout_seconds
        self.links = [link] * size if isinstance(link, Link) else list(link)
        if size < 1 or len(self.links) != size:
            raise ValueError(f"size={size} with {len(self.links)} links: give at least one worker, and a link for each")
        self.failures: list[BaseException] = []
        self.bytes_sent = [0] * size
        self.hosts = [SimulatedHost(each, rank) for rank, each in enumerate(self.links)]
        self._services: dict[tuple[_Path, int], SimulatedService] = {}
        self._left: dict[int, str] = {}  # for each worker that starts nothing more, the reason
        self._lost: set[int] = set()  # those of these workers whose messages in flight are lost too
        self._messages: dict[tuple[_Path, int], _Collective] = {}
        self._in_flight: list[list[VirtualWork]] = [[] for _ in range(size)]
        self._waits: dict[int, Sequence[VirtualWork]] = {}

    def run(self, function: Callable[..., Any], arguments: Sequence[Any], seed: int) -> list[Any]:
        """As `outcomes`. Afterwards, `failures` has the workers' exceptions in the order of virtual time."""
        self.scheduler = VirtualScheduler(self.size, seed, self._break_deadlock)
        results: list[Any] = [None] * self.size

        def run_worker(rank: int) -> None:
            try:
                results[rank] = function(Simulated(self, rank), *arguments)
                self.leave(rank, "it has ended")
            except BaseException as error:
                results[rank] = error
                self.failures.append(error)
                self.lose(rank, f"it failed with {type(error).__name__}: {error}")

        self.scheduler.run(run_worker)
        return results

    def lose(self, rank: int, detail: str = "lost by injection") -> None:
        """Make worker `rank` lost: its next operation raises `Lost`; operations of others that need it, `PeerLost`."""
        if rank in self._lost:
            return
        self._left[rank] = detail
        self._lost.add(rank)
        self.scheduler.wake(rank, self.scheduler.now)
        self._fail_peers_of(rank, lambda part: True)
        self._end_services(rank)

    def leave(self, rank: int, detail: str) -> None:
        """Note that worker `rank` starts nothing more; what it has started is still delivered."""
        if rank in self._left:
            return
        self._left[rank] = detail
        self._fail_peers_of(rank, lambda part: rank not in self._messages[part.key])
        self._end_services(rank)

    def lose_server(self, number: int, detail: str = "lost by injection") -> None:
        """End actor `number` of every `Services.serve` so far."""
        for service in list(self._services.values()):
            actor = service.actors[number] if service.served and number < len(service.actors) else None
            if actor:
                actor.end(detail)

    def service(self, path: _Path, sequence: int, count: int, served: bool) -> SimulatedService:
        """The service of the `sequence`-th `host` or `serve` of a channel, which all workers share."""
        name = "server" if served else "actor of worker"
        return self._services.setdefault((path, sequence), SimulatedService(self, count, self.size, name, served))

    def is_lost(self, rank: int) -> bool:
        """Whether worker `rank` is lost, and with it the messages that it has sent."""
        return rank in self._lost

    def now(self, rank: int) -> float:
        """Seconds on the clock of worker `rank`."""
        return self.scheduler.clock[rank]

    def advance(self, rank: int, seconds: float) -> None:
        """Move the clock of worker `rank`; workers with earlier clocks run first."""
        self.check(rank)
        self.scheduler.advance(rank, seconds)
        self.check(rank)

    def check(self, rank: int) -> None:
        """Raises `Lost` if worker `rank` is lost."""
        if rank in self._lost:
            raise Lost(f"worker {rank}: {self._left[rank]}")

    def start(self, part: _PendingVerb[T]) -> _PendingVerb[T]:
        """Start `part`, the part of worker ``part.rank`` in an operation, and deliver what it completes."""
        self.enter(part)
        self.bytes_sent[part.rank] += part.bytes_out
        message = self._messages.setdefault(part.key, _Collective())
        message[part.rank] = part
        left = self._missing(part, message)
        message.mismatch = message.mismatch or _difference(part, next(iter(message.values())))
        if message.mismatch:
            self._fail(message.values(), message.mismatch)
        elif left:
            self._fail([part], PeerLost(left, part.header.verb, self._left[left[0]]))
        else:
            self._deliver(part, message)
        if len(message) == self.size and all(each.settled for each in message.values()):
            del self._messages[part.key]
        return part

    def enter(self, work: VirtualWork) -> None:
        """Register that worker ``work.rank`` starts `work` now."""
        self.check(work.rank)
        work.start = self.scheduler.now
        self._in_flight[work.rank] = [*self.unfinished(work.rank), work]

    def wait(self, rank: int, works: Sequence[VirtualWork]) -> None:
        """Wait until the first of `works` finishes; a work fails when its deadline has passed."""
        self.check(rank)
        self._waits[rank] = works
        deadline = min(work.start for work in works) + self.timeout_seconds
        self.scheduler.wait(rank, min(work.finish for work in works), deadline)
        del self._waits[rank]
        self.check(rank)
        self.expire(works)

    def expire(self, works: Iterable[VirtualWork]) -> None:
        """Fail those of `works` that are not settled within the deadline."""
        for work in works:
            if not work.settled and self.scheduler.now >= work.start + self.timeout_seconds:
                self._fail([work], work.overdue(self.timeout_seconds))

    def not_started(self, part: _PendingVerb[Any]) -> list[int]:
        """The peers that have not started the operation of `part`."""
        return [rank for rank in part.peers if rank not in self._messages[part.key]]

    def unfinished(self, rank: int) -> list[VirtualWork]:
        """The works that `rank` has started and whose finish is in its future, or not known."""
        return [work for work in self._in_flight[rank] if work.finish > self.scheduler.now]

    def _missing(self, part: _PendingVerb[Any], message: _Collective) -> list[int]:
        """The peers that `part` would wait for in vain, in the order in which they left."""
        return [r for r in self._left if r in part.peers and (r in self._lost or r not in message)]

    def _deliver(self, part: _PendingVerb[Any], message: _Collective) -> None:
        """Settle what had to wait for `part`: the whole collective, or the swaps of its neighbours."""
        is_collective = part.header.verb != "swap"
        for member in [part] if is_collective else [message[r] for r in part.peers if r in message]:
            if member.settled or len(message) < len(member.peers) or any(r not in message for r in member.peers):
                continue
            peers = [message[r] for r in member.peers]
            wrong = _wrong_size(peers)
            if wrong:
                self._fail(peers, wrong)
                continue
            settled = peers if is_collective else [member]
            for each in settled:
                each.result = _RESULT[member.header.verb](each, peers)
            self._settle(settled, peers, self._seconds(member, peers))

    def _settle(self, parts: list[_PendingVerb[Any]], peers: list[_PendingVerb[Any]], seconds: float) -> None:
        for peer in peers:
            if not peer.ready_at:  # else an earlier swap of the same message has set it
                peer.ready_at = max(peer.start, self.hosts[peer.rank].free_at)
        for part in parts:
            part.finish = max(peer.ready_at for peer in peers) + seconds
            self.hosts[part.rank].hold_until(part.finish)
            self.scheduler.wake(part.rank, part.finish)

    def _seconds(self, part: _PendingVerb[Any], peers: list[_PendingVerb[Any]]) -> float:
        if part.header.verb in _SECONDS:
            return _SECONDS[part.header.verb](self.links, _bytes([part.x]))
        links = {peer.rank: self.links[peer.rank] for peer in peers}
        pairs = {(s.rank, r): _bytes([s.xs[r]]) for s in peers for r in s.xs if r in links}
        return link_model.exchange_seconds(links, pairs)

    def _fail(self, parts: Iterable[VirtualWork], error: CommunicationError) -> None:
        for part in parts:
            if part.finish > self.scheduler.now:
                part.error, part.finish = part.error or error, self.scheduler.now
                self.scheduler.wake(part.rank, part.finish)

    def _fail_peers_of(self, left: int, concerns: Callable[[_PendingVerb[Any]], bool]) -> None:
        detail = self._left[left]
        for rank in range(self.size):
            for part in self.unfinished(rank) if rank != left else ():
                if (
                    isinstance(part, _PendingVerb)
                    and left in part.peers
                    and (concerns(part) if not part.settled else left in self._lost)
                ):
                    self._fail([part], PeerLost([left], part.header.verb, detail))

    def _end_services(self, left: int) -> None:
        for service in list(self._services.values()):
            service.worker_ended(left, self._left[left])

    def _break_deadlock(self) -> None:
        """Fail all works when every worker waits for another one; the error names the workers that wait, by message."""
        waiting: dict[str, list[str]] = {}
        for rank in sorted(self._waits):
            for part in self._waits[rank]:
                waiting.setdefault(part.description, []).append(str(rank))
        places = [
            f"worker{'s' * (len(ranks) > 1)} {', '.join(ranks)} wait{'s' * (len(ranks) == 1)} in {message}"
            for message, ranks in waiting.items()
        ]
        error = MessageMismatch("deadlock: " + "; ".join(places))
        self._fail([part for parts in list(self._waits.values()) for part in parts], error)


_Path = tuple[tuple[int, str], ...]


class _PendingVerb(VirtualWork, Generic[T]):
    """One worker's part in a collective: the worker's inputs, and the `Work` that the worker has received."""

    result: Callable[[], T]

    def __init__(
        self,
        comm: Simulated,
        verb: str,
        x: Tensor,
        xs: Mapping[int, Tensor],
        like: Mapping[int, Tensor],
        root: int,
        to: torch.dtype | None,
    ) -> None:
        super().__init__(comm.world, comm.rank)
        self._world, self._path, self.verb = comm.world, comm.path, verb
        self.x, self.xs, self.like = x.detach(), xs, like
        numel, dtype = (-1, "") if verb in ("exchange", "swap") else (x.numel(), _name(x.dtype))
        self.to = to or self.x.dtype
        self.header = Header(verb, comm.sequence, numel, dtype, root, "" if self.to == self.x.dtype else _name(self.to))
        self.key = (comm.path, comm.sequence)
        self.peers = sorted({comm.rank, *xs}) if verb == "swap" else range(comm.size)
        self.ready_at = 0.0
        self._value: list[T] = []

    @property
    def description(self) -> str:
        """The operation and its channel, for the text of errors."""
        return str(self.header) + (f" on channel {'/'.join(name for _, name in self._path)}" if self._path else "")

    @property
    def bytes_out(self) -> int:
        others = self._world.size - 1
        size = _bytes([self.x])
        return {
            "sum": link_model.sum_bytes(others + 1, size),
            "gather": others * size,
            "broadcast": others * size if self.header.root == self.rank else 0,
        }.get(self.header.verb, _bytes(x for rank, x in self.xs.items() if rank != self.rank))

    def overdue(self, timeout_seconds: float) -> PeerLost:
        return PeerLost(
            self._world.not_started(self), self.verb, f"no answer within the deadline of {timeout_seconds:g} s"
        )

    def wait(self) -> T:
        """See `Work.wait`. Moves the clock to the finish time if that is later."""
        self.wait_until_finished()
        if not self._value:
            self._value.append(self.result())
        return self._value[0]


class _Collective(dict[int, _PendingVerb[Any]]):
    """The parts of one collective that have been started so far, by rank."""

    mismatch: MessageMismatch | None = None


class Simulated:
    """The `Communicator` of one virtual worker; `simulate` makes it."""

    def __init__(self, world: SimulatedWorld, rank: int, path: _Path = ()) -> None:
        self.world, self.rank, self.size, self.path = world, rank, world.size, path
        self.sequence = 0
        self._channels = self._services = 0

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that left this worker so far; a sum counts as a ring all-reduce."""
        return self.world.bytes_sent[self.rank]

    @property
    def waits_for(self) -> tuple[str, tuple[int, ...]]:
        """Always empty: no other thread runs while a virtual worker waits."""
        return "", ()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> _PendingVerb[Tensor]:
        """See `Communicator.sum`. Overwrites `x` with NaN or the largest integer: no caller may rely on its content."""
        return self._start("sum", x, to=dtype)

    def gather(self, x: Tensor) -> _PendingVerb[Tensor]:
        return self._start("gather", x)

    def broadcast(self, x: Tensor, root: int = 0) -> _PendingVerb[Tensor]:
        record.check_root(root, self.size)
        return self._start("broadcast", x, root=root)

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> _PendingVerb[list[Tensor]]:
        record.check_all_ranks(xs, like, self.size)
        return self._start("exchange", xs=dict(enumerate(xs)), like=dict(enumerate(like)))

    def swap(self, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> _PendingVerb[dict[int, Tensor]]:
        record.check_neighbours(xs, like, self.rank, self.size)
        return self._start("swap", xs=dict(xs), like=dict(like))

    def channel(self, name: str) -> Simulated:
        self._channels += 1
        return Simulated(self.world, self.rank, (*self.path, (self._channels, name)))

    def hierarchy(self, name: str) -> None:
        """Always None: each virtual worker has a host of its own."""

    def host(self, actor: Actor) -> list[ActorConnection]:
        """See `Services.host`. `actor` shares the link of its worker."""
        own = self.world.hosts[self.rank]
        service = self._service(self.size, served=False)
        service.add(self.rank, lambda: actor, own)
        return self._connections(service)

    def serve(self, count: int, service: str, config: Mapping[str, Any]) -> list[ActorConnection]:
        """See `Services.serve`. Every actor has a link of its own, equal to that of worker 0."""
        if count < 1:
            raise ValueError(f"count={count}: there must be at least one server")
        actors = self._service(count, served=True)
        for number in range(self.rank, count, self.size):
            copied = json.loads(json.dumps(dict(config)))
            actors.add(number, functools.partial(load, service, number, copied), SimulatedHost(self.world.links[0]))
        return self._connections(actors)

    def wait_without_deadline(self) -> None:
        """See `Communicator.wait_without_deadline`; here it is for all workers."""
        self.world.timeout_seconds = math.inf

    def now(self) -> float:
        """Virtual seconds."""
        return self.world.now(self.rank)

    def compute(self, seconds: float) -> None:
        """Compute for `seconds` on the virtual clock."""
        if seconds < 0:
            raise ValueError(f"seconds={seconds!r} is below 0")
        self.world.advance(self.rank, seconds)

    def close(self) -> None:
        """See `Communicator.close`. Peers that still need this worker see `PeerLost`.

        Channels close with the communicator that they duplicate; to close only a channel has no effect.
        """
        if not self.path:
            self.world.leave(self.rank, "it has closed its communicator")

    def _service(self, count: int, served: bool) -> SimulatedService:
        self._services += 1
        return self.world.service(self.path, self._services, count, served)

    def _connections(self, service: SimulatedService) -> list[ActorConnection]:
        """Collective: connections to all actors, once all of them exist and are connected with each other."""
        self.gather(torch.zeros(1)).wait()
        return service.connections(self.rank, self.world.hosts[self.rank])

    def _start(
        self,
        verb: str,
        x: Tensor | None = None,
        xs: Mapping[int, Tensor] | None = None,
        like: Mapping[int, Tensor] | None = None,
        root: int = -1,
        to: torch.dtype | None = None,
    ) -> _PendingVerb[Any]:
        part: _PendingVerb[Any] = _PendingVerb(
            self, verb, torch.empty(0) if x is None else x, xs or {}, like or {}, root, to
        )
        self.sequence += 1
        return self.world.start(part)


def _difference(part: _PendingVerb[Any], other: _PendingVerb[Any]) -> MessageMismatch | None:
    """The error if the headers of these two parts of one message differ."""
    if other.header == part.header:
        return None
    first, second = sorted([other, part], key=lambda each: each.rank)
    return MessageMismatch(f"worker {first.rank}: {first.description}; worker {second.rank}: {second.description}")


def _wrong_size(peers: Sequence[_PendingVerb[Any]]) -> MessageMismatch | None:
    """The error if in an exchange or swap one worker sends what the other does not expect; else None."""
    by_rank = {part.rank: part for part in peers}
    for receiver in peers:
        for rank in (rank for rank in receiver.like if rank in by_rank):
            sent, expected = by_rank[rank].xs.get(receiver.rank), receiver.like[rank]
            if sent is None or (sent.numel(), sent.dtype) != (expected.numel(), expected.dtype):
                what = "nothing" if sent is None else f"{sent.numel()} x {_name(sent.dtype)}"
                return MessageMismatch(
                    f"worker {rank}: {receiver.description} of {what} to worker {receiver.rank}; "
                    f"worker {receiver.rank}: {receiver.description} of {expected.numel()} x {_name(expected.dtype)} "
                    f"from worker {rank}"
                )
    return None


def _sum(part: _PendingVerb[Tensor], peers: Sequence[_PendingVerb[Tensor]]) -> Callable[[], Tensor]:
    if part is peers[0]:  # one sum for all ranks, as in shared memory
        total = part.x.reshape(-1).clone()
        for peer in peers[1:]:
            total += peer.x.reshape(-1)
        for peer in peers:
            peer.x.fill_(math.nan if total.is_floating_point() else torch.iinfo(total.dtype).max)
            peer.xs = {0: total.to(peer.to)}
    total = part.xs[0]
    return lambda: total.view(part.x.shape)


def _gather(part: _PendingVerb[Tensor], peers: Sequence[_PendingVerb[Tensor]]) -> Callable[[], Tensor]:
    if part is peers[0]:
        rows = torch.stack([peer.x.reshape(-1) for peer in peers])
        for peer in peers:
            peer.xs = {0: rows}
    rows = part.xs[0]
    return lambda: rows.clone().view(len(peers), *part.x.shape)


def _broadcast(part: _PendingVerb[Tensor], peers: Sequence[_PendingVerb[Tensor]]) -> Callable[[], Tensor]:
    if part is peers[0]:
        source = peers[part.header.root].x.reshape(-1).clone()
        for peer in peers:
            peer.xs = {0: source}
    source = part.xs[0]
    return lambda: part.x.copy_(source.view(part.x.shape))


def _received(part: _PendingVerb[Any], peers: Sequence[_PendingVerb[Any]]) -> dict[int, Tensor]:
    by_rank = {peer.rank: peer for peer in peers}
    return {r: by_rank[r].xs[part.rank].detach().clone().view(like.shape) for r, like in part.like.items()}


def _exchange(part: _PendingVerb[list[Tensor]], peers: Sequence[_PendingVerb[Any]]) -> Callable[[], list[Tensor]]:
    received = _received(part, peers)
    return lambda: [received[rank] for rank in range(len(received))]


def _swap(part: _PendingVerb[dict[int, Tensor]], peers: Sequence[_PendingVerb[Any]]) -> Callable[[], dict[int, Tensor]]:
    received = _received(part, peers)
    return lambda: received


_RESULT: dict[str, Callable[[_PendingVerb[Any], Sequence[_PendingVerb[Any]]], Callable[[], Any]]] = {
    "sum": _sum,
    "gather": _gather,
    "broadcast": _broadcast,
    "exchange": _exchange,
    "swap": _swap,
}
_SECONDS: dict[str, Callable[[Sequence[Link], float], float]] = {
    "sum": link_model.sum_seconds,
    "gather": link_model.gather_seconds,
    "broadcast": link_model.broadcast_seconds,
}


def _bytes(xs: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in xs)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
