"""Work that is dealt out as it is asked for: micro-batches in the seeded order, each to one worker.

Worker 0 hosts the dealer. Nobody waits for anybody, so a faster worker computes more; the samples of a step are what
they always are, and each is used once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from unisono.comm import Communicator, Work
from unisono.comm.service import Answer, Line, Message
from unisono.sync.synchronizer import Share


class Dealer:
    """The actor: counts micro-batches from the start of the run.

    Args:
        micro_batches: of one step.
        lease: how many of them are given out at once, at most; never of two steps.
    """

    largest_bytes = 1 << 12

    def __init__(self, micro_batches: int, lease: int) -> None:
        self._step, self._lease = micro_batches, lease
        self._stretch = self._next = self._end = 0

    def receive(self, sender: int, message: Message, answer: Answer) -> None:
        """``take``: the next share of stretch number `stretch`, which is all steps from `first` to before `until`."""
        asked = message.fields
        if asked["stretch"] > self._stretch:  # the first to ask opens it; all have left the one before
            self._stretch = asked["stretch"]
            self._next, self._end = asked["first"] * self._step, asked["until"] * self._step
        if asked["stop"]:  # what is begun of a step is dealt out to its end
            self._end = min(self._end, -(-self._next // self._step) * self._step)
        if self._next >= self._end:
            answer(Message("over", {"until": self._end // self._step}))
            return
        step, start = divmod(self._next, self._step)
        stop = min(start + self._lease, self._step)
        self._next += stop - start
        answer(Message("share", {"step": step, "start": start, "stop": stop}))

    def lost(self, sender: int) -> None:
        pass

    def meet(self, lines: object) -> None:
        pass


class Dealing:
    """One worker's end of it.

    Attributes:
        dealt: after `shares` has ended: the step before which everything is dealt out, the same on all workers.
    """

    def __init__(self, comm: Communicator, micro_batches: int) -> None:
        lease = max(1, micro_batches // comm.size)
        self._line: Line = comm.host(Dealer(micro_batches, lease))[0]
        self._stretch = self.dealt = 0

    def shares(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[Share]:
        """See `BoundSynchronizer.shares`. The next share is asked for while the last one is computed."""
        self._stretch += 1

        def ask() -> Work[Message]:
            asked = {"stretch": self._stretch, "first": first, "until": until, "stop": stop()}
            return self._line.call(Message("take", asked))

        coming = ask()
        while (answer := coming.wait()).kind == "share":
            coming = ask()
            yield answer.fields["step"], range(answer.fields["start"], answer.fields["stop"])
        self.dealt = answer.fields["until"]
