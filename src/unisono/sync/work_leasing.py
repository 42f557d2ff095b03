"""Work that is dealt out as it is asked for: micro-batches in the seeded order, each to one worker.

Worker 0 hosts the dealer. Nobody waits for anybody, so a faster worker computes more; the samples of a step are what
they always are, and each is used once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unisono.comm import Communicator, Work
from unisono.comm.actor import Actor, ActorConnection, ActorMessage, Answer
from unisono.sync.synchronizer import Share


def lease(micro_batches: int, workers: int) -> int:
    """How many of so many micro-batches are given out at once: what divides them and is no more than a worker's part.
    Whole leases then add up to them in whatever order they are done."""
    return max(size for size in range(1, max(1, micro_batches // workers) + 1) if micro_batches % size == 0)


class Stretch:
    """The steps that are being dealt out, the same for all who ask, and their end, which comes sooner when one of them
    says stop."""

    def __init__(self) -> None:
        self.number = self.first = self.until = 0

    def opened(self, asked: Mapping[str, Any]) -> bool:
        """Whether `asked` is the first question in a new stretch: the one before is all dealt out."""
        if asked["stretch"] <= self.number:
            return False
        self.number, self.first, self.until = asked["stretch"], asked["first"], asked["until"]
        return True

    def left(self, asked: Mapping[str, Any]) -> bool:
        """Whether `asked` is of a stretch that others have left for this one, which begins where that has ended."""
        return bool(asked["stretch"] < self.number)


class LeaseServer:
    """The actor that deals out micro-batches, counted from the start of the run.

    Args:
        micro_batches: of one step.
        lease: how many of them are given out at once; divides `micro_batches`.
    """

    largest_bytes = 1 << 12

    def __init__(self, micro_batches: int, lease: int) -> None:
        self._step, self._lease = micro_batches, lease
        self._stretch, self._next = Stretch(), 0

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """``take``: the next share of stretch number `stretch`, which is all steps from `first` to before `until`."""
        stretch = self._stretch
        if stretch.opened(message.fields):
            self._next = stretch.first * self._step
        if stretch.left(message.fields):
            answer(ActorMessage("over", {"until": stretch.first}))
            return
        if message.fields["stop"]:  # what is begun of a step is dealt out to its end
            stretch.until = min(stretch.until, -(-self._next // self._step))
        step, start = divmod(self._next, self._step)
        if step >= stretch.until:
            answer(ActorMessage("over", {"until": stretch.until}))
            return
        self._next += self._lease
        answer(ActorMessage("share", {"step": step, "start": start, "stop": start + self._lease}))

    def lost(self, sender: int) -> None:
        pass

    def connected(self, lines: object) -> None:
        pass


class Turnstile:
    """The actor that lets each worker do its own part of every step, but for steps that went on without it."""

    largest_bytes = 1 << 12

    def __init__(self) -> None:
        self._stretch, self._begun = Stretch(), 0

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """``take``: the sender's next step of the stretch is `next` or, where it has just begun, `first`."""
        stretch = self._stretch
        if stretch.opened(message.fields):
            self._begun = stretch.first
        if stretch.left(message.fields):
            answer(ActorMessage("over", {"until": stretch.first}))
            return
        if message.fields["stop"]:  # who has begun a step sees it through, and so do the others
            stretch.until = min(stretch.until, self._begun)
        step = max(stretch.first, message.fields["next"])
        if step >= stretch.until:
            answer(ActorMessage("over", {"until": stretch.until}))
            return
        self._begun = max(self._begun, step + 1)
        answer(ActorMessage("share", {"step": step}))

    def lost(self, sender: int) -> None:
        pass

    def connected(self, lines: object) -> None:
        pass


class LeaseClient:
    """One worker's end: leases of a dealer.

    Args:
        micro_batches: of one step.
        size: micro-batches of a lease; a divisor of `micro_batches`. Default: about a worker's part of a step.

    Attributes:
        dealt: after `shares` has ended: the step before which everything is dealt out, the same on all workers.
    """

    def __init__(self, comm: Communicator, micro_batches: int, size: int | None = None) -> None:
        self._host(comm, LeaseServer(micro_batches, size or lease(micro_batches, comm.size)))

    def _host(self, comm: Communicator, actor: Actor) -> None:
        self._line: ActorConnection = comm.host(actor)[0]
        self._question: Callable[[], dict[str, Any]] | None = None
        self._coming: Work[ActorMessage] | None = None
        self._ahead: deque[Share] = deque()
        self._open: deque[Share] = deque()
        self._stretch = self.dealt = 0

    def shares(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[Share]:
        """See `BoundSynchronizer.work_items`."""
        self._stretch += 1
        self._question = lambda: {"stretch": self._stretch, "first": first, "until": until, "stop": stop()}
        while self._received():
            share = self._ahead.popleft()
            self._open.append(share)
            yield share

    def prepare(self) -> None:
        """Ask for the next share, so that it is there when it is due; who asks early keeps it from the others."""
        if self._question is not None and self._coming is None and not self._ahead:
            self._coming = self._line.call(ActorMessage("take", self._question()))

    def upcoming(self) -> Share | None:
        """The share that is computed next; None: everything is dealt out."""
        if self._open:
            return self._open[0]
        return self._ahead[0] if self._received() else None

    def finished(self) -> Share:
        """The share that was computed first of those not finished yet is finished."""
        return self._open.popleft()

    def _received(self) -> bool:
        """Whether there is a share that was not yielded yet, now that the dealer has answered."""
        if not self._ahead and self._question is not None:
            self.prepare()
            assert self._coming is not None
            answer, self._coming = self._coming.wait(), None
            if answer.kind == "share":
                self._ahead.append(self._share(answer.fields))
            else:
                self.dealt, self._question = answer.fields["until"], None
        return bool(self._ahead)

    def _share(self, fields: Mapping[str, Any]) -> Share:
        return fields["step"], range(fields["start"], fields["stop"])


class TakingTurns(LeaseClient):
    """One worker's end: its own part of each step, but for those that it comes too late for.

    Args:
        own: its micro-batches of every step.
        earliest: the first step that it can still be in time for.
    """

    def __init__(self, comm: Communicator, own: range, earliest: Callable[[], int]) -> None:
        self._own, self._earliest = own, earliest
        self._next = 0
        self._host(comm, Turnstile())

    def prepare(self) -> None:
        """Which step is next is known only when the weights for it are here, so nothing is asked for early."""
        if self._coming is None and self._question is not None and not self._open:
            asked = self._question() | {"next": max(self._next, self._earliest())}
            self._coming = self._line.call(ActorMessage("take", asked))

    def _share(self, fields: Mapping[str, Any]) -> Share:
        self._next = fields["step"] + 1
        return fields["step"], self._own
