"""Mixtures of experts over workers: detected, verified, split by whole experts, equal to one worker."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.layout import mixtures
from tests.layout.mixtures import CONTEXT, MODELS, VOCABULARY, differ, losses, mixture
from tests.support.processes import run
from tests.support.training_runs import train
from unisono.checkpoint import fingerprint
from unisono.errors import InvalidInput
from unisono.layout import Layout, RankMesh, Sample, WholeTensors
from unisono.tasks.builtin.gpt import GPT

SAME = 2e-6


@pytest.mark.parametrize("name", ["ours", "mixtral", "qwen", "gpt_oss"])
def test_a_mixture_is_found_by_its_structure_and_split_where_numbers_agree(name) -> None:
    if name != "ours":
        pytest.importorskip("transformers")
    from unisono.layout.deferred import record
    from unisono.layout.expert import derive

    model = record(MODELS[name]).model  # without numbers
    plan = derive(model, 2)
    assert len(plan.split) == 2, "one per layer"
    assert not plan.whole
    assert all(split.part.experts == 4 and split.part.share == 2 for split in plan.split.values())


@pytest.mark.parametrize(
    ("model", "degree", "words"),
    [
        (lambda: GPT(layers=1, width=8, heads=1, context=8).build(), 2, "has no mixture of experts that can be split;"),
        (mixtures.Lists, 2, r"experts: its experts are modules that the model's own code calls one by one.*each of"),
        (mixtures.Mixing, 2, "its output differs from the whole"),
        (mixtures.Wanting, 2, "its code fails: TypeError"),
        (mixtures.ours, 3, "the 4 experts of blocks.0.mlp.experts do not divide by 3; write expert=4"),
        (mixtures.ours, 8, "write expert=4"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_cure(model, degree, words) -> None:
    from unisono.layout.expert import derive

    with pytest.raises(InvalidInput, match=words):
        derive(model(), degree)


def test_a_mixture_that_cannot_be_split_stays_whole_beside_one_that_can() -> None:
    from unisono.layout.expert import derive

    tied = [mixtures.Lonely(), mixtures.Lonely()]
    tied[1].experts.up = tied[0].experts.up
    plan = derive(nn.ModuleList([mixtures.ours(), mixtures.Mixing(), mixtures.Lists(), *tied]), 2)
    assert list(plan.split) == ["0.blocks.0.mlp.experts", "0.blocks.1.mlp.experts"]
    assert list(plan.whole) == ["2.experts", "1", "3.experts", "4.experts"]


@pytest.mark.parametrize(
    ("shape", "words"),
    [({"experts": 1}, "neither 0 nor at least 2"), ({"experts": 2, "experts_per_token": 3}, "in 1..2")],
)
def test_a_mixture_of_ours_needs_two_experts_and_as_many_as_it_chooses(shape, words) -> None:
    with pytest.raises(ValueError, match=words):
        GPT(**shape)


@pytest.mark.parametrize(
    ("shape", "dimension"), [((2, 8, 6), 1), ((2, 6, 8), 2), ((2, 3, 5), 0), ((4, 8, 8), None), ((2, 8), None)]
)
def test_fewer_experts_than_workers_are_sharded_inside(shape, dimension) -> None:
    from torch.distributed.tensor import Shard

    from unisono.layout.fsdp import shard_placement

    expected = None if dimension is None else Shard(dimension)
    assert shard_placement(4, nn.Parameter(torch.zeros(shape))) == expected


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 1, 2), (7, 2, 4), (16, 3, 5), (0, 2, 4)])
def test_pairs_are_in_the_order_of_experts_and_come_back_to_their_tokens(tokens, choices, experts) -> None:
    from unisono.layout.expert.routing import Pairs, expert_numbers

    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 3, generator=random)
    weights = torch.rand(tokens, choices, generator=random)
    chosen = torch.randint(experts + 1, (tokens, choices), generator=random)  # the last one stands for none
    pairs, scale = Pairs.of(chosen, experts), 1.0 + torch.arange(experts)
    outputs = pairs.tokens(x) * (pairs.weights(weights) * scale[expert_numbers(pairs.counts)])[:, None]
    expected = x * (weights * torch.cat([scale, torch.zeros(1)])[chosen]).sum(1, keepdim=True)
    assert torch.allclose(pairs.summed(outputs), expected)


LAYOUTS = {
    2: [Layout(expert=2)],
    4: [Layout(expert=4), Layout(shard=2, expert=2), Layout(expert=2, tensor=2)],
}


def _gradients(rank: int, size: int, path: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    from unisono.layout.parallelize import device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", size), rank=rank, world_size=size)
    try:
        found = []
        for layout in LAYOUTS[size]:
            places = RankMesh(layout, size)
            mesh = device_mesh(places, "cpu")
            found += [
                _law(MODELS[name], layout, mesh, places.data_parallel_rank(rank), places.data_parallel_size)
                for name in names
            ]
        return found
    finally:
        dist.destroy_process_group()


def _law(build: Any, layout: Layout, mesh: Any, lane: int, lanes: int) -> dict[str, Any]:
    """The same bits, hash, outputs and gradients as the whole has; each lane has another number of tokens."""
    from unisono.layout.parallelize import parallelize

    batches = [torch.randint(VOCABULARY, (1 + i, CONTEXT), generator=torch.Generator().manual_seed(i))
               for i in range(lanes)]  # fmt: skip
    sample = Sample((batches[0], batches[0]), lambda batch: batch[0], mixtures.loss, None)
    torch.manual_seed(3)
    held = parallelize(build, layout, mesh, sample)
    torch.manual_seed(3)
    whole = build()
    parameters = dict(whole.named_parameters())
    assert held.parts.keys() == parameters.keys()
    for name, part in held.local.named_parameters():
        assert torch.equal(part, parameters[name][held.parts[name].slices()]), name
    assert fingerprint(WholeTensors(held.model)) == fingerprint(WholeTensors(whole))
    for batch in batches:
        whole(batch).square().sum().backward()
    held.model(batches[lane]).square().sum().backward()
    for name, parameter in parameters.items():
        expected, found = parameter.grad[held.parts[name].slices()], held.take(name)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(parameter.grad.abs().max())), name
    with torch.inference_mode():
        assert torch.allclose(held.model(batches[-1]), whole(batches[-1]), atol=1e-5)
    return {"layout": layout, "parts": dict(held.parts), "elsewhere": held.counted_elsewhere}


@pytest.mark.long
@pytest.mark.parametrize("workers", LAYOUTS)
def test_each_worker_holds_whole_experts_whose_gradients_are_of_all_tokens(workers, tmp_path: Path) -> None:
    """In `lonely` all tokens go to one expert, and the other workers get none."""
    for each in zip(*run(workers, _gradients, str(tmp_path), ("ours", "lonely"))):
        layout, counted = each[0]["layout"], dict[str, int]()
        for held in each:
            for name, part in held["parts"].items():
                counted[name] = counted.get(name, 0) + math.prod(part.size) * (name not in held["elsewhere"])
                if "experts" in name:
                    assert math.prod(part.size) == math.prod(part.shape) / layout.expert / layout.shard
        whole = {name: math.prod(part.shape) for name, part in each[0]["parts"].items()}
        assert counted == whole, "every number is counted once"


def test_a_mixture_on_several_workers_learns_what_it_does_on_one_and_its_checkpoints_open_there(tmp_path) -> None:
    task, run = mixture("ours", "adamw"), str(tmp_path / "parts")
    alone = losses(tmp_path / "alone", 1, task, run_dir=str(tmp_path / "alone"))
    train(2, task, tmp_path / "parts", steps=4, workers=2, layout="Layout(expert=2)", run_dir=run, record_seconds=0.0)
    train(1, task, tmp_path / "parts", steps=8, workers=1, run_dir=run, resume=True, record_seconds=0.0)
    parts = losses(tmp_path / "parts", 2, task, layout="Layout(expert=2)", run_dir=run, resume=True)
    assert differ(parts, alone) <= SAME


@pytest.mark.long
def test_one_of_transformers_learns_what_it_does_on_one_worker(tmp_path) -> None:
    pytest.importorskip("transformers")
    task = mixture("mixtral", "sgd")
    alone = losses(tmp_path / "alone", 1, task, clip=0.5)
    assert differ(losses(tmp_path / "laid", 2, task, layout="Layout(expert=2)", clip=0.5), alone) <= SAME


@pytest.mark.long
def test_replicas_agree_as_whole_ones_do(tmp_path) -> None:
    task, sync = mixture("ours", "sgd"), {"sync": "LocalSGD(every=3)"}
    whole = losses(tmp_path / "whole", 2, task, **sync)
    assert differ(losses(tmp_path / "laid", 4, task, layout="Layout(expert=2)", **sync), whole) <= SAME
