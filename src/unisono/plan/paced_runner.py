"""Runs micro-batches on a virtual clock: the computation is real, its time is simulated.

    clock   ├── forward 1/3 ──┼── backward 2/3: a parameter's part of it before its gradient is available ──┤
                 └ a module's part of it at the end of its forward pass

So weights are needed and gradients become available one after the other, and messages overlap with the remaining
computation, as in reality.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from unisono.comm import Simulated
from unisono.tensors.batch import Batch
from unisono.trainer.micro_batches import MicroBatchRunner

FORWARD = 1 / 3  # backward computes two matrix products for each one of forward
# The least part of backward by which the clock advances. Smaller parameters advance it together with the next ones,
# because each advance is a thread switch.
_GRAIN = 1 / 32
_FORWARD_GRAIN = 1 / 8  # likewise, the least part of forward


class ClockPacer:
    """Advances the clock of one virtual worker while it computes.

    Args:
        model: the model. Its modules divide the time of forward, and its parameters the time of backward, by size.
        seconds: returns the time of one micro-batch of a given step.
        by_module: whether forward takes time module by module. False: the time of forward passes at once, because the
            modules of a compiled model have no hooks.

    Attributes:
        busy_seconds: the compute time so far.
    """

    def __init__(
        self, comm: Simulated, model: nn.Module, seconds: Callable[[int], float], by_module: bool = True
    ) -> None:
        self._comm, self._seconds, self._by_module = comm, seconds, by_module
        self.busy_seconds = 0.0
        self._backward = self._due = self._left = 0.0
        self._forward = self._forward_due = self._forward_left = 0.0
        parameters = [p for p in model.parameters() if p.requires_grad]
        total = sum(p.numel() for p in parameters)
        for p in parameters:  # these hooks run before the replica's hooks, which pass the gradient on
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, p.numel() / max(1, total)))
        for module in model.modules() if by_module else ():
            numel = sum(p.numel() for p in module.parameters(recurse=False) if p.requires_grad)
            if numel:
                module.register_forward_hook(partial(self._on_module, numel / total))
        if by_module:
            model.register_forward_hook(lambda *_: self._advance_forward(self._forward_left))

    def begin(self, step: int) -> None:
        """Begin a micro-batch of `step`."""
        self._left = self._seconds(step)
        self._forward = self._forward_left = self._left * FORWARD
        self._backward, self._due, self._forward_due = self._left - self._forward, 0.0, 0.0
        if not self._by_module:
            self._advance_forward(self._forward)

    def end(self) -> None:
        """End the micro-batch: the rest of its time passes now."""
        self._advance(self._left)

    def _on_module(self, share: float, *_: Any) -> None:
        if self._forward_left:  # otherwise this is an evaluation
            self._forward_due += share * self._forward
            if self._forward_due >= _FORWARD_GRAIN * self._forward:
                self._advance_forward(min(self._forward_due, self._forward_left))

    def _advance_forward(self, seconds: float) -> None:
        if seconds:
            self._forward_left, self._forward_due = max(0.0, self._forward_left - seconds), 0.0
            self._advance(seconds)

    def _on_gradient(self, share: float, parameter: Tensor) -> None:
        self._due += share * self._backward
        if self._due >= _GRAIN * self._backward:
            self._advance(min(self._due, self._left))
            self._due = 0.0

    def _advance(self, seconds: float) -> None:
        self._left -= seconds
        self.busy_seconds += seconds
        self._comm.compute(seconds)


class PacedRunner(MicroBatchRunner):
    """A `MicroBatchRunner` that takes as long as `pace` says, in virtual time."""

    def __init__(self, *arguments: Any, pace: ClockPacer) -> None:
        super().__init__(*arguments)
        self._pace = pace

    def run_one(self, t: int, m: int, batch: Batch, control_word: Callable[[], list[float]] | None) -> None:
        """See `MicroBatchRunner.run_one`."""
        self._pace.begin(t)
        super().run_one(t, m, batch, control_word)
        self._pace.end()
