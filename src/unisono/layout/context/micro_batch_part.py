"""One worker's part of a micro-batch in a context group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from unisono.errors import InvalidInput
from unisono.layout.context.function_mode import attending
from unisono.layout.context.padding import MASK_NAME, hide_padding, with_padding
from unisono.layout.context.sequence_batch import loss_share, part_loss, sequence_length, take_part
from unisono.layout.context.sequence_split import SequenceSplit
from unisono.layout.context.verify import verify
from unisono.layout.sample_batch import Sample

Loss = Callable[[Any, Any], Tensor]


def verify_sample(model: nn.Module, sample: Sample, size: int) -> str:
    """Verify `model` on parts of `sample`; if its padding mask marks no padding, verify it with padding too.

    Returns why the model does not support padding. Empty: it does, or the sample has no such mask.

    Raises:
        InvalidInput: see `verify`.
    """
    attempt = partial(
        verify, model, size=size, forward=partial(sample.forward, model), loss=sample.loss, weight=sample.weight,
        inputs=sample.inputs)  # fmt: skip
    attempt(sample.batch)
    short = with_padding(sample.batch, sample.inputs, sequence_length(sample.batch))
    try:
        return "" if short is None else attempt(short) or ""
    except InvalidInput as error:
        return error.problem


class MicroBatchPart:
    """Gives a worker its part of a micro-batch, and makes attention cover the whole sequence meanwhile.

        with micro_batch_part(batch, loss) as (part, part_loss):
            part_loss(model(part), part).backward()

    Args:
        mesh: the one-dimensional mesh of the context group.
        sample: how the task uses a batch.
        without_padding: why the model supports no padding; empty if it does.
    """

    def __init__(self, mesh: DeviceMesh, sample: Sample, without_padding: str = "") -> None:
        self._mesh, self._sample, self._without_padding = mesh, sample, without_padding
        self._rank, self._size = mesh.get_local_rank(), mesh.size()

    @contextmanager
    def __call__(self, batch: Any, loss: Loss) -> Iterator[tuple[Any, Loss]]:
        """Raises `InvalidInput` if the batch's sequences cannot be split, or have padding that the model does not
        support."""
        split = SequenceSplit(sequence_length(batch), self._size)
        batch, keys = hide_padding(batch, self._sample.inputs, split.length)
        if keys is not None and self._without_padding:
            problem = f"a batch has padding, which fails with context = {self._size} ({self._without_padding})"
            raise InvalidInput(MASK_NAME, tuple(keys.shape), problem, "give sequences of full length, or use context=1")
        counts = loss_share(self._sample.weight, batch, split, self._rank)
        with attending(self._mesh, split, keys=keys):
            yield take_part(batch, split, self._rank), partial(part_loss, loss, share=counts)
