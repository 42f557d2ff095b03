"""The training loop: one step, top to bottom, on one page.

    batches(step) ─► forward ─► loss ─► backward ──gradient──► synchronizer ═══ the other workers
                                                                    ║
    record ◄── checkpoint ◄── optimizer ◄── apply ◄── check ◄── the mean

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

from unisono.balance import Balance
from unisono.comm import Communicator
from unisono.data import Loader, Turn, seed_compute, stream
from unisono.errors import InvalidInput
from unisono.evaluate import Evaluator
from unisono.layout import Passage
from unisono.observe import Recorder
from unisono.optimizer import LearningRate
from unisono.persist import Persistence
from unisono.replica import Replica
from unisono.said import Said, heard, numbers
from unisono.task import Batch


@dataclass
class Trainer:
    """Everything that one worker trains with, already bound; `run` is the loop.

    Args:
        forward: ``forward(model, batch) -> output``.
        loss: ``loss(output, batch)``, a scalar.
        passage: the context in which a micro-batch is computed, which knows what of it is this worker's.
        weight: what a batch counts in the mean over the global batch.
        move: brings a batch to the model's device.
        balance: which micro-batches of a step this worker computes, as fast as workers were found to be.
        factor: the learning rate's factor at a step.
        stop_asked: True once this worker was asked to stop; all workers then stop after the same step.
    """

    model: nn.Module
    replica: Replica
    loader: Loader
    comm: Communicator
    record: Recorder
    persistence: Persistence
    learning_rate: LearningRate
    evaluator: Evaluator | None
    forward: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], torch.Tensor]
    passage: Passage
    weight: Callable[[Batch], float]
    move: Callable[[Batch], Batch]
    seed: int
    balance: Balance
    factor: Callable[[int], float]
    steps: int
    global_batch: int
    evaluate_every: int
    stop_asked: Callable[[], bool]
    step_seconds: list[float] = field(default_factory=list)
    last_loss: float = math.nan
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    done: int = 0
    evaluated: int = 0
    seconds: float = 0.0
    evaluating_seconds: float = 0.0
    stopping: bool = False

    def run(self, first_step: int) -> Outcome:
        """Train steps ``first_step .. steps - 1``. Raises `Diverged`, `PeerLost`, and what user code raises."""
        self.model.train()
        self.done = self.evaluated = first_step
        began = self.comm.now()
        while not self.over():
            dealt, turns = self.turns()
            for t, mine, batches in turns:
                started = self.comm.now()

                self.learning_rate.set(self.factor(t))
                with self.balance.measured(len(mine)):
                    self.compute_all(t, mine, batches)
                step = self.replica.settle()
                step.check_finite(t, partial(self.balance.shares.worker_of, t))
                self.persistence.before_change()
                step.apply()

                self.last_loss, self.done = step.loss, max(self.done, t + 1)
                self.record.step(self.done, self.steps, partial(self._told, step.loss, self.comm.now() - started))
                words = step.extra
                if words is not None:
                    self.meet(words)
                self.step_seconds.append(self.comm.now() - started)
                if words is not None:
                    self.evaluate_if_due()
                if self.stopping:
                    break
            if dealt:
                self.meet_after(self.replica.dealt)
        self.seconds = self.comm.now() - began - self.evaluating_seconds
        self.replica.meet()
        self.persistence.finish(self.done)
        if self.evaluator and self.done == self.steps:
            self.evaluate()
        return Outcome(self.done, self.last_loss, self.last_metrics, statistics.median(self.step_seconds or [0.0]))

    def over(self) -> bool:
        """Whether all steps are taken, or all workers have heard that one was asked to stop."""
        return self.stopping or self.done >= self.steps

    def turns(self) -> tuple[bool, Iterator[Turn]]:
        """This worker's work: steps, and its own micro-batches of each. Where work is dealt out as it is asked for,
        only as far as the step after which everybody has to meet; else all the rest."""
        due = [n * (self.done // n + 1) for n in (self.persistence.every, self.evaluate_every) if n]
        shares = self.replica.shares(self.done, min([self.steps, *due]), self.stop_asked)
        if shares is None:
            mine = self.balance.shares.mine
            return False, ((t, mine(t), self.loader.batches(t)) for t in range(self.done, self.steps))
        return True, self.loader.turns(shares)

    def meet_after(self, dealt: int) -> None:
        """All that was dealt out, to before step `dealt`, is computed, here; wait for the others."""
        mine = torch.tensor(self.says(), dtype=torch.float64)
        self.done = dealt
        self.meet(self.comm.gather(mine).wait().sum(0).tolist())
        self.evaluate_if_due()

    def says(self) -> list[float]:
        """This worker's numbers for the control word."""
        said = Said(stop=self.stop_asked(), written=self.persistence.outcome, pace=self.balance.pace)
        return numbers(said, self.comm.rank, self.comm.size)

    def meet(self, words: Sequence[float]) -> None:
        """All workers are between the same two steps, and have said `words`."""
        said = heard(words)
        if self.persistence.due(self.done):
            self.replica.meet()
        self.persistence.after_step(self.done, [each.written for each in said])
        self.stopping = any(each.stop for each in said)
        self.balance.hear(self.done, [each.pace for each in said])

    def evaluate_if_due(self) -> None:
        """Evaluate if it was due since the last time; what is due after the last step comes at the end."""
        every = self.evaluate_every
        if self.evaluator and every and self.done < self.steps and self.done // every > self.evaluated // every:
            self.evaluate()

    def compute_all(self, t: int, mine: range, batches: Iterable[tuple[int, Batch]]) -> None:
        """Forward and backward of this worker's micro-batches of step `t`."""
        for m, batch in batches:
            self.compute(t, m, self.move(batch), last=m == mine[-1])

    def compute(self, t: int, m: int, batch: Batch, *, last: bool) -> None:
        """Forward and backward of micro-batch `m` of step `t`; its gradients go to the synchronizer as they come.
        `last` of this worker in this step."""
        seed_compute(stream(self.seed, t, m, "compute"))
        self.replica.enter(m, checked_weight(self.weight(batch)))
        with self.passage(batch, self.loss) as (mine, loss_of):
            loss = loss_of(self.forward(self.model, mine), mine)
            check_loss(loss)
            self.replica.leave(float(loss.detach()), last=last, extra=self.says() if last else [])
            self.replica.backward(loss)

    def _told(self, loss: float, seconds: float) -> Mapping[str, Any]:
        return {"loss": loss, "step_seconds": seconds, "samples_per_second": self.global_batch / seconds}

    def evaluate(self) -> None:
        """Metrics on held-out data of what the replicas agree on."""
        assert self.evaluator is not None
        began = self.comm.now()
        with self.replica.shared():
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
