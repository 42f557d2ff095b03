"""Measure a model on held-out data, split over the workers, with exact means."""

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
    """Batches of fixed content are dealt out in turn; every worker folds everybody's sums in the batches' order, so
    that a metric has the same bits on any number of workers.

    Args:
        comm: a lane of its own, of all workers.
        forward: ``forward(model, batch)``; None where the output comes out on another worker of the replica.
        replica, replicas: which one this worker belongs to, of how many; whose workers all go through its batches.
        speaks: whether this worker's sums count, of those that have the same output.
    """

    def __init__(
        self,
        task: Task,
        comm: Communicator,
        forward: Callable[[Any, Batch], Any],
        move: Any,
        replica: int,
        replicas: int,
        speaks: bool = True,
    ) -> None:
        self._replica, self._replicas, self._speaks = replica, replicas, speaks
        given = task.evaluate
        self._evaluation = given if isinstance(given, Evaluation) else Evaluation(given)
        self._task, self._comm, self._forward, self._move = task, comm, forward, move
        self._data = build_dataset(self._evaluation.data)
        if not len(self._data):
            raise InvalidInput("evaluate", 0, "the evaluation data has no samples", "give it some, or leave it out")
        self._metrics = {"loss": task.loss, **self._evaluation.metrics}

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Metric names to means over the whole evaluation data. The model comes back in the mode it was in."""
        size = self._evaluation.batch
        starts = range(0, len(self._data), size)
        table = torch.zeros(len(starts), len(self._metrics) + 1, dtype=torch.float64)
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            with torch.no_grad():  # sharded parameters that are first gathered in inference mode could not be trained
                for i in range(self._replica, len(starts), self._replicas):
                    batch = self._fetch(starts[i], min(starts[i] + size, len(self._data)))
                    output = self._forward(model, batch)
                    if output is not None and self._speaks:
                        table[i] = self._measure(output, batch)
        finally:
            for module in training:  # some layers may have been in evaluation mode all along
                module.training = True
        rows = self._comm.sum(table.view(-1)).wait().view(table.shape).tolist()
        total = math.fsum(row[-1] for row in rows)
        return {name: math.fsum(row[i] for row in rows) / total for i, name in enumerate(self._metrics)}

    def _fetch(self, start: int, stop: int) -> Batch:
        collate = self._task.collate or default_collate
        many = getattr(self._data, "__getitems__", None)
        indices = list(range(start, stop))
        return self._move(collate(many(indices) if many else [self._data[i] for i in indices]))

    def _measure(self, output: Any, batch: Batch) -> Tensor:
        """One row: weighted metrics, then the weight."""
        weight = self._task.weight(batch) if self._task.weight else samples_in(batch)
        means = [float(torch.as_tensor(m(output, batch), dtype=torch.float64).mean()) for m in self._metrics.values()]
        return torch.tensor([*(mean * float(weight) for mean in means), float(weight)], dtype=torch.float64)


class EvaluationSchedule:
    """When the averaged weights are evaluated, and what came out.

    Args:
        evaluator: None evaluates nothing.
        every: steps between two evaluations; 0 evaluates after the last step only.
        steps: of the run.

    Attributes:
        metrics: of the last evaluation.
        seconds: spent on evaluations so far.
    """

    def __init__(self, evaluator: Evaluator | None, replica: Replica, context: RunContext) -> None:
        self._evaluator, self._replica, self._record = evaluator, replica, context.record
        self.every, self._steps = context.config.evaluate_every, context.feed.steps
        self._tracker, self._now = context.tracker, context.groups.world.now
        self.metrics: Mapping[str, float] = {}
        self.seconds = 0.0
        self._evaluated = 0

    def begin(self, done: int) -> None:
        """Training begins with `done` steps: what was due before is not made up for."""
        self._evaluated = done

    def run_if_due(self, done: int) -> None:
        """Collective: evaluate if it became due since the last evaluation. After the last step, `run` is called."""
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
    """``model -> batch -> output`` as `task` wants its model called."""

    return within(autocast, lambda model, batch: call_model(model, task.inputs(batch)))


def within(context: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called inside ``context()``; in mixed precision torch wants the loss there too."""

    def run(*arguments: Any) -> Any:
        with context():
            return function(*arguments)

    return run
