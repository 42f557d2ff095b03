"""What stands in place of a unit that another stage computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unisono.layout.pipeline.standins import Door, Earlier, Later


def unit() -> nn.Module:
    """One whose forward was replaced, as splitting it over workers does."""
    made = nn.Linear(2, 2)
    made.kind = "linear"
    made.forward = lambda x: pytest.fail("another stage computes this")
    return made


def test_it_knows_what_its_unit_knew_and_does_nothing_of_what_it_did() -> None:
    arrived, door = torch.ones(3), Door()
    stand = Earlier(unit(), door, arrived)
    door.value = arrived
    assert stand(torch.zeros(3)) is arrived
    assert (stand.kind, stand.in_features, dict(stand.named_parameters())) == ("linear", 2, {})
    with pytest.raises(Exception) as left:
        Later(unit(), door)(arrived)
    assert isinstance(left.value.value, Tensor)
