"""The training loop: one step, top to bottom, on one page.

    batches(step) ─► forward ─► loss ─► backward ──gradient──► synchronizer ═══ the other workers
                                                                    ║
    record ◄── checkpoint ◄── optimizer ◄── apply ◄── validator ◄── mean gradient

Until `apply`, no shared or lasting state has changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unisono.data import Loader, WorkItem
from unisono.elastic.control_word import ControlWord, decode, encode
from unisono.elastic.state_transfer import Progress
from unisono.observe.activity import Phase
from unisono.tasks.lr_schedules import Constant, factor_of
from unisono.trainer.context import RunContext
from unisono.trainer.evaluation import EvaluationSchedule
from unisono.trainer.load_balance import LoadBalancer
from unisono.trainer.micro_batches import MicroBatchRunner
from unisono.trainer.optimizer import LearningRate
from unisono.trainer.replica import Replica
from unisono.trainer.step_validation import StepValidator


class Trainer:
    """What one worker trains with, bound to its view; `run` is the loop.

    Attributes:
        step_seconds: of each step that was taken.
        done: steps that are in the model.
        committed: steps that no loss of a worker can undo.
        stopping: all workers know that one was asked to stop.
        view_ending: all workers know that the view ends.
    """

    def __init__(
        self,
        context: RunContext,
        replica: Replica,
        loader: Loader,
        runner: MicroBatchRunner,
        validator: StepValidator,
        load_balancer: LoadBalancer,
        evaluation: EvaluationSchedule,
    ) -> None:
        self.replica, self.loader, self.runner, self.validator = replica, loader, runner, validator
        self.load_balancer, self.evaluation = load_balancer, evaluation
        self.session, self.state, self.recovery = context.session, context.state, context.recovery
        self.checkpointer, self.record, self.tracker = context.checkpointer, context.record, context.tracker
        self.comm, self.model = context.groups.world, replica.local.model
        self.steps, self.global_batch = context.feed.steps, context.feed.plan.global_batch
        self._schedule = context.config.schedule or context.task.schedule or Constant()
        self.learning_rate = LearningRate(replica.optimizer, context.config.lr)
        self.step_seconds = list[float]()
        self.done = self.committed = self.state.progress.steps
        self.last_loss, self.seconds = self.state.progress.loss, 0.0
        self.stopping = self.view_ending = False

    def run(self) -> Outcome:
        """Train from the progress of `state` to step ``steps - 1``, or until the view ends (`view_ending`).

        Raises:
            Diverged, PeerLost: or any error of user code. After `unbind`, the model is in the state after the last
                completed step.
        """
        self.model.train()
        self.tracker.set_phase(Phase.COMPUTE, self.comm, self.loader)
        self.evaluation.begin(self.done)
        began = self.comm.now()
        while not self.finished():
            leased, items = self.work_items()
            for t, mine, batches in items:
                started = self.comm.now()

                self.learning_rate.set(factor_of(self._schedule, t, self.steps))
                with self.load_balancer.measured(len(mine)):
                    self.runner.run(t, mine, batches, self.control_word)
                with self.tracker(Phase.COMMUNICATION):
                    step = self.replica.settle()
                sound, done = self.validator(t, step, self.find_nonfinite)
                if sound:
                    with self.tracker(Phase.CHECKPOINT):
                        self.checkpointer.wait_staged()
                    self.session.check()
                    step.apply()
                    self.last_loss = step.loss
                if not self.commits_late:
                    self.session.committed()
                if done <= t:  # the step was rolled back
                    self.done = done
                    self.load_balancer.shares.roll_back(done)
                    break

                self.done = max(self.done, done)
                if not self.commits_late:
                    self.tracker.commit(self.done)
                self.session.stepped()
                self.record.step(self.done, self.steps, partial(self._figures, step.loss, self.comm.now() - started))
                words = step.extra
                if words is not None:
                    self.act_on_control(words)
                    self.commit_synchronized()
                self.step_seconds.append(self.comm.now() - started)
                if words is not None:
                    self.evaluation.run_if_due(self.done)
                if self.stopping or self.view_ending:
                    break
            if leased:
                self.gather_control(self.replica.sync.leased_until)
        self.seconds = self.comm.now() - began - self.evaluation.seconds
        if not self.view_ending:
            self.finish()
        return Outcome(
            self.done, self.last_loss, self.evaluation.metrics, statistics.median(self.step_seconds or [0.0])
        )

    def finish(self) -> None:
        """Write the last checkpoint and evaluate, after the last step."""
        self.tracker.set_phase(Phase.CHECKPOINT, self.comm)
        self.replica.synchronize()
        self.commit_synchronized()
        self.validator.finish(self.done)
        self.checkpointer.finish(self.done)
        if self.done == self.steps:
            self.evaluation.run(self.done)

    @property
    def commits_late(self) -> bool:
        """Whether steps are committed at the next synchronization only."""
        return self.state.snapshot is not None

    def committed_progress(self) -> Progress:
        """The steps that are committed; without recovery from local steps, those that are in the model."""
        return self.state.progress if self.commits_late else self._progress(self.replica.synchronous)

    def _progress(self, with_shared: bool = True) -> Progress:
        shared = self.replica.sync.state_dict() if with_shared else {}
        return Progress(self.done, self.checkpointer.committed, shared, self.last_loss)

    def unbind(self) -> None:
        """Detach model and optimizer, in the state after the last completed step, so that another trainer may be built
        on them."""
        self.replica.discard_step()
        self.replica.unbind()
        self.learning_rate.set(1.0)

    def finished(self) -> bool:
        """Whether all steps are taken, or all workers know that a worker was asked to stop or that the view ends."""
        return self.stopping or self.view_ending or self.done >= self.steps

    def work_items(self) -> tuple[bool, Iterator[WorkItem]]:
        """Whether work is leased, and this worker's work items.

        Leased items end with the step before the next synchronization of all workers; else all steps are left.
        """
        due = [n * (self.done // n + 1) for n in (self.checkpointer.every, self.evaluation.every) if n]
        shares = self.replica.sync.work_items(self.done, min([self.steps, *due]), lambda: self.session.stop_requested)
        if shares is None:
            mine = self.load_balancer.shares.mine
            return False, ((t, mine(t), self.loader.batches(t)) for t in range(self.done, self.steps))
        return True, iter(self.tracker.each(Phase.COMMUNICATION, self.loader.work_items(shares)))

    def gather_control(self, leased: int) -> None:
        """Collective: exchange control words, once the items that this worker has leased, of steps before `leased`, are
        computed."""
        mine = torch.tensor(self.control_word(), dtype=torch.float64)
        self.done = leased
        with self.tracker(Phase.COMMUNICATION):
            words = self.comm.gather(mine).wait().sum(0).tolist()
        self.act_on_control(words)
        self.commit_synchronized()
        self.evaluation.run_if_due(self.done)

    def control_word(self) -> list[float]:
        """This worker's part of the control word."""
        asked = self.session
        word = ControlWord(
            stop=asked.stop_requested, written=self.checkpointer.share_status, end_view=asked.view_end_requested,
            leave=asked.leave_requested, pace=self.load_balancer.pace, digest=self.validator.digest)  # fmt: skip
        return encode(word, self.comm.rank, self.comm.size)

    def act_on_control(self, words: Sequence[float]) -> None:
        """Collective, between two steps: checkpoint, stop or end the view, as the control words of all workers say."""
        every = decode(words)
        end_view = any(word.end_view for word in every)
        with self.tracker(Phase.CHECKPOINT):
            if self.checkpointer.due(self.done):
                self.replica.synchronize()
            self.checkpointer.after_step(self.done, [word.written for word in every], take=not end_view)
        self.stopping = any(word.stop for word in every) or all(word.leave for word in every)
        # A checkpoint that is being written would be lost: the view ends once it is complete.
        self.view_ending = end_view and not (self.stopping or self.checkpointer.pending or self.done >= self.steps)
        if self.view_ending:  # a worker that leaves contributes its local steps
            self.replica.synchronize()
        self.validator.between(self.done)
        self.load_balancer.update(self.done, [word.pace for word in every])
        if self.load_balancer.leave_requested:
            self.session.leave()

    def commit_synchronized(self) -> None:
        """Commit the steps since the last synchronization, where replicas have just synchronized."""
        if self.commits_late:
            self.replica.sync.quiesce()
            self.state.commit(progress=self._progress())
            self.session.committed(self.done - self.committed)
            self.tracker.commit(self.done)
            self.committed = self.done
        with self.tracker(Phase.CHECKPOINT):
            self.recovery.committed(self.committed_progress, view_ending=self.view_ending)

    def find_nonfinite(self, t: int) -> list[int]:
        """Collective, before step `t` is dropped: the micro-batches whose gradient is not finite.

        Each is computed once more. Empty with sharded replicas and with local steps, where it is not known.
        """
        if self.replica.is_sharded or not self.replica.synchronous:
            return []
        mine = self.runner.nonfinite(t, self.loader.batches(t))
        return self.comm.gather(mine).wait().sum(0).nonzero().view(-1).tolist()

    def _figures(self, loss: float, seconds: float) -> Mapping[str, Any]:
        rate = self.global_batch / seconds if seconds else math.inf  # virtual time may stand still
        return {"loss": loss, "step_seconds": seconds, "samples_per_second": rate}


@dataclass(frozen=True)
class Outcome:
    """The result of the loop: completed steps, last loss and metrics, median seconds per step."""

    steps: int
    loss: float
    metrics: Mapping[str, float]
    step_seconds_median: float
