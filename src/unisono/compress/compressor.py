"""What travels in place of a tensor, and how a mean is taken with it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import torch
from torch import Tensor

Memory = dict[str, Any]  # what one tensor owes to later steps; handed in, kept by the synchronizer


class Wire(Protocol):
    """The communicator's verbs, as far as a compressor uses them; each returns a work with `poll` and `wait`."""

    rank: int
    size: int

    def sum(self, x: Tensor) -> Any: ...
    def gather(self, x: Tensor) -> Any: ...
    def exchange(self, xs: Any, like: Any) -> Any: ...


Mean = Generator[Any, Any, Tensor]
"""The steps of taking a mean, written as if they blocked: each ``yield work`` waits for a verb and gives its result;
the return value is the mean. Whoever drives it (a synchronizer) may poll in between and go on computing."""


class Compressor(Protocol):
    """A frozen value that keeps nothing.

    Inside a worker, micro-batches are summed in a *total*, a flat tensor of dtype `total_dtype`, by `add`; between
    workers, `mean` takes the weighted sum of all totals (weights already add up to 1, so that the sum is the mean).
    What a total's last elements carry besides gradients (the control word) survives only where `adds_up` is true.
    """

    @property
    def adds_up(self) -> bool:
        """True where encoded messages can be added, so that `mean` is one `sum`."""

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are summed inside a worker."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that travels for gradients of `dtype`."""

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether gradients of `dtype` come out of `mean` over one peer as they went in, bit for bit."""

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        """``total += weight * gradient``, in place; `first` overwrites what `total` held. Both of the same shape.

        Raises:
            ValueError: `gradient` holds values that this compressor cannot represent (names the largest).
        """

    def encode(self, total: Tensor) -> Tensor:
        """What travels for `total` (itself, where nothing changes)."""

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of `dtype` that `wire` stands for (`wire` itself, where nothing changes)."""

    def mean(self, total: Tensor, comm: Wire, memory: Memory, dtype: torch.dtype) -> Mean:
        """The sum of all workers' totals, as gradients of `dtype`."""

    def bits(self, x: Tensor) -> float:
        """Bits on the wire for a gradient `x`, one way."""
