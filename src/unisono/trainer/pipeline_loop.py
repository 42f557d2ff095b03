"""The step of a replica whose layers lie on several workers: all micro-batches go through the pipeline together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.data import seed_compute, stream
from unisono.layout.pipeline import Pipeline
from unisono.observe.activity import Phase
from unisono.tensors.batch import Batch
from unisono.trainer.loop import Trainer, check_loss, checked_weight


@dataclass
class PipelinedTrainer(Trainer):
    """A `Trainer` of one worker's stages.

    Args:
        pipeline: the stages, which call back around each pass.
        inputs: what the model is called with, of a batch.
        autocast: the context of forward passes.
    """

    pipeline: Pipeline = field(kw_only=True)
    inputs: Callable[[Batch], Any] = field(kw_only=True)
    autocast: Callable[[], AbstractContextManager[Any]] = field(kw_only=True)

    def run_micro_batches(self, t: int, mine: range, batches: Iterable[tuple[int, Batch]]) -> None:
        """See `Trainer.run_micro_batches`. Every stage draws what one worker would."""
        given = [(m, self.to_device(batch)) for m, batch in self.tracker.each(Phase.DATA, batches)]
        weights = [checked_weight(self.weight(batch)) for _, batch in given]
        passages = [partial(self.micro_batch_part, batch, self.loss) for _, batch in given]
        losses = [0.0] * len(given)

        def loss(i: int, output: Any) -> torch.Tensor:
            with passages[i]() as (part, loss_of):
                found = loss_of(output, part)
            check_loss(found)
            losses[i] = float(found.detach())
            return self.replica.held.unsharding.connect(found * self.replica.loss_scale(weights[i]))

        @contextmanager
        def around(i: int, stage: int) -> Iterator[None]:
            m = given[i][0]
            seed_compute(stream(self.seed, t, m, "compute"))
            self.replica.before(stage)
            with passages[i]():
                yield
            self.replica.after(m, stage)

        self.pipeline.copy_tied()
        self.pipeline.set_contexts(around, lambda i: passages[i]())
        with self.autocast():
            self.pipeline.step([self.inputs(_part(passage)) for passage in passages], loss)
        self.pipeline.sum_tied()
        for i, (m, _) in enumerate(given):
            last = m == mine[-1]
            self.replica.begin_micro_batch(m, weights[i])
            self.replica.end_forward(losses[i], last=last, extra=self.control_word() if last else [])


def _part(passage: Callable[[], AbstractContextManager[tuple[Batch, Any]]]) -> Batch:
    """What of a batch is this worker's."""
    with passage() as (part, _):
        return part


def output(pipeline: Pipeline, inputs: Callable[[Batch], Any], autocast: Callable[[], Any]) -> Callable[..., Any]:
    """``forward(model, batch)`` for evaluation: the output on the worker with the last stage, None on the others."""

    def forward(_: nn.Module, batch: Batch) -> Any:
        with autocast():
            found = pipeline.forward_only([inputs(batch)])
        return found[0] if found else None

    return forward
