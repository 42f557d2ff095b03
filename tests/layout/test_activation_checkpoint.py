"""Recomputed blocks: the same bits, less memory, and unchanged names, buffers and random streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.errors import InvalidInput
from unisono.layout import BlockOptions, blocks
from unisono.tasks.builtin.gpt import GPT

KINDS = ["blocks", "selective"]


class Counting(nn.Module):
    """A buffer that is another tensor after each forward pass, and changes what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, by: float = 1.0) -> Tensor:
        self.calls = self.calls + by
        out: Tensor = torch.relu(self.inner(x) * self.calls)
        return out


def gpt() -> nn.Module:
    return GPT(layers=3, width=64, heads=2, context=64, dropout=0.2).build()


def normed() -> nn.Module:
    rows = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)) for _ in range(2)]
    return nn.Sequential(*rows, nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.ReLU()), Counting())


TOKENS = torch.arange(128).view(2, 64)
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "gpt": (gpt, TOKENS),
    "normed": (normed, torch.randn(6, 8, generator=torch.Generator().manual_seed(0))),
}


def built(name: str, kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    compute = BlockOptions(activation_checkpointing=kind)
    compute.check(model)
    for block in blocks(model):
        compute.prepare(block)
    return model


def seen(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Two micro-batches' losses, all gradients and buffers, and where the random stream is after it."""
    losses = []
    for _ in range(2):
        loss = model(x).float().square().mean()
        losses.append(loss.detach())
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients, *(b.clone() for b in model.buffers()), torch.rand(3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name, kind) -> None:
    whole, again = built(name, "none"), built(name, kind)
    assert list(again.state_dict()) == list(whole.state_dict())
    assert [n for n, _ in again.named_modules()] == [n for n, _ in whole.named_modules()]
    results = []
    for model in (whole, again):
        torch.manual_seed(7)
        results.append(seen(model, MODELS[name][1]))
    assert len(results[0]) == len(results[1])
    for expected, found in zip(*results):
        assert torch.equal(expected, found)


class Alive(TorchDispatchMode):
    """Knows all memory that operations made, and how much of it is still held."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def bytes(self) -> int:
        return sum(size for reference, size in self._made.values() if not reference.expired())


def held_for_backward(kind: str) -> int:
    model = built("gpt", kind)
    with Alive() as alive:
        loss = model(TOKENS).float().square().mean()
        found = alive.bytes
        loss.backward()
    return found


def test_memory_is_given_back_between_forward_and_backward() -> None:
    none, selective, all_of_them = map(held_for_backward, ["none", "selective", "blocks"])
    assert all_of_them < 0.4 * none
    assert all_of_them < selective < 0.8 * none


def test_what_was_kept_is_not_computed_again() -> None:
    counts = {}
    for kind in ("none", "selective", "blocks"):
        model, calls = built("gpt", kind), 0

        class Products(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal calls
                calls += func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
                return func(*args, **(kwargs or {}))

        loss = model(TOKENS).float().square().mean()
        with Products():
            loss.backward()
        counts[kind] = calls
    assert counts["selective"] == counts["none"] < counts["blocks"]


def test_evaluation_computes_once() -> None:
    model, calls = built("normed", "blocks"), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        model.eval()(MODELS["normed"][1])
    assert len(calls) == 1


def test_a_model_without_blocks_is_refused() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

    with pytest.raises(
        InvalidInput, match="activation_checkpointing = blocks: Plain has no list or sequence of blocks"
    ):
        BlockOptions(activation_checkpointing="blocks").check(Plain())
    with pytest.raises(InvalidInput, match=r"compile = True: Plain has no list .* one by one"):
        BlockOptions(compile=True).check(Plain())
    BlockOptions(compile=True, whole=True).check(Plain())
