"""Operations under way, in the order in which they were started.

An operation's steps are a generator: it yields a `Blocked` where it cannot go on without its peers, and
returns the result. Whoever polls any operation moves the whole conversation, in order: an operation may pass
on the turn (``released``) before it is over, once nothing that its successors do can come before what it has
done.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from unisono.comm.abort import Abort
from unisono.comm.actor import Actor, ActorConnection
from unisono.comm.actors.services import Hosting, Verbs
from unisono.comm.hierarchy import Hierarchy
from unisono.errors import CommunicationError, PeerLost

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why an operation cannot go on: `on` is what it waits for, in the terms of its backend."""

    released: bool
    on: Any


Steps = Generator[Blocked, None, T]


class Operation(Generic[T]):
    """The `Work` of a `OperationQueue`."""

    __slots__ = ("_conversation", "_result", "_steps", "blocked", "error", "finished", "number", "verb")

    def __init__(self, conversation: OperationQueue, verb: str, steps: Steps[T], number: int = 0) -> None:
        self._conversation, self.verb, self._steps, self.number = conversation, verb, steps, number
        self.finished = False
        self.error: CommunicationError | None = None
        self.blocked: Blocked | None = None
        self._result: T

    def poll(self) -> bool:
        if not self.finished:
            self._conversation.advance()
        return self.finished

    def wait(self) -> T:
        if not self.finished:
            self._conversation.wait_for(self)
        if self.error is not None:
            # A copy: the traceback of a kept error would keep its caller's variables, and their memory.
            raise copy.copy(self.error)
        return self._result

    def step(self) -> bool:
        """Go on as far as possible; True where the next operation may go on as well."""
        if self.finished:
            return True
        try:
            self.blocked = next(self._steps)
        except StopIteration as stop:
            self._result, self.finished = stop.value, True
            return True
        return self.blocked.released

    def fail(self, error: CommunicationError) -> None:
        self._steps.close()
        self.error, self.finished = error, True


@dataclass
class Family:
    """What the lanes of one communicator have in common."""

    lanes: list[OperationQueue] = field(default_factory=list)
    bytes_sent: int = 0
    hosting: Hosting = field(default_factory=Hosting)
    tiers: Hierarchy | None = None
    waiting: OperationQueue | None = None  # the lane in which its thread waits just now
    abort: Abort = field(default_factory=Abort)


class OperationQueue:
    """One lane: a queue of operations, its deadline, and its failure once it has failed.

    The deadline counts from the first fruitless poll after the last progress, so that a worker's own long
    silence is not held against its peers.
    """

    def __init__(self, family: Family, timeout_seconds: float) -> None:
        self._family = family
        family.lanes.append(self)
        self._timeout_seconds = timeout_seconds
        self._queue: deque[Operation[Any]] = deque()
        self._failure: CommunicationError | None = None
        self._progress = 0
        self._fruitless_since: float | None = None
        self._thread = threading.get_ident()
        self._begun = 0
        self.name = ""

    @property
    def waits_for(self) -> tuple[str, tuple[int, ...]]:
        """As the contract."""
        lane = self._family.waiting
        try:
            operation = lane._queue[0] if lane else None
            missing = lane._missing(operation) if lane and operation else ()
        except (LookupError, TypeError, ValueError):  # it has just ended, or the lane has
            return "", ()
        if lane is None or operation is None:
            return "", ()
        return f"{operation.verb} ({lane.name or 'start'}, message {operation.number})", missing

    @property
    def bytes_sent(self) -> int:
        tiers = self._family.tiers
        return self._family.bytes_sent + self._family.hosting.bytes_sent + (tiers.bytes_sent if tiers else 0)

    def tiers(self, name: str) -> Hierarchy | None:
        """As the contract."""
        return self._family.tiers.channel(name) if self._family.tiers else None

    def host(self, actor: Actor) -> list[ActorConnection]:
        """As the contract; the actor has threads of its own."""
        return self._family.hosting.host(self._verbs(), actor)

    def serve(self, count: int, service: str, config: Mapping[str, Any]) -> list[ActorConnection]:
        """As the contract; ``config["compute_threads"]``, 1 where it is not there, is how many each process has."""
        return self._family.hosting.serve(self._verbs(), count, service, config)

    def now(self) -> float:
        return time.monotonic()

    def _begin(self, verb: str, steps: Steps[T]) -> Operation[T]:
        operation = Operation(self, verb, steps, self._begun)
        self._begun += 1
        self._thread = threading.get_ident()
        self._heed(verb)
        if self._failure is not None:
            operation.fail(self._failure)
            return operation
        if not self._queue:
            self._fruitless_since = None
        self._queue.append(operation)
        self._move()
        return operation

    def advance(self) -> None:
        """Move every operation as far as it goes; fails the lane when a peer is lost, the deadline has passed, or it
        was broken off."""
        if self._queue:
            self._heed(self._queue[0].verb)
        if self._move() or not self._queue:
            self._fruitless_since = None
            return
        now = time.monotonic()
        if self._fruitless_since is None:
            self._fruitless_since = now
        lost = self._lost(now, self._queue[0])
        if lost is None and now - self._fruitless_since > self._timeout_seconds:
            lost = self._overdue(self._queue[0])
        if lost is not None and not self._move():
            self._fail(lost)

    def wait_for(self, operation: Operation[Any]) -> None:
        """Returns when `operation` is over, well or badly."""
        self._fruitless_since = None
        attempt = 0
        self._family.waiting = self
        try:
            while not operation.poll():
                self._pause(attempt, self._queue[0])
                attempt += 1
        finally:
            self._family.waiting = None

    def _move(self) -> bool:
        """Step every operation that has the turn; True if any got further."""
        before = self._progress
        try:
            for operation in self._queue:
                if not operation.step():
                    break
        except CommunicationError as error:
            self._fail(error)
            return True
        while self._queue and self._queue[0].finished:
            self._queue.popleft()
        return self._progress != before

    def _heed(self, verb: str) -> None:
        """Fail if this was broken off, before anybody hears of `verb`."""
        if self._family.abort.why and self._failure is None:
            self._fail(self._family.abort.lost(verb))

    def _fail(self, error: CommunicationError) -> None:
        self._refuse(error)
        self._abandon(error)

    def _end(self) -> None:
        """This worker closes the lane: what is under way, and whatever is started later, fails."""
        if self._failure is None:
            self._refuse(PeerLost([], "close", "this end was closed"))

    def _refuse(self, error: CommunicationError) -> None:
        self._failure = error.with_traceback(None)
        for operation in self._queue:
            if not operation.finished:
                operation.fail(error)
        self._queue.clear()

    def _siblings(self) -> list[OperationQueue]:
        """Other lanes with work to do that this thread may touch: two workers may wait for two lanes in any
        order."""
        me = threading.get_ident()
        return [lane for lane in self._family.lanes if lane is not self and lane._queue and lane._thread == me]

    def _lost(self, now: float, operation: Operation[Any]) -> PeerLost | None:
        """The peer that `operation` waits for and that is known to be gone."""
        return None

    def _missing(self, operation: Operation[Any]) -> tuple[int, ...]:
        """The peers that have not come to `operation`, as far as that can be seen."""
        return ()

    def _overdue(self, operation: Operation[Any]) -> PeerLost:
        return PeerLost((), operation.verb, f"no answer within the deadline of {self._timeout_seconds:g} s")

    def _verbs(self) -> Verbs:
        """This lane, for the few words that services need."""
        raise NotImplementedError

    def _pause(self, attempt: int, operation: Operation[Any]) -> None:
        raise NotImplementedError

    def _abandon(self, error: CommunicationError) -> None:
        """The lane has failed: tell the peers, if that can be done without waiting for any."""
