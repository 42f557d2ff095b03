"""A worker's part of a replica that lies on several, from view to view: what it has of the state, and copies of it in
others' memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.bad_steps import AnomalyDetector
from unisono.comm import Communicator
from unisono.elastic.sharded_state import ShardedModel, ShardVersion, StateShard, assemble, distinct
from unisono.elastic.state_transfer import Progress
from unisono.elastic.transfer import MemoryCheckpoints

LOG = logging.getLogger("unisono")
SHARE = 0.02
"""Of the time of training, the most that goes into handing copies over."""
LONGEST_STEPS = 1000


@dataclass
class _ViewState:
    """The one at hand.

    Args:
        at: what the state was at first.
        walker: see `StateShard`.
        copies: where this worker and another one keep it too.
        due: the step after which they are to be given the next.
        told_at, since: the steps, and the time, of the one before.
    """

    number: int
    at: ShardVersion
    walker: int | None
    laid: ShardedModel
    judge: AnomalyDetector
    comm: Communicator
    copies: MemoryCheckpoints | None
    due: int
    told_at: int
    since: float

    def pieces(self, reached: Progress) -> StateShard:
        """The state that lies here, of which the model is made."""
        at = (self.number, reached.steps) if reached.steps > self.at[1] else self.at
        return self.laid.pieces(at, reached, self.judge.state(), self.walker)


class ShardedRecovery:
    """What a worker keeps beside its model: between two views all that it has of the state; within one, what it brought
    until that is not needed any more, and copies of its own part and of another worker's.

    Per view, alike on all workers: `assemble`, if there is a state already, `begin`, `after_step`, and `leave`.
    """

    def __init__(self) -> None:
        self._former: list[StateShard] = []
        self._view: _ViewState | None = None
        self._found: ShardVersion | None = None

    def assemble(
        self, comm: Communicator, laid: ShardedModel, judge: AnomalyDetector, hosts: Sequence[str]
    ) -> Progress | None:
        """See `pieces.assemble`; `judge` knows then what belongs to that state."""
        found = assemble(comm, self._former, laid, hosts)
        if found is None:
            return None
        self._found, reached, judged = found
        judge.replace(judged)
        return reached

    def begin(
        self,
        number: int,
        steps: int,
        laid: ShardedModel,
        judge: AnomalyDetector,
        comm: Communicator,
        lane: Communicator | None,
        hosts: Sequence[str],
        walker: int | None = None,
    ) -> MemoryCheckpoints | None:
        """The view of that number begins with `steps` in the state, of which `laid` is this worker's part.

        Args:
            walker: the number of its replica, where replicas walk by themselves.
            comm: of all workers, for this alone.
            lane: where copies travel; None keeps none. They are handed over after the first step, so that a worker
                that has just come is soon not the only one, and then as often as they may cost.
        """
        at, self._found = self._found or (number, steps), None
        if walker is not None:  # what was found is what each had; all have the mean now
            at = (number, steps)
        copies = MemoryCheckpoints(lane, hosts) if lane is not None else None
        self._view = _ViewState(number, at, walker, laid, judge, comm, copies, steps + 1, steps, comm.now())
        return copies

    def after_step(self, reached: Progress, *, parting: bool = False) -> None:
        """All have taken a step, or have met, after which they may be `parting`: then nothing of it is lost with who
        leaves. Raises `PeerLost`."""
        view = self._view
        assert view is not None
        if view.copies is None or (view.copies.ready and view.copies.steps()):
            self._former.clear()  # all have all that they should
        if view.copies is not None and (parting or reached.steps >= view.due):
            self._offer(view, view.copies, reached)

    def leave(self, reached: Progress) -> None:
        """The view is over, and nothing is under way any more, or it was broken off; the model is to be dropped."""
        view, self._view, self._found = self._view, None, None
        if view is None:  # it had not begun: what was brought is still here
            return
        kept = []
        if view.copies is not None:
            view.copies.close()
            kept = [StateShard.kept(each) for step in view.copies.steps() for each in view.copies.at(step)]
        # Where one view after the other breaks before its first step, each leaves what the one before has left.
        self._former = distinct([*self._former, *kept, view.pieces(reached)])

    def _offer(self, view: _ViewState, copies: MemoryCheckpoints, reached: Progress) -> None:
        began = view.comm.now()
        mine = view.pieces(reached)
        copies.offer(reached.steps, mine.held, mine.meta)
        now = view.comm.now()
        costs = [now - began, (began - view.since) / (reached.steps - view.told_at)]
        told = view.comm.gather(torch.tensor(costs, dtype=torch.float64)).wait()
        view.due = reached.steps + interval(float(told[:, 0].max()), float(told[:, 1].min()))
        view.told_at, view.since = reached.steps, view.comm.now()
        LOG.debug("copies of step %d took %.4f s; the next are due after step %d", reached.steps, now - began, view.due)


def interval(cost_seconds: float, step_seconds: float) -> int:
    """Steps from one copy to the next, so that copies take their share of the time."""
    if step_seconds <= 0:
        return LONGEST_STEPS
    return min(LONGEST_STEPS, max(1, math.ceil(cost_seconds / (SHARE * step_seconds))))
