"""Operations in flight, in the order in which they were started.

The steps of an operation are a generator. It yields a `Blocked` where it cannot continue without its peers, and
returns the result. Polling any operation advances the whole queue, in order. An operation may let later operations
advance before it has finished (``released``), once everything is done that must come before their first step.
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
from unisono.comm.actors.services import ActorHost
from unisono.comm.communicator import Communicator
from unisono.comm.hierarchy import Hierarchy
from unisono.comm.security import Security
from unisono.errors import CommunicationError, PeerLost

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why an operation cannot continue.

    Args:
        released: whether later operations may advance meanwhile.
        on: what the operation waits for, as its backend represents it.
    """

    released: bool
    on: Any


Steps = Generator[Blocked, None, T]


class Operation(Generic[T]):
    """The `Work` of an `OperationQueue`."""

    __slots__ = ("_queue", "_result", "_steps", "blocked", "error", "finished", "number", "verb")

    def __init__(self, queue: OperationQueue, verb: str, steps: Steps[T], number: int = 0) -> None:
        self._queue, self.verb, self._steps, self.number = queue, verb, steps, number
        self.finished = False
        self.error: CommunicationError | None = None
        self.blocked: Blocked | None = None
        self._result: T

    def poll(self) -> bool:
        if not self.finished:
            self._queue.advance()
        return self.finished

    def wait(self) -> T:
        if not self.finished:
            self._queue.wait_for(self)
        if self.error is not None:
            # A copy: the traceback of a stored error would keep its caller's variables, and their memory.
            raise copy.copy(self.error)
        return self._result

    def step(self) -> bool:
        """Continue as far as possible; True if the next operation may continue as well."""
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
class ChannelSet:
    """What the channels of one communicator share.

    Attributes:
        waiting: the channel in which the training thread waits at the moment; None if it does not wait.
        has_deadline: whether a peer that does not answer within the deadline counts as lost.
    """

    queues: list[OperationQueue] = field(default_factory=list)
    bytes_sent: int = 0
    actor_host: ActorHost = field(default_factory=ActorHost)
    hierarchy: Hierarchy | None = None
    waiting: OperationQueue | None = None
    abort: Abort = field(default_factory=Abort)
    has_deadline: bool = True

    @staticmethod
    def create(
        address: str, timeout_seconds: float, abort: Abort | None = None, security: Security | None = None
    ) -> ChannelSet:
        """The set of a new communicator, without channels yet; actors listen on `address`, `abort` ends all waiting."""
        abort = abort or Abort()
        return ChannelSet(actor_host=ActorHost(address, timeout_seconds, abort, security), abort=abort)


class OperationQueue:
    """One channel: a queue of operations, their deadline, and the channel's error once it has failed.

    The time until the deadline begins with the first poll that makes no progress. So time that this worker spends
    without polling does not count against its peers.
    """

    def __init__(self, channels: ChannelSet, timeout_seconds: float) -> None:
        self._channels = channels
        channels.queues.append(self)
        self._timeout_seconds = timeout_seconds
        self._queue: deque[Operation[Any]] = deque()
        self._failure: CommunicationError | None = None
        self._progress = 0
        self._blocked_since: float | None = None
        self._thread = threading.get_ident()
        self._started = 0
        self.name = ""

    @property
    def waits_for(self) -> tuple[str, tuple[int, ...]]:
        channel = self._channels.waiting
        try:
            operation = channel._queue[0] if channel else None
            missing = channel._missing(operation) if channel and operation else ()
        except (LookupError, TypeError, ValueError):  # the operation or its channel has ended in this moment
            return "", ()
        if channel is None or operation is None:
            return "", ()
        return f"{operation.verb} ({channel.name or 'start'}, message {operation.number})", missing

    @property
    def bytes_sent(self) -> int:
        hierarchy = self._channels.hierarchy
        own = self._channels.bytes_sent + self._channels.actor_host.bytes_sent
        return own + (hierarchy.bytes_sent if hierarchy else 0)

    def hierarchy(self, name: str) -> Hierarchy | None:
        return self._channels.hierarchy.channel(name) if self._channels.hierarchy else None

    def wait_without_deadline(self) -> None:
        """See `Communicator.wait_without_deadline`."""
        self._channels.has_deadline = False
        if self._channels.hierarchy:
            self._channels.hierarchy.wait_without_deadline()

    def host(self, actor: Actor) -> list[ActorConnection]:
        """See `Services.host`. The actor runs in threads of its own."""
        return self._channels.actor_host.host(self._communicator(), actor)

    def serve(self, count: int, service: str, config: Mapping[str, Any]) -> list[ActorConnection]:
        """See `Services.serve`. ``config["compute_threads"]`` is the number of threads of each process (default 1)."""
        return self._channels.actor_host.serve(self._communicator(), count, service, config)

    def now(self) -> float:
        return time.monotonic()

    def advance(self) -> None:
        """Advance every operation as far as possible.

        The channel fails when a peer is lost, the deadline has passed, or the communicator is aborted.
        """
        if self._queue:
            self._check_abort(self._queue[0].verb)
        if self._advance_operations() or not self._queue:
            self._blocked_since = None
            return
        now = time.monotonic()
        if self._blocked_since is None:
            self._blocked_since = now
        lost = self._lost(now, self._queue[0])
        overdue = self._channels.has_deadline and now - self._blocked_since > self._timeout_seconds
        if lost is None and overdue:
            lost = self._overdue(self._queue[0])
        if lost is not None and not self._advance_operations():
            self._fail(lost)

    def wait_for(self, operation: Operation[Any]) -> None:
        """Return when `operation` has finished or failed."""
        self._blocked_since = None
        attempt = 0
        self._channels.waiting = self
        try:
            while not operation.poll():
                self._pause(attempt, self._queue[0])
                attempt += 1
        finally:
            self._channels.waiting = None

    def _enqueue(self, verb: str, steps: Steps[T]) -> Operation[T]:
        operation = Operation(self, verb, steps, self._started)
        self._started += 1
        self._thread = threading.get_ident()
        self._check_abort(verb)
        if self._failure is not None:
            operation.fail(self._failure)
            return operation
        if not self._queue:
            self._blocked_since = None
        self._queue.append(operation)
        self._advance_operations()
        return operation

    def _advance_operations(self) -> bool:
        """Step every operation that is not held up by an earlier one; True if any made progress."""
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

    def _check_abort(self, verb: str) -> None:
        """Fail this channel if the communicator was aborted, before any peer learns that `verb` has started."""
        if self._channels.abort.reason and self._failure is None:
            self._fail(self._channels.abort.lost(verb))

    def _fail(self, error: CommunicationError) -> None:
        self._fail_operations(error)
        self._notify_peers(error)

    def _end(self) -> None:
        """Close this worker's end of the channel: operations in flight, and those that are started later, fail."""
        if self._failure is None:
            self._fail_operations(PeerLost([], "close", "this end was closed"))

    def _fail_operations(self, error: CommunicationError) -> None:
        self._failure = error.with_traceback(None)
        for operation in self._queue:
            if not operation.finished:
                operation.fail(error)
        self._queue.clear()

    def _siblings(self) -> list[OperationQueue]:
        """Other channels with operations in flight that this thread may advance.

        They must be advanced, as two workers may wait for two channels in different orders.
        """
        me = threading.get_ident()
        return [other for other in self._channels.queues if other is not self and other._queue and other._thread == me]

    def _lost(self, now: float, operation: Operation[Any]) -> PeerLost | None:
        """The error if a peer that `operation` waits for is known to be lost."""
        return None

    def _missing(self, operation: Operation[Any]) -> tuple[int, ...]:
        """The peers that have not started `operation`, as far as that is known."""
        return ()

    def _overdue(self, operation: Operation[Any]) -> PeerLost:
        return PeerLost((), operation.verb, f"no answer within the deadline of {self._timeout_seconds:g} s")

    def _communicator(self) -> Communicator:
        """This channel as a communicator."""
        raise NotImplementedError

    def _pause(self, attempt: int, operation: Operation[Any]) -> None:
        raise NotImplementedError

    def _notify_peers(self, error: CommunicationError) -> None:
        """Notify the peers that this channel has failed, if that is possible without waiting for them."""
