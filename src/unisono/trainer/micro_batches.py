"""Forward and backward passes of one worker's micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.data import seed_compute, stream
from unisono.elastic.session import Session
from unisono.errors import InvalidInput
from unisono.layout import MicroBatchContext
from unisono.observe import ActivityTracker
from unisono.observe.activity import Phase
from unisono.tensors.batch import Batch
from unisono.trainer.replica import Replica


@dataclass(frozen=True)
class MicroBatchFunctions:
    """What is computed for a micro-batch.

    Args:
        forward: ``forward(model, batch) -> output``.
        loss: ``loss(output, batch)``, a scalar.
        weight: the weight of a batch in the mean over the global batch.
        to_device: copies a batch to the model's device.
        part: the context in which a micro-batch is computed; it yields the part that this worker computes.
        seed: of the run's random streams.
    """

    forward: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], Tensor]
    weight: Callable[[Batch], float]
    to_device: Callable[[Batch], Batch]
    part: MicroBatchContext
    seed: int


class MicroBatchRunner:
    """Computes the micro-batches of a step one after the other; gradients go to the synchronizer during backward."""

    def __init__(
        self, functions: MicroBatchFunctions, replica: Replica, session: Session, tracker: ActivityTracker
    ) -> None:
        self.functions, self.replica, self.session, self.tracker = functions, replica, session, tracker
        self.model = replica.local.model

    def run(
        self, t: int, mine: range, batches: Iterable[tuple[int, Batch]], control_word: Callable[[], list[float]]
    ) -> None:
        """Forward and backward of micro-batches `mine` of step `t`.

        Args:
            control_word: called in the last forward pass: this worker's numbers, which travel with the gradients.

        Raises:
            PeerLost: the view has ended.
        """
        for m, batch in self.tracker.each(Phase.DATA, batches):
            self.session.check()  # no worker waits for this micro-batch after the view has ended
            self.tracker.set_position(t, m)
            last = m == mine[-1]
            self.run_one(t, m, self.functions.to_device(batch), control_word if last else None)

    def run_one(self, t: int, m: int, batch: Batch, control_word: Callable[[], list[float]] | None) -> None:
        """Forward and backward of micro-batch `m`. `control_word`: given for the last one of this worker and step."""
        functions, replica = self.functions, self.replica
        seed_compute(stream(functions.seed, t, m, "compute"))
        replica.begin_micro_batch(m, checked_weight(functions.weight(batch)))
        with functions.part(batch, functions.loss) as (part, loss_of):
            loss = loss_of(functions.forward(self.model, part), part)
            check_loss(loss)
            extra = control_word() if control_word else []
            replica.end_forward(float(loss.detach()), last=control_word is not None, extra=extra)
            replica.backward(loss)

    def nonfinite(self, t: int, batches: Iterable[tuple[int, Batch]]) -> Tensor:
        """For each micro-batch of step `t`, whether its gradient is not finite, found by computing those of `batches`
        once more: zeros and ones, of shape ``[micro_batches]``. Before the step is dropped."""
        functions = self.functions
        found = torch.zeros(self.replica.options.micro_batches)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for m, batch in batches:
            seed_compute(stream(functions.seed, t, m, "compute"))
            self.replica.buffers.before()
            given = functions.to_device(batch)
            loss = functions.loss(functions.forward(self.model, given), given)
            gradients = [g for g in torch.autograd.grad(loss, parameters, allow_unused=True) if g is not None]
            found[m] = not all(
                bool(torch.isfinite(g.coalesce().values() if g.is_sparse else g).all()) for g in gradients
            )
        return found


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
