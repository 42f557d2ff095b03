"""Recovery of sharded replicas: the shards of lost workers come from memory checkpoints on other ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from unisono.bad_steps import AnomalyDetector
from unisono.comm import Communicator
from unisono.comm.process_groups import ProcessGroups
from unisono.elastic.sharded_state import ShardedModel, ShardVersion, StateShard, distinct, reassemble
from unisono.elastic.state_transfer import Parts, Progress
from unisono.elastic.training_state import TrainingState
from unisono.elastic.transfer import MemoryCheckpoints
from unisono.membership import View

LOG = logging.getLogger("unisono")
SHARE = 0.02
"""The maximum share of the training time that memory checkpoints may take."""
LONGEST_STEPS = 1000


@dataclass
class _ViewState:
    """What `ShardedRecovery` knows of the current view.

    Args:
        version: the version of the state from which the view started.
        replica: see `StateShard`.
        copies: the memory checkpoints of this worker's shard, and of the shard of the rank whose buddy this worker is;
            None: there are no memory checkpoints.
        due: the step after which the next memory checkpoint is taken.
        taken_at, since: the step and the time of the previous memory checkpoint.
    """

    number: int
    version: ShardVersion
    replica: int | None
    sharded: ShardedModel
    comm: Communicator
    copies: MemoryCheckpoints | None
    due: int
    taken_at: int
    since: float

    def shard(self, progress: Progress, detector: AnomalyDetector) -> StateShard:
        """This worker's shard of the state; shares its tensors with the model."""
        version = (self.number, progress.steps) if progress.steps > self.version[1] else self.version
        return self.sharded.shard(version, progress, detector.state(), self.replica)


class ShardedRecovery:
    """A `Recovery` of sharded replicas: each worker has a shard of the state.

    Between two views, it holds all shards that this worker has. Within a view, it holds memory checkpoints. It also
    holds the shards of the previous view, until every worker has its new shard and a memory checkpoint of it.

    Args:
        detector: the detector of bad steps, whose history is a part of the state.
    """

    def __init__(self, detector: AnomalyDetector) -> None:
        self.detector = detector
        self._former: list[StateShard] = []
        self._view: _ViewState | None = None
        self._found: ShardVersion | None = None

    def restore(self, view: View, groups: ProcessGroups, state: TrainingState) -> bool:
        if not view.start.view:
            return False
        found = reassemble(groups.world, self._former, _sharded(state), [place.host for place in view.addresses])
        if found is None:
            return False
        self._found, state.progress, history = found
        self.detector.replace(history)
        return True

    def begin(self, view: View, groups: ProcessGroups, state: TrainingState, replica: int) -> None:
        # The first copy is taken after one step, so that soon no worker is the only one with its new shard.
        comm, steps = groups.world.channel("keeping"), state.progress.steps
        version, self._found = self._found or (view.number, steps), None
        if state.snapshot is not None:  # the replicas had different states, and now have their mean
            version = (view.number, steps)
        hosts = [place.host for place in view.addresses]
        copies = MemoryCheckpoints(groups.peer_copies, hosts) if groups.peer_copies is not None else None
        own = replica if state.snapshot is not None else None
        self._view = _ViewState(
            view.number, version, own, _sharded(state), comm, copies, steps + 1, steps, comm.now())  # fmt: skip

    def committed(self, progress: Callable[[], Progress], *, view_ending: bool) -> None:
        view, now = self._view, progress()
        assert view is not None
        if view.copies is None or (view.copies.ready and view.copies.steps()):
            self._former.clear()  # every worker has its new shard, and a copy of it if there are copies
        # A copy at the end of a view keeps the shard of a worker that leaves.
        if view.copies is not None and (view_ending or now.steps >= view.due):
            self._copy(view, view.copies, now)

    def release(self, state: TrainingState) -> None:
        state.roll_back()
        view, self._view, self._found = self._view, None, None
        if view is not None:  # otherwise the view did not start, and the shards of the previous view are still held
            kept = []
            if view.copies is not None:
                view.copies.close()
                kept = [StateShard.of_copy(each) for step in view.copies.steps() for each in view.copies.at(step)]
            # If several views in a row end before their first step, the shards of all of them are held.
            self._former = distinct([*self._former, *kept, view.shard(state.progress, self.detector)])
        state.drop_model()

    def _copy(self, view: _ViewState, copies: MemoryCheckpoints, progress: Progress) -> None:
        began = view.comm.now()
        mine = view.shard(progress, self.detector)
        copies.offer(progress.steps, mine.held, mine.meta)
        now = view.comm.now()
        costs = [now - began, (began - view.since) / (progress.steps - view.taken_at)]
        seconds = view.comm.gather(torch.tensor(costs, dtype=torch.float64)).wait()
        view.due = progress.steps + interval(float(seconds[:, 0].max()), float(seconds[:, 1].min()))
        view.taken_at, view.since = progress.steps, view.comm.now()
        LOG.debug("memory checkpoint of step %d took %.4f s; the next is due after step %d",
                  progress.steps, now - began, view.due)  # fmt: skip


def interval(cost_seconds: float, step_seconds: float) -> int:
    """The number of steps between two memory checkpoints with which these take at most `SHARE` of the time."""
    if step_seconds <= 0:
        return LONGEST_STEPS
    return min(LONGEST_STEPS, max(1, math.ceil(cost_seconds / (SHARE * step_seconds))))


def _sharded(state: TrainingState) -> ShardedModel:
    local = state.local
    return ShardedModel(state.model, Parts(local.parts, local.stepped), state.optimizer)
