"""Shardings of tensors over workers, written and read back without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoint.states import conclude
from unisono.checkpoint import Box, Event, OpenedCheckpoint, TensorShard, Writer, shards_of
from unisono.checkpoint.fingerprint import raw_bytes

Holdings = list[dict[str, Box]]  # by worker: which box of which tensor it holds
Cut = Callable[[tuple[int, ...]], Sequence[Box | None]]  # for each worker, its box; None holds nothing of it


def tensors() -> dict[str, Tensor]:
    """Small, of several dtypes and shapes; no two numbers alike where there are numbers enough."""
    generator = torch.Generator().manual_seed(11)
    noise = lambda *shape: torch.randn(*shape, generator=generator)
    return {
        "model/matrix": noise(8, 6),
        "model/odd": noise(5, 3).bfloat16(),
        "model/bias": noise(7).double(),
        "model/conv": noise(4, 2, 3, 3),
        "model/scalar": torch.tensor(2.5),
        "model/empty": torch.empty(0, 3),
        "model/mask": torch.arange(12).view(3, 4) % 3 > 0,
        "optimizer/matrix/step": torch.tensor(40),
        "optimizer/matrix/exp_avg": noise(8, 6),
    }


def split(shape: tuple[int, ...], axis: int, parts: int) -> list[Box]:
    """As torch chunks a shard: the last may be smaller, or empty."""
    if len(shape) <= axis:
        return [Box.whole(shape)] * parts
    step = -(-shape[axis] // parts)
    ends = [min(shape[axis], i * step) for i in range(parts + 1)]
    return [Box.whole(shape).cut(axis, begin, end) for begin, end in pairwise(ends)]


def grid(shape: tuple[int, ...], rows: int, columns: int) -> list[Box]:
    """Rows, and each of them by columns."""
    if len(shape) < 2:
        return [box for box in split(shape, 0, rows) for _ in range(columns)]
    across = [(box.offset[1], box.offset[1] + box.size[1]) for box in split(shape, 1, columns)]
    return [box.cut(1, *at) for box in split(shape, 0, rows) for at in across]


def uneven(shape: tuple[int, ...]) -> list[Box]:
    """The first of three workers has one row, the second nothing, the third the rest."""
    if not shape:
        return [Box.whole(shape)] * 3
    first = min(1, shape[0])
    return [Box.whole(shape).cut(0, *at) for at in ((0, first), (first, first), (first, shape[0]))]


def _everybody(cut: Cut) -> Callable[[Mapping[str, Tensor]], Holdings]:
    def lie(found: Mapping[str, Tensor]) -> Holdings:
        by_name = {name: cut(tuple(x.shape)) for name, x in found.items()}
        workers = len(next(iter(by_name.values())))
        return [{name: box for name, boxes in by_name.items() if (box := boxes[rank])} for rank in range(workers)]

    return lie


def _pipeline(found: Mapping[str, Tensor]) -> Holdings:
    stages: Holdings = [{}, {}, {}]
    for i, (name, x) in enumerate(sorted(found.items())):
        stages[i % 3][name] = Box.whole(x.shape)
    return stages


def _pipeline_of_rows(found: Mapping[str, Tensor]) -> Holdings:
    rows, stages = LAYOUTS["rows over 2"](found), _pipeline(found)
    return [{name: rows[i % 2][name] for name in stages[i // 2]} for i in range(6)]


LAYOUTS: dict[str, Callable[[Mapping[str, Tensor]], Holdings]] = {
    "whole on 1": _everybody(lambda shape: [Box.whole(shape)]),
    "whole on 3": _everybody(lambda shape: [Box.whole(shape)] * 3),
    "rows over 2": _everybody(lambda shape: split(shape, 0, 2)),
    "rows over 4": _everybody(lambda shape: split(shape, 0, 4)),
    "columns over 2": _everybody(lambda shape: split(shape, 1, 2)),
    "grid of 2 x 2": _everybody(lambda shape: grid(shape, 2, 2)),
    "grid of 3 x 2": _everybody(lambda shape: grid(shape, 3, 2)),
    "uneven": _everybody(uneven),
    "rows over 2, twice": _everybody(lambda shape: [*split(shape, 0, 2), *split(shape, 0, 2)]),
    "last dimension over 3": _everybody(lambda shape: split(shape, max(len(shape) - 1, 0), 3)),
    "pipeline of 3": _pipeline,
    "pipeline of 3, each by rows over 2": _pipeline_of_rows,
    "one of two has all": _everybody(lambda shape: [Box.whole(shape), None]),
}


def locals_of(found: Mapping[str, Tensor], boxes: Mapping[str, Box]) -> dict[str, Tensor]:
    """What a worker with these boxes has in its memory."""
    return {name: found[name][box.slices()].clone() for name, box in boxes.items()}


def holders(found: Mapping[str, Tensor], lie: Holdings) -> list[dict[str, TensorShard]]:
    """What all workers have told each other."""
    return [shards_of(locals_of(found, boxes), boxes) for boxes in lie]


def save_parts(directory: Path, step: int, found: Mapping[str, Tensor], lie: Holdings, **options: Any) -> list[Event]:
    """Write a checkpoint by one writer per worker, each with its boxes only; gives what happened."""
    events: list[Event] = []
    writers = [Writer(directory, rank, len(lie), 9, events.append) for rank in range(len(lie))]
    told = options.get("holders", holders(found, lie))
    for writer, boxes in zip(writers, lie):
        writer.stage(step, locals_of(found, boxes), options.get("meta"), told)
    conclude(writers, step)
    return events


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bits."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and bytes(raw_bytes(one)) == bytes(raw_bytes(other))


def wrong(opened: OpenedCheckpoint, found: Mapping[str, Tensor], lie: Holdings) -> list[str]:
    """Whatever a reader with these boxes does not get as it was."""
    return [
        f"{rank}: {name} {box}"
        for rank, boxes in enumerate(lie)
        for name, box in boxes.items()
        if not same(opened.read(name, box), found[name][box.slices()])
    ]
