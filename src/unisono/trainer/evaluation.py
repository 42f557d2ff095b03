"""Evaluates a model on held-out data, which is divided among the workers, with exact means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from unisono.comm import Communicator
from unisono.errors import InvalidInput
from unisono.observe.activity import Phase
from unisono.tasks.task import Evaluation, Task, build_dataset, call_model
from unisono.tensors.batch import Batch, samples_in
from unisono.trainer.context import RunContext
from unisono.trainer.replica import Replica


class Evaluator:
    """Evaluates the model on batches of fixed content, which replicas take round-robin.

    Every worker adds the sums of all workers in the order of batches, so a metric has the same bits on any number of
    workers.

    Args:
        comm: a channel of all workers that nothing else uses.
        forward: called as ``forward(model, batch)``; returns None if another worker of the replica has the output.
        move: moves a batch to the device.
        replica, replicas: the number of this worker's replica, and the count of replicas. All workers of a replica
            compute its batches.
        contributes: whether this worker's sums count. Of the workers with the same output, one contributes.
    """

    def __init__(
        self,
        task: Task,
        comm: Communicator,
        forward: Callable[[Any, Batch], Any],
        move: Any,
        replica: int,
        replicas: int,
        contributes: bool = True,
    ) -> None:
        self._replica, self._replicas, self._contributes = replica, replicas, contributes
        given = task.evaluate
        self._evaluation = given if isinstance(given, Evaluation) else Evaluation(given)
        self._task, self._comm, self._forward, self._move = task, comm, forward, move
        self._data = build_dataset(self._evaluation.data)
        if not len(self._data):
            raise InvalidInput("evaluate", 0, "the evaluation data has no samples", "give it some, or leave it out")
        self._metrics = {"loss": task.loss, **self._evaluation.metrics}

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Collective: the mean of each metric over the whole evaluation data. The model's mode is restored."""
        size = self._evaluation.batch
        starts = range(0, len(self._data), size)
        table = torch.zeros(len(starts), len(self._metrics) + 1, dtype=torch.float64)
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            with torch.no_grad():  # not inference_mode: sharded parameters first gathered in it cannot be trained
                for i in range(self._replica, len(starts), self._replicas):
                    batch = self._fetch(starts[i], min(starts[i] + size, len(self._data)))
                    output = self._forward(model, batch)
                    if output is not None and self._contributes:
                        table[i] = self._measure(output, batch)
        finally:
            for module in training:  # some layers may have been in evaluation mode before
                module.training = True
        rows = self._comm.sum(table.view(-1)).wait().view(table.shape).tolist()
        total = math.fsum(row[-1] for row in rows)
        return {name: math.fsum(row[i] for row in rows) / total for i, name in enumerate(self._metrics)}

    def _fetch(self, start: int, stop: int) -> Batch:
        collate = self._task.collate or default_collate
        get_items = getattr(self._data, "__getitems__", None)
        indices = list(range(start, stop))
        return self._move(collate(get_items(indices) if get_items else [self._data[i] for i in indices]))

    def _measure(self, output: Any, batch: Batch) -> Tensor:
        """The row of one batch in the table: its weighted metrics, then its weight."""
        weight = self._task.weight(batch) if self._task.weight else samples_in(batch)
        means = [float(torch.as_tensor(m(output, batch), dtype=torch.float64).mean()) for m in self._metrics.values()]
        return torch.tensor([*(mean * float(weight) for mean in means), float(weight)], dtype=torch.float64)


class EvaluationSchedule:
    """Evaluates the averaged weights when they are due, and keeps the result.

    Args:
        evaluator: the evaluator; None: there are no evaluations.

    Attributes:
        every: the number of steps between two evaluations; 0: only after the last step.
        metrics: the metrics of the last evaluation.
        seconds: the time spent on evaluations so far.
    """

    def __init__(self, evaluator: Evaluator | None, replica: Replica, context: RunContext) -> None:
        self._evaluator, self._replica, self._record = evaluator, replica, context.record
        self.every, self._steps = context.config.evaluate_every, context.feed.steps
        self._tracker, self._now = context.tracker, context.groups.world.now
        self.metrics: Mapping[str, float] = {}
        self.seconds = 0.0
        self._evaluated = 0

    def begin(self, done: int) -> None:
        """Training begins after `done` steps: evaluations that were due before are not repeated."""
        self._evaluated = done

    def run_if_due(self, done: int) -> None:
        """Collective: evaluate if that has become due since the last evaluation.

        It does nothing after the last step of the run, where the caller calls `run`.
        """
        if self.every and done < self._steps and done // self.every > self._evaluated // self.every:
            self.run(done)

    def run(self, done: int) -> None:
        """Collective: measure the metrics of the averaged weights after `done` steps on held-out data."""
        if self._evaluator is None:
            return
        began = self._now()
        with self._tracker(Phase.EVALUATION), self._replica.sync.averaged_weights():
            self.metrics = self._evaluator(self._replica.local.model)
            self._replica.local.unsharding.reshard()
        self.seconds += self._now() - began
        self._evaluated = done
        self._record.metrics(done, self.metrics)


def forward(task: Task, autocast: Callable[[], Any]) -> Callable[[Any, Batch], Any]:
    """A function of model and batch that calls the model as `task` defines."""
    return within(autocast, lambda model, batch: call_model(model, task.inputs(batch)))


def within(context: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called inside ``context()``. (In mixed precision, torch expects the loss under autocast too.)"""

    def run(*arguments: Any) -> Any:
        with context():
            return function(*arguments)

    return run
