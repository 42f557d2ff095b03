"""Leases of work items: micro-batches in the seeded order, each leased to one worker at its request.

Worker 0 hosts the lease server. No worker waits for another, so a faster worker computes more. The samples of a step
are the same as without leases, and each is used once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unisono.comm import Communicator, Work
from unisono.comm.actor import Actor, ActorConnection, ActorMessage, Answer
from unisono.sync.synchronizer import WorkItem


def lease(micro_batches: int, workers: int) -> int:
    """The number of micro-batches of one lease: the largest divisor of `micro_batches` up to a worker's equal share.

    It is a divisor so that whole leases add up to `micro_batches` in any order.
    """
    return max(size for size in range(1, max(1, micro_batches // workers) + 1) if micro_batches % size == 0)


class StepRange:
    """The steps ``first .. until - 1`` of one call of `LeaseClient.work_items`, the same for all workers.

    The range ends earlier if a worker requests to stop. Workers number their calls of `work_items`, and send the number
    with each request.
    """

    def __init__(self) -> None:
        self.number = self.first = self.until = 0

    def opens(self, request: Mapping[str, Any]) -> bool:
        """Whether `request` is the first of a new range, which then replaces the previous, fully leased range."""
        if request["stretch"] <= self.number:
            return False
        self.number, self.first, self.until = request["stretch"], request["first"], request["until"]
        return True

    def is_past(self, request: Mapping[str, Any]) -> bool:
        """Whether `request` is of an earlier range, which ended where this one begins."""
        return bool(request["stretch"] < self.number)


class LeaseServer:
    """The actor that leases micro-batches, counted from the start of the run.

    Args:
        micro_batches: the number of micro-batches of one step.
        lease: the number of micro-batches of one lease, a divisor of `micro_batches`.
    """

    largest_bytes = 1 << 12

    def __init__(self, micro_batches: int, lease: int) -> None:
        self._step, self._lease = micro_batches, lease
        self._range, self._next = StepRange(), 0

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Answer ``take`` with the next work item of range number `stretch`, the steps ``first .. until - 1``."""
        steps = self._range
        if steps.opens(message.fields):
            self._next = steps.first * self._step
        if steps.is_past(message.fields):
            answer(ActorMessage("over", {"until": steps.first}))
            return
        if message.fields["stop"]:  # a step that was begun is leased to its end
            steps.until = min(steps.until, -(-self._next // self._step))
        step, start = divmod(self._next, self._step)
        if step >= steps.until:
            answer(ActorMessage("over", {"until": steps.until}))
            return
        self._next += self._lease
        answer(ActorMessage("share", {"step": step, "start": start, "stop": start + self._lease}))

    def lost(self, sender: int) -> None:
        pass

    def connected(self, connections: object) -> None:
        pass


class StepGate:
    """The actor that gives each worker its part of every step for which the worker is in time."""

    largest_bytes = 1 << 12

    def __init__(self) -> None:
        self._range, self._begun = StepRange(), 0

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Answer ``take`` with the sender's next step: `next`, or the first step of the range if that is later."""
        steps = self._range
        if steps.opens(message.fields):
            self._begun = steps.first
        if steps.is_past(message.fields):
            answer(ActorMessage("over", {"until": steps.first}))
            return
        if message.fields["stop"]:  # a step that one worker has begun is computed by all
            steps.until = min(steps.until, self._begun)
        step = max(steps.first, message.fields["next"])
        if step >= steps.until:
            answer(ActorMessage("over", {"until": steps.until}))
            return
        self._begun = max(self._begun, step + 1)
        answer(ActorMessage("share", {"step": step}))

    def lost(self, sender: int) -> None:
        pass

    def connected(self, connections: object) -> None:
        pass


class LeaseClient:
    """One worker's client of a lease server. Collective: all workers create it.

    Args:
        micro_batches: the number of micro-batches of one step.
        size: the number of micro-batches of a lease, which divides `micro_batches`; None: about a worker's equal share
            of a step.

    Attributes:
        leased_until: see `BoundSynchronizer.leased_until`.
    """

    def __init__(self, comm: Communicator, micro_batches: int, size: int | None = None) -> None:
        self._host(comm, LeaseServer(micro_batches, size or lease(micro_batches, comm.size)))

    def _host(self, comm: Communicator, actor: Actor) -> None:
        self._connection: ActorConnection = comm.host(actor)[0]
        self._request: Callable[[], dict[str, Any]] | None = None
        self._answer: Work[ActorMessage] | None = None
        self._ahead: deque[WorkItem] = deque()
        self._open: deque[WorkItem] = deque()
        self._number = self.leased_until = 0

    def work_items(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[WorkItem]:
        """See `BoundSynchronizer.work_items`."""
        self._number += 1
        self._request = lambda: {"stretch": self._number, "first": first, "until": until, "stop": stop()}
        while self._received():
            item = self._ahead.popleft()
            self._open.append(item)
            yield item

    def prepare(self) -> None:
        """Request the next item ahead of its use. An item that is requested early is not available to other workers."""
        if self._request is not None and self._answer is None and not self._ahead:
            self._answer = self._connection.call(ActorMessage("take", self._request()))

    def upcoming(self) -> WorkItem | None:
        """The item that this worker computes next, requested now if need be; None: all work is leased."""
        if self._open:
            return self._open[0]
        return self._ahead[0] if self._received() else None

    def finished(self) -> WorkItem:
        """Remove and return the oldest open item, which has been computed."""
        return self._open.popleft()

    def _received(self) -> bool:
        """Wait for the server's answer, and return whether there is an item that was not yielded yet."""
        if not self._ahead and self._request is not None:
            self.prepare()
            assert self._answer is not None
            answer, self._answer = self._answer.wait(), None
            if answer.kind == "share":
                self._ahead.append(self._item(answer.fields))
            else:
                self.leased_until, self._request = answer.fields["until"], None
        return bool(self._ahead)

    def _item(self, fields: Mapping[str, Any]) -> WorkItem:
        return fields["step"], range(fields["start"], fields["stop"])


class StepGateClient(LeaseClient):
    """One worker's client of a step gate. It computes a fixed part of each step, and skips steps for which it is late.

    Args:
        own: this worker's micro-batches of every step.
        earliest: returns the first step for which this worker can still be in time.
    """

    def __init__(self, comm: Communicator, own: range, earliest: Callable[[], int]) -> None:
        self._own, self._earliest = own, earliest
        self._next = 0
        self._host(comm, StepGate())

    def prepare(self) -> None:
        """Request the next step once the previous one is finished, because only then its weights are known."""
        if self._answer is None and self._request is not None and not self._open:
            request = self._request() | {"next": max(self._next, self._earliest())}
            self._answer = self._connection.call(ActorMessage("take", request))

    def _item(self, fields: Mapping[str, Any]) -> WorkItem:
        self._next = fields["step"] + 1
        return fields["step"], self._own
