"""The training loop: one step, top to bottom, on one page.

    batches(step) ─► forward ─► loss ─► backward ──gradient──► synchronizer ═══ the other workers
                                                                    ║
    record ◄── checkpoint ◄── optimizer ◄── apply ◄── guard ◄── the mean

Until `apply` nothing that is shared or lasts has changed.
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
from unisono.data import Loader, Turn, seed_compute, stream
from unisono.elastic.control_word import ControlWord, heard, numbers
from unisono.elastic.presence import Presence
from unisono.elastic.snapshot import Snapshot
from unisono.elastic.state_transfer import Progress
from unisono.errors import InvalidInput
from unisono.layout import MicroBatchPart
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
    """Everything that one worker trains with, already bound; `run` is the loop.

    Args:
        forward: ``forward(model, batch) -> output``.
        loss: ``loss(output, batch)``, a scalar.
        passage: the context in which a micro-batch is computed, which knows what of it is this worker's.
        weight: what a batch counts in the mean over the global batch.
        move: brings a batch to the model's device.
        guard: says of each step whether it counts.
        balance: which micro-batches of a step this worker computes, as fast as workers were found to be.
        factor: the learning rate's factor at a step.
        presence: who is there; all workers stop, or end what they do together, after the same step.
        watch: is told what this worker does.
        keep: called where all have met, when the weights are those: with whether the workers present change now.
        milestone: where replicas that walk by themselves go back to when one is lost; then only those steps count after
            which all have met.
    """

    model: nn.Module
    replica: Replica
    loader: Loader
    comm: Communicator
    record: Recorder
    persistence: Checkpointer
    learning_rate: LearningRate
    evaluator: Evaluator | None
    forward: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], torch.Tensor]
    passage: MicroBatchPart
    weight: Callable[[Batch], float]
    move: Callable[[Batch], Batch]
    seed: int
    guard: StepValidator
    balance: LoadBalancer
    lr_factor: Callable[[int], float]
    steps: int
    global_batch: int
    evaluate_every: int
    presence: Presence
    watch: ActivityTracker = field(default_factory=NullTracker)
    on_commit: Callable[[bool], None] = lambda parting: None
    milestone: Snapshot | None = None
    step_seconds: list[float] = field(default_factory=list)
    last_loss: float = math.nan
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    done: int = 0
    held: int = 0
    evaluated: int = 0
    seconds: float = 0.0
    evaluating_seconds: float = 0.0
    stopping: bool = False
    parting: bool = False

    def run(self, first_step: int) -> Outcome:
        """Train steps ``first_step .. steps - 1``, or up to where the workers present change (`parting`). Raises
        `Diverged`, `PeerLost`, and what user code raises; the model is then as the last step done left it, once
        `let_go` has been called."""
        self.model.train()
        self.watch.set_phase(Phase.COMPUTE, self.comm, self.loader)
        self.done = self.held = self.evaluated = first_step
        began = self.comm.now()
        while not self.finished():
            dealt, turns = self.work_items()
            for t, mine, batches in turns:
                started = self.comm.now()

                self.learning_rate.set(self.lr_factor(t))
                with self.balance.measured(len(mine)):
                    self.run_micro_batches(t, mine, batches)
                with self.watch(Phase.COMMUNICATION):
                    step = self.replica.settle()
                sound, done = self.guard(t, step, self.find_nonfinite)
                if sound:
                    with self.watch(Phase.CHECKPOINT):
                        self.persistence.wait_staged()
                    self.presence.check()
                    step.apply()
                    self.last_loss = step.loss
                if self.milestone is None:
                    self.presence.done()
                if done <= t:  # the state is another now
                    self.done = done
                    self.balance.shares.go_back(done)
                    break

                self.done = max(self.done, done)
                if self.milestone is None:
                    self.watch.commit(self.done)
                self.presence.stepped()
                self.record.step(self.done, self.steps, partial(self._told, step.loss, self.comm.now() - started))
                words = step.extra
                if words is not None:
                    self.act_on_control(words)
                    self.commit_synchronized()
                self.step_seconds.append(self.comm.now() - started)
                if words is not None:
                    self.evaluate_if_due()
                if self.stopping or self.parting:
                    break
            if dealt:
                self.gather_control(self.replica.leased_until)
        self.seconds = self.comm.now() - began - self.evaluating_seconds
        if not self.parting:
            self.finish()
        return Outcome(self.done, self.last_loss, self.last_metrics, statistics.median(self.step_seconds or [0.0]))

    def finish(self) -> None:
        """After the last step: the last checkpoint, the last evaluation."""
        self.watch.set_phase(Phase.CHECKPOINT, self.comm)
        self.replica.synchronize()
        self.commit_synchronized()
        self.guard.finish(self.done)
        self.persistence.finish(self.done)
        if self.evaluator and self.done == self.steps:
            self.evaluate()

    def unbind(self) -> None:
        """Leave model and optimizer to the next trainer, as the last step done left them."""
        self.replica.discard_step()
        self.replica.unbind()
        self.learning_rate.set(1.0)

    def finished(self) -> bool:
        """Whether all steps are taken, or all workers have heard that one was asked to stop, or that others come or
        go."""
        return self.stopping or self.parting or self.done >= self.steps

    def work_items(self) -> tuple[bool, Iterator[Turn]]:
        """This worker's work: steps, and its own micro-batches of each. Where work is dealt out as it is asked for,
        only as far as the step after which everybody has to meet; else all the rest."""
        due = [n * (self.done // n + 1) for n in (self.persistence.every, self.evaluate_every) if n]
        shares = self.replica.work_items(self.done, min([self.steps, *due]), lambda: self.presence.stop)
        if shares is None:
            mine = self.balance.shares.mine
            return False, ((t, mine(t), self.loader.batches(t)) for t in range(self.done, self.steps))
        return True, iter(self.watch.each(Phase.COMMUNICATION, self.loader.turns(shares)))

    def gather_control(self, dealt: int) -> None:
        """All that was dealt out, to before step `dealt`, is computed, here; wait for the others."""
        mine = torch.tensor(self.control_word(), dtype=torch.float64)
        self.done = dealt
        with self.watch(Phase.COMMUNICATION):
            words = self.comm.gather(mine).wait().sum(0).tolist()
        self.act_on_control(words)
        self.commit_synchronized()
        self.evaluate_if_due()

    def control_word(self) -> list[float]:
        """This worker's numbers for the control word."""
        now = self.presence
        said = ControlWord(
            stop=now.stop, written=self.persistence.share_status, parting=now.parting, leaving=now.leaving,
            pace=self.balance.pace, digest=self.guard.digest)  # fmt: skip
        return numbers(said, self.comm.rank, self.comm.size)

    def act_on_control(self, words: Sequence[float]) -> None:
        """All workers are between the same two steps, and have said `words`."""
        said = heard(words)
        parting = any(each.parting for each in said)
        with self.watch(Phase.CHECKPOINT):
            if self.persistence.due(self.done):
                self.replica.synchronize()
            self.persistence.after_step(self.done, [each.written for each in said], take=not parting)
        self.stopping = any(each.stop for each in said) or all(each.leaving for each in said)
        # What is being written would be lost: its workers finish it first.
        self.parting = parting and not (self.stopping or self.persistence.pending or self.done >= self.steps)
        if self.parting:  # who leaves leaves its share of what all have come to
            self.replica.synchronize()
        self.guard.between(self.done)
        self.balance.hear(self.done, [each.pace for each in said])
        if self.balance.leave_asked:
            self.presence.leave()

    def commit_synchronized(self) -> None:
        """All have met: where they walk by themselves, what they have now counts."""
        if self.milestone is not None:
            replica = self.replica
            replica.quiesce()
            reached = Progress(self.done, self.persistence.committed, replica.state_dict(), self.last_loss)
            self.milestone.take(replica.model, replica.optimizer, reached)
            self.presence.done(self.done - self.held)
            self.watch.commit(self.done)
            self.held = self.done
        with self.watch(Phase.CHECKPOINT):
            self.on_commit(self.parting)

    def evaluate_if_due(self) -> None:
        """Evaluate if it was due since the last time; what is due after the last step comes at the end."""
        every = self.evaluate_every
        if self.evaluator and every and self.done < self.steps and self.done // every > self.evaluated // every:
            self.evaluate()

    def run_micro_batches(self, t: int, mine: range, batches: Iterable[tuple[int, Batch]]) -> None:
        """Forward and backward of this worker's micro-batches of step `t`."""
        for m, batch in self.watch.each(Phase.DATA, batches):
            self.presence.check()  # what nobody waits for any more is not computed
            self.watch.set_position(t, m)
            self.run_micro_batch(t, m, self.move(batch), last=m == mine[-1])

    def run_micro_batch(self, t: int, m: int, batch: Batch, *, last: bool) -> None:
        """Forward and backward of micro-batch `m` of step `t`; its gradients go to the synchronizer as they come.
        `last` of this worker in this step."""
        seed_compute(stream(self.seed, t, m, "compute"))
        self.replica.begin_micro_batch(m, checked_weight(self.weight(batch)))
        with self.passage(batch, self.loss) as (mine, loss_of):
            loss = loss_of(self.forward(self.model, mine), mine)
            check_loss(loss)
            self.replica.end_forward(float(loss.detach()), last=last, extra=self.control_word() if last else [])
            self.replica.backward(loss)

    def find_nonfinite(self, t: int) -> list[int]:
        """The micro-batches of step `t` whose gradient is not finite, found by computing each once more; all workers
        call it alike, before the step is dropped. None where replicas lie on several workers or walk by themselves."""
        if self.replica.spread or not self.replica.synchronous:
            return []
        steep = torch.zeros(self.replica.micro_batches)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for m, batch in self.loader.batches(t):
            seed_compute(stream(self.seed, t, m, "compute"))
            self.replica.before()
            given = self.move(batch)
            loss = self.loss(self.forward(self.model, given), given)
            found = [g for g in torch.autograd.grad(loss, parameters, allow_unused=True) if g is not None]
            steep[m] = not all(bool(torch.isfinite(g.coalesce().values() if g.is_sparse else g).all()) for g in found)
        return self.comm.gather(steep).wait().sum(0).nonzero().view(-1).tolist()

    def _told(self, loss: float, seconds: float) -> Mapping[str, Any]:
        return {"loss": loss, "step_seconds": seconds, "samples_per_second": self.global_batch / seconds}

    def evaluate(self) -> None:
        """Metrics on held-out data of what the replicas agree on."""
        assert self.evaluator is not None
        began = self.comm.now()
        with self.watch(Phase.EVALUATION), self.replica.averaged_weights():
            self.last_metrics = self.evaluator(self.model)
            self.replica.held.gathering.let_go()
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
    """Raise `InvalidInput` if there is nothing that backward could start from."""
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
    """What the loop knows at its end: steps done in all, the last loss, the last metrics, the median step."""

    steps: int
    loss: float
    metrics: Mapping[str, float]
    step_seconds_median: float
