"""The control word of a step: losses and weights of its micro-batches, and further numbers of the caller."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unisono.bad_steps import NOT_REPRESENTABLE
from unisono.comm import Work
from unisono.comm.process_groups import ProcessGroups
from unisono.sync import BoundSynchronizer, LocalGradients


class StepControl:
    """This worker's numbers: the losses of micro-batches ``0..n-1``, their weights, then those of the caller.

    In a sharded replica, workers sum their control words before the synchronizer gets them.
    """

    def __init__(self, groups: ProcessGroups, sync: BoundSynchronizer, micro_batches: int) -> None:
        self._groups, self._sync, self._count = groups, sync, micro_batches
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._numbers = self._sent = [0.0] * (2 * self._count)
        self._summed: Work[Tensor] | None = None  # the sum over this replica's workers, in flight

    def set_weight(self, micro_batch: int, weight: float) -> None:
        """The weight of `micro_batch` in the mean."""
        self._numbers[self._count + micro_batch] = weight

    def set_loss(self, micro_batch: int, loss: float) -> None:
        """The loss of `micro_batch`."""
        self._numbers[micro_batch] = loss

    def mark_not_representable(self, micro_batch: int) -> None:
        """The compressor cannot represent the gradients of `micro_batch`, before or after `send`: control words leave
        when all gradients are through."""
        self._numbers[micro_batch] = self._sent[micro_batch] = NOT_REPRESENTABLE

    def is_finite(self, micro_batch: int) -> bool:
        """Whether the loss of `micro_batch` is finite: else the step is not applied."""
        return math.isfinite(self._numbers[micro_batch])

    def send(self, extra: list[float]) -> None:
        """Collective: no further micro-batch of this worker; `extra` are the caller's numbers. Raises `PeerLost`."""
        self._sent = control = self._numbers + extra
        if not self._groups.is_sharded:
            self._close(control)
            return
        n, none = self._count, [0.0] * self._count
        control[:n] = control[:n] if self._groups.reports_loss else none
        control[n : 2 * n] = control[n : 2 * n] if self._groups.reports_weight else none
        self._summed = self._groups.model.sum(torch.tensor(control, dtype=torch.float64))
        if not isinstance(self._sync, LocalGradients):
            self.finish()  # the sum travels on with the gradients

    def finish(self) -> None:
        """Collective: wait for the numbers of this replica's other workers. Raises `PeerLost`."""
        if self._summed is not None:
            self._close(self._summed.wait().tolist())
            self._summed = None

    def _close(self, control: list[float]) -> None:
        self._sync.close(control, math.fsum(control[self._count : 2 * self._count]))
