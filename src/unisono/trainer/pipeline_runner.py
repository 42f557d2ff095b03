"""Computes the step of a replica whose layers are on several workers: its micro-batches share one pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.data import seed_compute, stream
from unisono.elastic.session import Session
from unisono.layout.pipeline import Pipeline
from unisono.observe import ActivityTracker
from unisono.observe.activity import Phase
from unisono.tensors.batch import Batch
from unisono.trainer.micro_batches import MicroBatchFunctions, MicroBatchRunner, check_loss, checked_weight
from unisono.trainer.replica import Replica


class PipelineRunner(MicroBatchRunner):
    """Computes all micro-batches of a step in one pipeline, in which a stage runs as soon as its inputs are there.

    Args:
        pipeline: the stages of this worker, which call back around each pass.
        inputs: returns the model's inputs for a batch.
        autocast: the context of forward passes.
    """

    def __init__(
        self, functions: MicroBatchFunctions, replica: Replica, session: Session, tracker: ActivityTracker, *,
        pipeline: Pipeline, inputs: Callable[[Batch], Any], autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:  # fmt: skip
        super().__init__(functions, replica, session, tracker)
        self._pipeline, self._inputs, self._autocast = pipeline, inputs, autocast

    def run(
        self, t: int, mine: range, batches: Iterable[tuple[int, Batch]], control_word: Callable[[], list[float]]
    ) -> None:
        """See `MicroBatchRunner.run`. Every stage draws the random numbers that a worker with all stages would draw."""
        functions, replica, pipeline = self.functions, self.replica, self._pipeline
        given = [(m, functions.to_device(batch)) for m, batch in self.tracker.each(Phase.DATA, batches)]
        weights = [checked_weight(functions.weight(batch)) for _, batch in given]
        parts = [partial(functions.part, batch, functions.loss) for _, batch in given]
        losses = [0.0] * len(given)

        def loss(i: int, output: Any) -> torch.Tensor:
            with parts[i]() as (part, loss_of):
                found = loss_of(output, part)
            check_loss(found)
            losses[i] = float(found.detach())
            return replica.local.unsharding.connect(found * replica.loss_scale(weights[i]))

        @contextmanager
        def around(i: int, stage: int) -> Iterator[None]:
            m = given[i][0]
            seed_compute(stream(functions.seed, t, m, "compute"))
            replica.buffers.before(stage)
            with parts[i]():
                yield
            replica.buffers.after(m, stage)

        pipeline.copy_tied()
        pipeline.set_contexts(around, lambda i: parts[i]())
        with self._autocast():
            pipeline.step([self._inputs(_part(part)) for part in parts], loss)
        pipeline.sum_tied()
        for i, (m, _) in enumerate(given):
            last = m == mine[-1]
            replica.begin_micro_batch(m, weights[i])
            replica.end_forward(losses[i], last=last, extra=control_word() if last else [])


def _part(context: Callable[[], AbstractContextManager[tuple[Batch, Any]]]) -> Batch:
    """The part of a batch that this worker computes."""
    with context() as (part, _):
        return part


def pipeline_output(
    pipeline: Pipeline, inputs: Callable[[Batch], Any], autocast: Callable[[], Any]
) -> Callable[..., Any]:
    """A function ``forward(model, batch)`` for evaluation, which uses `pipeline` in place of the model.

    It returns the output on the worker with the last stage, and None on the others.
    """

    def forward(_: nn.Module, batch: Batch) -> Any:
        with autocast():
            found = pipeline.forward_only([inputs(batch)])
        return found[0] if found else None

    return forward
