"""What each ZeRO stage sends and in which dtype; all stages give the same gradient sums."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.processes import run
from unisono.errors import InvalidInput
from unisono.layout import BlockOptions, Layout, RankMesh, Sample
from unisono.layout.fsdp import modules_of_other_dtype
from unisono.tasks.builtin.gpt import GPT

NETWORK = GPT(layers=3, width=32, heads=4, context=16, dropout=0.0)
TOKENS = torch.arange(128).view(4, 2, 16)
GROUPS = 4  # three blocks and the rest
MICRO_BATCHES = 2  # of each worker
FP32 = BlockOptions()


def sample() -> Sample:
    return Sample((TOKENS[0], TOKENS[0]), lambda batch: batch[0], _loss, None)


def _loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


KINDS = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "sum"}


class Messages(TorchDispatchMode):
    """Counts collectives, and the bytes that each worker hands in."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(func.name().partition("::")[2]) if func.namespace == "c10d" else None
        if kind is not None:
            given = args[0][0] if kind == "sum" else args[1]
            self.count[kind] += 1
            self.bytes[kind] += given.numel() * given.element_size()
            self.dtypes.setdefault(kind, set()).add(given.dtype)
        return func(*args, **(kwargs or {}))


def _step(rank: int, size: int, path: str, layout: Layout, compute: BlockOptions) -> dict[str, Any]:
    """Forward and backward of two micro-batches of each worker."""
    from unisono.layout.parallelize import device_mesh, parallelize

    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", size), rank=rank, world_size=size)
    try:
        torch.manual_seed(3)
        mesh = device_mesh(RankMesh(layout, size), "cpu")
        held = parallelize(NETWORK.build, layout, mesh, sample(), compute)
        assert {p.dtype for p in held.local.parameters()} == {torch.float32}
        sums: dict[str, list[Tensor]] = {name: [] for name in held.leaves}
        for name in held.leaves:
            held.on_gradient(name, lambda name, gradient: sums[name].append(gradient))
        computed_in: set[torch.dtype] = set()
        for module in held.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda m, _, out: computed_in.update({m.weight.dtype, out.dtype}))
        losses = []
        with Messages() as messages:
            for i in range(MICRO_BATCHES):
                batch = TOKENS[MICRO_BATCHES * rank + i]
                loss = _loss(held.model(batch), (batch, batch.roll(1)))
                losses.append(loss.item())
                held.unsharding.backward(last=i == MICRO_BATCHES - 1)
                loss.backward()
        return {
            "count": dict(messages.count), "bytes": dict(messages.bytes), "dtypes": messages.dtypes, "losses": losses,
            "sums": {name: torch.stack(each).sum(0) for name, each in sums.items()},
            "arrived": {len(each) for each in sums.values()}, "computed_in": computed_in,
        }  # fmt: skip
    finally:
        dist.destroy_process_group()


def step(tmp_path: Path, layout: Layout, compute: BlockOptions = FP32) -> list[dict[str, Any]]:
    path = tmp_path / f"{layout}-{compute.precision}-{compute.activation_checkpointing}"
    path.mkdir()
    return run(layout.workers, _step, str(path), layout, compute)


@pytest.mark.long
def test_stages_of_zero_send_less_the_more_they_keep(tmp_path: Path) -> None:
    found = {zero: step(tmp_path, Layout(shard=2, zero=zero)) for zero in (3, 2, 1)}
    counts = {zero: found[zero][0]["count"] for zero in found}
    # Blocks are gathered in both passes, the root in one.
    assert counts[3] == {"gather": MICRO_BATCHES * (2 * GROUPS - 1), "scatter": MICRO_BATCHES * GROUPS}
    assert counts[2] == {"gather": MICRO_BATCHES * GROUPS, "scatter": MICRO_BATCHES * GROUPS}
    assert counts[1] == {"gather": GROUPS, "scatter": GROUPS}
    moved = {zero: sum(found[zero][0]["bytes"].values()) for zero in found}
    assert moved[3] > moved[2] > moved[1] == moved[2] / MICRO_BATCHES
    assert [found[zero][0]["arrived"] for zero in (3, 2, 1)] == [{MICRO_BATCHES}, {MICRO_BATCHES}, {1}]
    for zero in (2, 1):
        for worker in range(2):
            assert found[zero][worker]["losses"] == found[3][worker]["losses"]
            for name, expected in found[3][worker]["sums"].items():
                torch.testing.assert_close(found[zero][worker]["sums"][name], expected, rtol=1e-5, atol=1e-7)


def test_copies_sum_once_per_step_where_they_are_asked_to(tmp_path: Path) -> None:
    often, once = (step(tmp_path, Layout(replicate=2, zero=zero)) for zero in (3, 1))
    assert often[0]["count"] == {"sum": MICRO_BATCHES * GROUPS}
    assert once[0]["count"] == {"sum": GROUPS}


def test_parameters_travel_in_bf16_and_gradients_in_fp32(tmp_path: Path) -> None:
    whole = step(tmp_path, Layout(shard=2))
    half = step(tmp_path, Layout(shard=2), BlockOptions(precision="bf16_parameters"))
    assert half[0]["computed_in"] == {torch.bfloat16}
    assert half[0]["dtypes"]["scatter"] == {torch.float32}
    assert half[0]["count"] == whole[0]["count"]
    assert half[0]["bytes"]["scatter"] == whole[0]["bytes"]["scatter"]
    assert half[0]["bytes"]["gather"] == whole[0]["bytes"]["gather"] / 2
    assert all(s.dtype == torch.float32 for s in half[0]["sums"].values())
    assert half[0]["losses"] == pytest.approx(whole[0]["losses"], abs=5e-3)
    assert half[0]["losses"] != whole[0]["losses"]
    for name, expected in whole[0]["sums"].items():
        assert (half[0]["sums"][name] - expected).norm() < 0.05 * expected.norm(), name


def test_blocks_that_compute_again_gather_no_more(tmp_path: Path) -> None:
    plain, again = (
        step(tmp_path, Layout(shard=2), BlockOptions(activation_checkpointing=kind)) for kind in ("none", "blocks")
    )
    assert again[0]["count"] == plain[0]["count"]
    assert again[0]["losses"] == plain[0]["losses"]
    for name, expected in plain[0]["sums"].items():
        assert torch.equal(again[0]["sums"][name], expected)


def _changed(rank: int, size: int, path: str, layout: Layout) -> dict[str, float]:
    """Weights are doubled after an evaluation, as replicas that meet change them; what the next forward pass sees."""
    from unisono.layout.parallelize import device_mesh, parallelize

    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", size), rank=rank, world_size=size)
    try:
        torch.manual_seed(3)
        held = parallelize(NETWORK.build, layout, device_mesh(RankMesh(layout, size), "cpu"), sample())

        def loss(model: nn.Module) -> float:
            return _loss(model(TOKENS[0]), (TOKENS[0], TOKENS[0])).item()

        with torch.no_grad():
            before = loss(held.model)
            for parameter in held.local.parameters():
                parameter.mul_(2)
            torch.manual_seed(3)
            whole = NETWORK.build()
            expected = [loss(whole)]
            for parameter in whole.parameters():
                parameter.mul_(2)
            expected.append(loss(whole))
            held.unsharding.reshard()
            after = loss(held.model)
        return {"before": before - expected[0], "after": after - expected[1], "change": before - expected[1]}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(shard=2, zero=1), Layout(replicate=2)], ids=str)
def test_what_changes_after_an_evaluation_is_seen(layout: Layout, tmp_path: Path) -> None:
    for found in run(2, _changed, str(tmp_path), layout):
        assert abs(found["before"]) < 1e-6
        assert abs(found["after"]) < 1e-6
        assert abs(found["change"]) > 1e-2


class Both(nn.Module):
    """Has parameters of two dtypes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.shift = nn.Parameter(torch.ones(4, dtype=torch.float64))


def test_a_module_with_parameters_of_several_dtypes_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="Both: this module has parameters of float32 and float64"):
        modules_of_other_dtype(nn.Sequential(nn.Linear(4, 4), Both()), [])


def test_what_lies_together_is_of_the_dtype_of_most_of_its_numbers() -> None:
    few, many = nn.Linear(2, 2), nn.Linear(9, 9).double()
    assert modules_of_other_dtype(nn.Sequential(few, many), []) == [few]
    assert modules_of_other_dtype(nn.Sequential(few, many), [many]) == []
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert modules_of_other_dtype(nn.Sequential(frozen, many), []) == []
