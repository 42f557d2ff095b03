"""What a rank holds of a parallelized model: its shard, with the bits of the model on one device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.processes import run
from tests.support.training_runs import Block
from unisono.layout import Layout, RankMesh, Sample, WholeTensors
from unisono.tasks.builtin.gpt import GPT

NETWORK = GPT(layers=3, width=32, heads=4, context=16, dropout=0.0)
TOKENS = torch.arange(32).view(2, 16)


def built() -> nn.Module:
    return NETWORK.build()


def sample() -> Sample:
    return Sample((TOKENS, TOKENS), lambda batch: batch[0], _loss, None)


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


class Tied(nn.Module):
    """Blocks that share a matrix, a gain and a buffer; nothing of that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))
        for block in self.blocks[1:]:
            block.up.weight, block.gain = self.blocks[0].up.weight, self.blocks[0].gain
            block.register_buffer("scale", self.blocks[0].scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _places(rank: int, size: int, path: str, layout: Layout) -> list[str]:
    """Names of the tensors that differ from the model's, of all places where modules hold one."""
    from unisono.layout.parallelize import device_mesh, parallelize

    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", size), rank=rank, world_size=size)
    try:
        torch.manual_seed(3)
        held = parallelize(Tied, layout, device_mesh(RankMesh(layout, size), "cpu"), sample())
        torch.manual_seed(3)
        whole = Tied().state_dict()
        pieces = held.pipeline.stages.values() if held.pipeline else [held.model]
        found = {n: t for piece in pieces for n, t in piece.state_dict(keep_vars=True).items()}
        assert found.keys() <= whole.keys()
        for shared in ("up.weight", "gain", "scale"):
            assert len({id(t) for name, t in found.items() if name.endswith(shared)}) == 1, "they stay tied"
        local = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in found.items()}
        parts = {name: held.parts.get(name) for name in found}
        return [name for name, t in local.items()
                if not torch.equal(t, whole[name][parts[name].slices()] if parts[name] else whole[name])]  # fmt: skip
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2)], ids=str)
def test_what_blocks_share_is_filled_wherever_it_is_held(layout, tmp_path: Path) -> None:
    assert run(2, _places, str(tmp_path), layout) == [[], []]


def _held(rank: int, size: int, path: str, layout: Layout) -> dict[str, Any]:
    from unisono.layout.parallelize import device_mesh, parallelize

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", size), rank=rank, world_size=size)
    try:
        torch.manual_seed(3)
        held = parallelize(built, layout, device_mesh(RankMesh(layout, size), "cpu"), sample())
        after = torch.rand(1)
        torch.manual_seed(3)
        whole = dict(built().named_parameters())
        assert torch.equal(after, torch.rand(1)), "the random stream goes on where it would"
        assert held.parts.keys() == whole.keys()
        for name, parameter in held.local.named_parameters():
            assert torch.equal(parameter, whole[name][held.parts[name].slices()]), name
        assert all(
            torch.equal(tensor, whole[name]) for name, tensor in WholeTensors(held.model).items() if name in whole
        )
        numbers = {name: p.numel() for name, p in held.local.named_parameters()}
        return {"numbers": numbers, "elsewhere": held.counted_elsewhere, "parts": dict(held.parts)}
    finally:
        dist.destroy_process_group()


@pytest.mark.short(3)
@pytest.mark.parametrize(
    ("layout", "most"),
    [
        (Layout(shard=2), 0.51),
        (Layout(shard=4), 0.27),
        (Layout(tensor=2), 0.55),
        (Layout(shard=2, tensor=2), 0.29),
        (Layout(context=2), 0.51),
        (Layout(replicate=2), 1.0),
        (Layout(replicate=2, shard=2), 0.51),
    ],
    ids=str,
)
def test_each_worker_holds_its_part_of_the_same_bits(layout, most, tmp_path: Path) -> None:
    found = run(layout.workers, _held, str(tmp_path), layout)
    whole = sum(p.numel() for p in built().parameters())
    assert all(sum(each["numbers"].values()) <= most * whole for each in found)
    counted: dict[str, int] = {}
    for each in found:
        for name, part in each["parts"].items():
            counted[name] = counted.get(name, 0) + math.prod(part.size) * (name not in each["elsewhere"])
    expected = {name: math.prod(part.shape) for name, part in found[0]["parts"].items()}
    assert counted == expected, "every number is counted once"
