"""Models whose ranks do not call the same blocks: what is unsharded, in which order, with which result."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.corner_models import Borrowing, Choosy, Doubting, Dropped, Experts, Methods, Sharing, Stack
from tests.support.layout_models import VOCABULARY
from tests.support.layout_runs import run as train
from tests.support.processes import run
from unisono.checkpoint import open_newest
from unisono.errors import InvalidInput
from unisono.layout import Layout, RankMesh, Sample
from unisono.layout.block_calls import BlockCalls, trace_calls
from unisono.layout.repeated_blocks import blocks

TOKENS = torch.arange(4 * 2 * 8).view(4, 2, 8) % VOCABULARY


def _loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch.roll(1).flatten())


def sample() -> Sample:
    return Sample(TOKENS[0], lambda batch: batch, _loss, None)


# What a forward pass shows.


class Backwards(Stack):
    """The last block is called first, and the second one is not."""

    def through(self, x: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[0](self.blocks[3](x)))


class Looking(Stack):
    """Numbers decide what is called after the second block."""

    def through(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[2](x))
        return x if x.sum() > 0 else self.blocks[0](x)


class Summing(Stack):
    """All weights are used at the end."""

    def through(self, x: Tensor) -> Tensor:
        return super().through(x) * sum(p.norm() for p in self.blocks[1].parameters())


def seen(build: Any, device: str) -> tuple[list[str], dict[str, str]]:
    with torch.device(device):
        model = build()
    names = {module: name.removeprefix("blocks.") for name, module in model.named_modules()}
    found: BlockCalls = trace_calls(model, blocks(model), sample())
    return [names[block] for block in found.order], {names[block]: why for block, why in found.used_outside.items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_pass_shows_the_order_of_blocks_and_which_are_needed_otherwise(device: str) -> None:
    unused = "is used outside of its calls"
    assert seen(Stack, device) == (["0", "1", "2", "3"], {})
    assert seen(Backwards, device) == (["3", "0", "1", "2"], {})
    assert seen(Summing, device)[1].keys() == {"1"}
    assert seen(Borrowing, device)[1] == {"0": f"blocks.0.up.weight {unused}", "2": f"blocks.2.norm.weight {unused}"}
    assert seen(Methods, device)[1].keys() == {"0", "1"}
    assert seen(Sharing, device)[1] == dict.fromkeys("02", "it shares blocks.0.up.weight") | {
        "1": "it is called 2 times"
    }


def test_without_numbers_the_pass_goes_as_far_as_it_can() -> None:
    assert seen(Looking, "meta") == (["2", "1", "0", "3"], {})


class Tossing(Stack):
    """Python's random numbers decide in training what is called."""

    def through(self, x: Tensor) -> Tensor:
        return super().through(x) if not self.training or random.random() > 0.5 else x


class Listing(Stack):
    """Words of the batch decide what is called, as numbers of Python."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) if tokens.tolist() else tokens


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("build", "vary"),
    [
        (Stack, False), (Doubting, False), (Methods, False), (Sharing, False), (Backwards, False),
        (Looking, True), (Dropped, True), (Tossing, True), (Listing, True), (Experts, True),
        (partial(Stack, Choosy), True),
    ],
)  # fmt: skip
def test_calls_may_vary_where_code_asks_for_numbers(build: Any, vary: bool, device: str) -> None:
    with torch.device(device):
        model = build()
    before = random.getstate(), torch.get_rng_state()
    assert trace_calls(model, blocks(model), sample()).may_vary == vary
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


# What is gathered.


class Choosing(Stack):
    """Worker ``rank`` calls blocks of its own; a layer outside of them is only the second one's; a third nobody's."""

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.other, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)
        self.called: list[int] = [0, 1, 2, 3]

    def through(self, x: Tensor) -> Tensor:
        for i in self.called:
            x = self.blocks[i](x)
        return x + self.other(x) if x.sum() != 0 and self.rank else x


CALLED = ([0, 3], [1, 3])  # nobody calls the third block


def _chosen(rank: int, size: int, path: str, layout: Layout) -> dict[str, Any]:
    """Gradients of two micro-batches of each worker, against those of one that computes all four."""
    from unisono.layout.parallelize import device_mesh, parallelize

    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", size), rank=rank, world_size=size)
    try:
        torch.manual_seed(3)
        held = parallelize(Choosing, layout, device_mesh(RankMesh(layout, size), "cpu"), sample())
        model: Any = held.model
        told: list[Any] = []  # what a hook of the user sees
        model.blocks[3].register_forward_hook(lambda _, args, output: told.append((len(args), output.shape)))
        sums: dict[str, Tensor] = {}
        for name in held.leaves:
            held.on_gradient(name, lambda name, gradient: sums.update({name: sums.get(name, 0.0) + gradient}))
        _take(model, rank)
        for i in range(2):
            batch = TOKENS[2 * rank + i]
            loss = held.unsharding.connect(_loss(model(batch), batch))
            held.unsharding.backward(last=i == 1)
            loss.backward()
        mine = {name for name in held.leaves if held.unsharding.used(name)}
        unused = held.unsharding.finish()

        torch.manual_seed(3)
        whole = Choosing()
        for i, batch in enumerate(TOKENS):
            _take(whole, i // 2)
            _loss(whole(batch), batch).backward()
        for name, parameter in whole.named_parameters():
            assert (parameter.grad is None) == (name in unused), name
            if parameter.grad is not None:
                torch.testing.assert_close(sums[name], parameter.grad[held.parts[name].slices()], rtol=1e-5, atol=1e-7)
        return {"told": told, "mine": mine, "unused": unused}
    finally:
        dist.destroy_process_group()


def _take(model: Any, rank: int) -> None:
    model.called, model.rank = CALLED[rank], rank


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(shard=2, zero=1), Layout(replicate=2)], ids=str)
def test_workers_that_call_other_blocks_sum_the_same_gradients(layout: Layout, tmp_path: Path) -> None:
    first, second = run(2, _chosen, str(tmp_path), layout)
    names = {name for name, _ in Choosing().named_parameters()}
    assert first["unused"] == second["unused"] == {n for n in names if n.startswith(("blocks.2", "unused"))}
    assert first["mine"] - second["mine"] == {n for n in names if n.startswith("blocks.0")}
    assert second["mine"] - first["mine"] == {n for n in names if n.startswith(("blocks.1", "other"))}
    assert first["told"] == second["told"] == 2 * [(1, (2, 8, 32))]


class Partial(Stack):
    """Calls what this process was told to, whatever the numbers are."""

    called = (0, 1, 2, 3)

    def through(self, x: Tensor) -> Tensor:
        for i in self.called:
            x = self.blocks[i](x)
        return x


def _unlike(rank: int, size: int, path: str, layout: Layout, called: list[list[int]]) -> str:
    from unisono.layout.parallelize import device_mesh, parallelize

    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", size), rank=rank, world_size=size)
    try:
        Partial.called = called[rank]
        with pytest.raises(InvalidInput) as caught:
            parallelize(Partial, layout, device_mesh(RankMesh(layout, size), "cpu"), sample())
        return str(caught.value)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(replicate=2)], ids=str)
@pytest.mark.parametrize(
    ("called", "name"),
    [([[0, 1, 2, 3], [0, 1, 3]], "blocks.2"), ([[0, 1], [1, 0]], "blocks.0"), ([[1], [1, 1]], "blocks.1")],
)
def test_workers_that_will_not_call_the_same_blocks_are_refused(layout, called, name, tmp_path: Path) -> None:
    """Otherwise they would wait for each other for ever in the first pass."""
    for said in run(2, _unlike, str(tmp_path), layout, called):
        assert said.startswith(
            f"layout = {layout}: {name} is called differently by workers 0 and 1 on their first samples"
        )


def _twice(rank: int, size: int, path: str, order: list[int]) -> str:
    from unisono.layout.parallelize import device_mesh, parallelize

    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", size), rank=rank, world_size=size)
    try:
        layout = Layout(shard=2)
        model: Any = parallelize(Choosing, layout, device_mesh(RankMesh(layout, size), "cpu"), sample()).model
        model.called = order
        with pytest.raises(InvalidInput) as caught:
            model(TOKENS[0])
        return str(caught.value)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("order", "says"), [([0, 1, 1], "blocks.1 is called twice"), ([0, 2, 1], "blocks.1 is called after blocks.2")]
)
def test_a_block_that_cannot_be_gathered_once_more_is_named(order: list[int], says: str, tmp_path: Path) -> None:
    for said in run(2, _twice, str(tmp_path), order):
        assert said.startswith(f"layout = Layout(shard=2): {says} in a forward pass, but was not on the first samples")


def test_what_nobody_uses_stays_as_it_is(tmp_path: Path) -> None:
    """AdamW would shrink it, if its gradient were zero."""
    settings = {"steps": 3, "checkpoint_every": 3}
    for layout, workers in (("Layout()", 1), ("Layout(shard=2)", 2), ("Layout(shard=2)", 4)):
        path = tmp_path / f"{layout}{workers}"
        train("odd", {"optimizer": "adamw"}, workers, path, layout=layout, run_dir=str(path), **settings)
        opened = open_newest(path / "checkpoints", lambda damage: pytest.fail(str(damage)))
        assert opened is not None
        assert torch.equal(opened.read("model/spare"), torch.ones(2))
