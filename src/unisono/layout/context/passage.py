"""A micro-batch on its way through one worker of a context group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unisono.layout.context.attending import attending
from unisono.layout.context.batch import length, part_loss, share, take
from unisono.layout.context.split import Split

Loss = Callable[[Any, Any], Tensor]


class Passage:
    """``with passage(batch, loss) as (part, part_of_loss):`` forward and backward of this worker's part of `batch`.

    Args:
        mesh: the context group, one-dimensional.
        weight: the task's, see `share`.
    """

    def __init__(self, mesh: DeviceMesh, weight: Callable[[Any], float] | None) -> None:
        self._mesh, self._weight = mesh, weight
        self._rank, self._size = mesh.get_local_rank(), mesh.size()

    @contextmanager
    def __call__(self, batch: Any, loss: Loss) -> Iterator[tuple[Any, Loss]]:
        """Raises `InvalidInput` where the batch's sequences cannot be cut."""
        split = Split(length(batch), self._size)
        counts = share(self._weight, batch, split, self._rank)
        with attending(self._mesh, split):
            yield take(batch, split, self._rank), partial(part_loss, loss, share=counts)
