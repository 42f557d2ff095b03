"""Stub modules in place of units that another stage computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.errors import InvalidInput
from unisono.layout.pipeline import cut_points, split
from unisono.layout.pipeline.stub_modules import EarlierStub, LaterStub, StubInput


def unit() -> nn.Module:
    """One whose forward was replaced, as splitting it over workers does."""
    made = nn.Linear(2, 2)
    made.kind = "linear"
    made.forward = lambda x: pytest.fail("another stage computes this")
    return made


def test_it_knows_what_its_unit_knew_and_does_nothing_of_what_it_did() -> None:
    arrived, door = torch.ones(3), StubInput()
    stand = EarlierStub(unit(), door, arrived)
    door.value = arrived
    assert stand(torch.zeros(3)) is arrived
    assert (stand.kind, stand.in_features, dict(stand.named_parameters())) == ("linear", 2, {})
    with pytest.raises(Exception) as left:
        LaterStub(unit(), door)(arrived)
    assert isinstance(left.value.value, Tensor)


class Blocks(nn.Module):
    """Code that torch.fx cannot follow, as it looks at a size."""

    def __init__(self, through: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.begin, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(self, self.begin(x))
        for block in self.blocks:
            if x.shape[0] == 1:
                break
            x = block(x)
        return x


def _doubt(model: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, model.training)


def _keep(model: nn.Module, x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape[0], 1) > 0.1) if model.training else x


def _drop(model: nn.Module, x: Tensor) -> Tensor:
    return x if not model.training or torch.rand(()) > 0.1 else model.begin(x)


def _python(model: nn.Module, x: Tensor) -> Tensor:
    return x if not model.training or random.random() > 0.1 else model.begin(x)


def _look(model: nn.Module, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else model.begin(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("through", [_doubt, _keep])
def test_random_numbers_that_change_activations_leave_places_to_cut(through: Any, device: str) -> None:
    with torch.device(device):
        model = Blocks(through)
    assert set(cut_points(model, torch.ones(3, 4)).names) >= {"blocks.1", "blocks.2", "blocks.3"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("through", [_drop, _python, _look])
def test_code_that_decides_by_numbers_what_it_calls_is_refused(through: Any, device: str) -> None:
    with torch.device(device):
        model = Blocks(through)
    with pytest.raises(InvalidInput, match=r"pipeline = Blocks: no cut point .*control flow depends on values"):
        cut_points(model, torch.ones(3, 4))


def test_random_states_are_taken_up_where_the_first_unit_of_a_stage_begins() -> None:
    """Before that the model's own code draws once more what an earlier stage has drawn."""
    model = Blocks(_doubt).train()
    first, second = split(model, torch.ones(3, 4), 2, cuts=["blocks.1"]).modules
    torch.manual_seed(0)
    (passed,) = first(x=torch.ones(3, 4))
    arrived, drawn = torch.get_rng_state(), []
    second.begin_with(lambda: torch.set_rng_state(arrived))
    model.blocks[1].register_forward_pre_hook(lambda *_: drawn.append(torch.rand(3)))
    second(passed, x=torch.ones(3, 4))
    torch.set_rng_state(arrived)
    assert torch.equal(drawn[0], torch.rand(3))
    second(passed, x=torch.ones(3, 4))  # once only
    assert not torch.equal(drawn[0], drawn[1])
