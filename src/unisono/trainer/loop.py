"""The training loop: one step, top to bottom, on one page.

    batches(step) ─► forward ─► loss ─► backward ──gradient──► synchronizer ═══ the other workers
                                                                    ║
    record ◄── checkpoint ◄── optimizer ◄── apply ◄── validator ◄── mean gradient

Until `apply`, no shared or lasting state has changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.comm import Communicator
from unisono.data import Loader, WorkItem, seed_compute, stream
from unisono.elastic.control_word import ControlWord, decode, encode
from unisono.elastic.recovery import Recovery
from unisono.elastic.session import Session
from unisono.elastic.state_transfer import Progress
from unisono.elastic.training_state import TrainingState
from unisono.errors import InvalidInput
from unisono.layout import MicroBatchContext
from unisono.observe import ActivityTracker, NullTracker, Recorder
from unisono.observe.activity import Phase
from unisono.tensors.batch import Batch
from unisono.trainer.checkpointing import Checkpointer
from unisono.trainer.evaluation import Evaluator
from unisono.trainer.load_balance import LoadBalancer
from unisono.trainer.optimizer import LearningRate
from unisono.trainer.replica import Replica
from unisono.trainer.step_validation import StepValidator


@dataclass
class Trainer:
    """What one worker trains with, bound to its view; `run` is the loop.

    Args:
        forward: ``forward(model, batch) -> output``.
        loss: ``loss(output, batch)``, a scalar.
        micro_batch_part: the context in which a micro-batch is computed; it yields the part that this worker computes.
        weight: the weight of a batch in the mean over the global batch.
        to_device: copies a batch to the model's device.
        validator: decides whether a step counts.
        load_balancer: the micro-batches of a step that this worker computes, from the measured speed of all workers.
        lr_factor: the learning rate's factor at a step.
        session: the membership of this worker. All workers stop, or leave the view, after the same step.
        tracker: records what this worker does.
        state: model, optimizer and progress. Where it keeps a snapshot, steps are committed when replicas synchronize.
        recovery: keeps what other workers need after a loss.
    """

    model: nn.Module
    replica: Replica
    loader: Loader
    comm: Communicator
    record: Recorder
    checkpointer: Checkpointer
    learning_rate: LearningRate
    evaluator: Evaluator | None
    forward: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], torch.Tensor]
    micro_batch_part: MicroBatchContext
    weight: Callable[[Batch], float]
    to_device: Callable[[Batch], Batch]
    seed: int
    validator: StepValidator
    load_balancer: LoadBalancer
    lr_factor: Callable[[int], float]
    steps: int
    global_batch: int
    evaluate_every: int
    session: Session
    state: TrainingState
    recovery: Recovery
    tracker: ActivityTracker = field(default_factory=NullTracker)
    step_seconds: list[float] = field(default_factory=list)
    last_loss: float = math.nan
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    done: int = 0
    committed: int = 0
    evaluated: int = 0
    seconds: float = 0.0
    evaluating_seconds: float = 0.0
    stopping: bool = False
    view_ending: bool = False

    def run(self) -> Outcome:
        """Train from the progress of `state` to step ``steps - 1``, or until the view ends (`view_ending`).

        Raises:
            Diverged, PeerLost: or any error of user code. After `unbind`, the model is in the state after the last
                completed step.
        """
        self.model.train()
        self.tracker.set_phase(Phase.COMPUTE, self.comm, self.loader)
        self.done = self.committed = self.evaluated = self.state.progress.steps
        self.last_loss = self.state.progress.loss
        began = self.comm.now()
        while not self.finished():
            dealt, turns = self.work_items()
            for t, mine, batches in turns:
                started = self.comm.now()

                self.learning_rate.set(self.lr_factor(t))
                with self.load_balancer.measured(len(mine)):
                    self.run_micro_batches(t, mine, batches)
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
                self.record.step(self.done, self.steps, partial(self._told, step.loss, self.comm.now() - started))
                words = step.extra
                if words is not None:
                    self.act_on_control(words)
                    self.commit_synchronized()
                self.step_seconds.append(self.comm.now() - started)
                if words is not None:
                    self.evaluate_if_due()
                if self.stopping or self.view_ending:
                    break
            if dealt:
                self.gather_control(self.replica.leased_until)
        self.seconds = self.comm.now() - began - self.evaluating_seconds
        if not self.view_ending:
            self.finish()
        return Outcome(self.done, self.last_loss, self.last_metrics, statistics.median(self.step_seconds or [0.0]))

    def finish(self) -> None:
        """Write the last checkpoint and evaluate, after the last step."""
        self.tracker.set_phase(Phase.CHECKPOINT, self.comm)
        self.replica.synchronize()
        self.commit_synchronized()
        self.validator.finish(self.done)
        self.checkpointer.finish(self.done)
        if self.evaluator and self.done == self.steps:
            self.evaluate()

    @property
    def commits_late(self) -> bool:
        """Whether steps are committed at the next synchronization only."""
        return self.state.snapshot is not None

    def committed_progress(self) -> Progress:
        """The steps that are committed; without recovery from local steps, those that are in the model."""
        return self.state.progress if self.commits_late else self._progress(self.replica.synchronous)

    def _progress(self, with_shared: bool = True) -> Progress:
        shared = self.replica.state_dict() if with_shared else {}
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
        due = [n * (self.done // n + 1) for n in (self.checkpointer.every, self.evaluate_every) if n]
        shares = self.replica.work_items(self.done, min([self.steps, *due]), lambda: self.session.stop_requested)
        if shares is None:
            mine = self.load_balancer.shares.mine
            return False, ((t, mine(t), self.loader.batches(t)) for t in range(self.done, self.steps))
        return True, iter(self.tracker.each(Phase.COMMUNICATION, self.loader.work_items(shares)))

    def gather_control(self, dealt: int) -> None:
        """Collective: exchange control words, once the items that this worker has leased, of steps before `dealt`, are
        computed."""
        mine = torch.tensor(self.control_word(), dtype=torch.float64)
        self.done = dealt
        with self.tracker(Phase.COMMUNICATION):
            words = self.comm.gather(mine).wait().sum(0).tolist()
        self.act_on_control(words)
        self.commit_synchronized()
        self.evaluate_if_due()

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
        self.load_balancer.hear(self.done, [word.pace for word in every])
        if self.load_balancer.leave_asked:
            self.session.leave()

    def commit_synchronized(self) -> None:
        """Commit the steps since the last synchronization, where replicas have just synchronized."""
        if self.commits_late:
            self.replica.quiesce()
            self.state.commit(progress=self._progress())
            self.session.committed(self.done - self.committed)
            self.tracker.commit(self.done)
            self.committed = self.done
        with self.tracker(Phase.CHECKPOINT):
            self.recovery.committed(self.committed_progress, view_ending=self.view_ending)

    def evaluate_if_due(self) -> None:
        """Evaluate if it became due since the last evaluation. After the last step, `finish` evaluates."""
        every = self.evaluate_every
        if self.evaluator and every and self.done < self.steps and self.done // every > self.evaluated // every:
            self.evaluate()

    def run_micro_batches(self, t: int, mine: range, batches: Iterable[tuple[int, Batch]]) -> None:
        """Forward and backward of this worker's micro-batches of step `t`."""
        for m, batch in self.tracker.each(Phase.DATA, batches):
            self.session.check()  # no worker waits for this micro-batch after the view has ended
            self.tracker.set_position(t, m)
            self.run_micro_batch(t, m, self.to_device(batch), last=m == mine[-1])

    def run_micro_batch(self, t: int, m: int, batch: Batch, *, last: bool) -> None:
        """Forward and backward of micro-batch `m` of step `t`; gradients go to the synchronizer during backward.
        `last`: of this worker in this step."""
        seed_compute(stream(self.seed, t, m, "compute"))
        self.replica.begin_micro_batch(m, checked_weight(self.weight(batch)))
        with self.micro_batch_part(batch, self.loss) as (mine, loss_of):
            loss = loss_of(self.forward(self.model, mine), mine)
            check_loss(loss)
            self.replica.end_forward(float(loss.detach()), last=last, extra=self.control_word() if last else [])
            self.replica.backward(loss)

    def find_nonfinite(self, t: int) -> list[int]:
        """Collective, before step `t` is dropped: the micro-batches whose gradient is not finite.

        Each is computed once more. Empty with sharded replicas and with local steps, where it is not known.
        """
        if self.replica.spread or not self.replica.synchronous:
            return []
        nonfinite = torch.zeros(self.replica.micro_batches)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for m, batch in self.loader.batches(t):
            seed_compute(stream(self.seed, t, m, "compute"))
            self.replica.before()
            given = self.to_device(batch)
            loss = self.loss(self.forward(self.model, given), given)
            found = [g for g in torch.autograd.grad(loss, parameters, allow_unused=True) if g is not None]
            nonfinite[m] = not all(
                bool(torch.isfinite(g.coalesce().values() if g.is_sparse else g).all()) for g in found
            )
        return self.comm.gather(nonfinite).wait().sum(0).nonzero().view(-1).tolist()

    def _told(self, loss: float, seconds: float) -> Mapping[str, Any]:
        return {"loss": loss, "step_seconds": seconds, "samples_per_second": self.global_batch / seconds}

    def evaluate(self) -> None:
        """Measure the metrics of the averaged weights on held-out data."""
        assert self.evaluator is not None
        began = self.comm.now()
        with self.tracker(Phase.EVALUATION), self.replica.averaged_weights():
            self.last_metrics = self.evaluator(self.model)
            self.replica.held.unsharding.reshard()
        self.evaluating_seconds += self.comm.now() - began
        self.evaluated = self.done
        self.record.metrics(self.done, self.last_metrics)


def checked_weight(weight: Any) -> float:
    """`weight` as a number. Raises `InvalidInput` if no mean can be taken with it."""
    number = float(weight)
    if not 0 <= number < math.inf:
        raise InvalidInput("weight", number, "a batch cannot count that much", "return a finite number from 0")
    return number


def check_loss(loss: Any) -> None:
    """Raise `InvalidInput` if `loss` is no scalar with a gradient."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f"{type(loss).__name__}{list(loss.shape) if isinstance(loss, torch.Tensor) else ''}"
        raise InvalidInput(
            "loss", shape, "not a single number", "return the mean over the batch, a tensor of one element"
        )
    if not loss.requires_grad:
        raise InvalidInput("loss", "a tensor without a gradient", "it does not depend on the model's parameters",
                           "compute it from the output, without detach() or no_grad()")  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The result of the loop: completed steps, last loss and metrics, median seconds per step."""

    steps: int
    loss: float
    metrics: Mapping[str, float]
    step_seconds_median: float
