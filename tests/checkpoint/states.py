"""States for checkpoint tests, and how tests write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint import Event, Writer
from unisono.checkpoint.safetensors_format import CODES


def every_kind() -> dict[str, Tensor]:
    """Every dtype, every awkward shape and stride, non-finite numbers included."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randint(0, 256, (16 * 15,), dtype=torch.uint8, generator=generator)
    tensors = {f"dtype/{str(d)[6:]}": noise.clone().view(d).view(3, -1) for d in CODES if d != torch.bool}
    tensors |= {
        "dtype/bool": noise.view(3, -1) > 127,
        "shape/scalar": torch.tensor(3.5),
        "shape/scalar bf16": torch.tensor(-0.0, dtype=torch.bfloat16),
        "shape/empty": torch.empty(0, 3),
        "shape/one": torch.ones(1, 1, 1, dtype=torch.int64),
        "stride/transposed": torch.arange(35.0).view(5, 7).t(),
        "stride/every third": torch.arange(30, dtype=torch.int16)[::3],
        "stride/expanded": torch.tensor([1.0, 2.0]).expand(4, 2),
        "stride/channels last": torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "lazy/conjugate": torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj(),
        "value/non-finite": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
        'имя/with ../dots and "quotes"': torch.arange(3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    return tensors


def numbered(step: int, elements: int = 1000) -> dict[str, Tensor]:
    """A small state that differs from step to step in every tensor."""
    return {f"model/{i}": torch.full((elements + i,), float(step * 100 + i)) for i in range(6)}


def save(directory: Path, step: int, tensors: Mapping[str, Tensor], **options: Any) -> list[Event]:
    """Write a whole checkpoint by `size` writers in this thread; gives what happened."""
    events: list[Event] = []
    size, keep, meta = options.get("size", 1), options.get("keep", 9), options.get("meta")
    writers = [Writer(directory, rank, size, keep, events.append) for rank in range(size)]
    for writer in writers:
        writer.stage(step, tensors, meta)
    conclude(writers, step)
    return events


def conclude(writers: list[Writer], step: int) -> None:
    """What workers do when all have staged `step`: the first commits it, or gives it up where one could not write."""
    for writer in writers:
        writer.finish()
    if all(writer.state.written == step for writer in writers):
        writers[0].commit(step)
    else:
        writers[0].abandon(step)
    for writer in reversed(writers):
        writer.finish()
        writer.close()


def unexpected(damage: Exception) -> None:
    raise AssertionError(f"nothing is damaged here: {damage}")
