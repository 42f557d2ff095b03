"""The training loop: one step, top to bottom, on one page.

    batches(step) ─► forward ─► loss ─► backward ──gradient──► synchronizer ═══ the other workers
                                                                    ║
    record ◄── checkpoint ◄── optimizer ◄── apply ◄── check ◄── the mean

Until `apply` nothing that is shared or lasts has changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.comm import Communicator
from unisono.data import Loader, seed_compute, stream
from unisono.errors import InvalidInput
from unisono.evaluate import Evaluator
from unisono.observe import Recorder
from unisono.optimizer import LearningRate
from unisono.persist import Persistence
from unisono.replica import Replica
from unisono.task import Batch


@dataclass
class Trainer:
    """Everything that one worker trains with, already bound; `run` is the loop.

    Args:
        forward: ``forward(model, batch) -> output``.
        loss: ``loss(output, batch)``, a scalar.
        weight: what a batch counts in the mean over the global batch.
        move: brings a batch to the model's device.
        mine: the micro-batches of a step that this worker computes; `worker_of` says whose one is.
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
    weight: Callable[[Batch], float]
    move: Callable[[Batch], Batch]
    seed: int
    mine: range
    worker_of: Callable[[int], int]
    factor: Callable[[int], float]
    steps: int
    global_batch: int
    evaluate_every: int
    stop_asked: Callable[[], bool]
    step_seconds: list[float] = field(default_factory=list)

    def run(self, first_step: int) -> Outcome:
        """Train steps ``first_step .. steps - 1``. Raises `Diverged`, `PeerLost`, and what user code raises."""
        self.model.train()
        loss, done, metrics = float("nan"), first_step, {}
        for t in range(first_step, self.steps):
            started = self.comm.now()

            self.learning_rate.set(self.factor(t))
            for m, batch in self.loader.batches(t):
                self.compute(t, m, self.move(batch))
            step = self.replica.settle()
            step.check_finite(t, self.worker_of)
            self.persistence.before_change()
            step.apply()

            loss, done = step.loss, t + 1
            self.record.step(done, self.steps, partial(self._told, loss, self.comm.now() - started))
            stopping = any(self.persistence.after_step(done, step.extra))
            self.step_seconds.append(self.comm.now() - started)
            if self.evaluator and self.evaluate_every and done % self.evaluate_every == 0 and done < self.steps:
                metrics = self.evaluate(done)
            if stopping:
                break
        self.persistence.finish(done)
        if self.evaluator and done == self.steps:
            metrics = self.evaluate(done)
        return Outcome(done, loss, metrics, statistics.median(self.step_seconds or [0.0]))

    def compute(self, t: int, m: int, batch: Batch) -> None:
        """Forward and backward of micro-batch `m` of step `t`; its gradients go to the synchronizer as they come."""
        seed_compute(stream(self.seed, t, m, "compute"))
        self.replica.enter(m, checked_weight(self.weight(batch)))
        loss = self.loss(self.forward(self.model, batch), batch)
        check_loss(loss)
        last = m == self.mine[-1]
        self.replica.leave(
            float(loss.detach()), last=last, extra=self.persistence.says(self.stop_asked()) if last else []
        )
        self.replica.backward(loss)

    def _told(self, loss: float, seconds: float) -> Mapping[str, Any]:
        return {"loss": loss, "step_seconds": seconds, "samples_per_second": self.global_batch / seconds}

    def evaluate(self, done: int) -> dict[str, float]:
        """Metrics on held-out data after `done` steps."""
        assert self.evaluator is not None
        metrics = self.evaluator(self.model)
        self.record.metrics(done, metrics)
        return metrics


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
