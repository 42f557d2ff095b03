"""Models on the meta device, with inputs that have values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unisono.layout.shape_propagation import PropagateShapes
from unisono.layout.tensor import derive


class Looking(nn.Module):
    """Its code asks for a value of what it is given, and of what it makes from that."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(words)
        places = torch.arange(words.shape[1], device=x.device) + 1
        if not mask.all() or int(places[-1]) != words.shape[1]:
            x = x * mask[:, :, None]
        return self.down(self.up(x).relu())


WORDS = torch.tensor([[1, 2, 3]])


def test_what_depends_on_inputs_alone_has_its_numbers_and_all_else_a_shape() -> None:
    with torch.device("meta"):
        model = Looking()
    for mask in (torch.ones(1, 3), torch.tensor([[1.0, 1.0, 0.0]])):
        with torch.no_grad(), pytest.raises(Exception, match="meta"):
            model(WORDS.to("meta"), mask.to("meta"))
        with torch.no_grad(), PropagateShapes():
            out = model(WORDS, mask)
        assert out.is_meta
        assert out.shape == (1, 3, 4)


def test_numbers_that_were_written_over_with_unknown_ones_are_unknown() -> None:
    weight, whole = torch.ones(3, device="meta"), torch.ones(3, device="meta", dtype=torch.long)
    with PropagateShapes():
        kept, view = torch.zeros(3, device="meta", dtype=torch.long), torch.zeros(2, 3)
        assert kept.add_(1).sum().item() == 3
        assert kept.add_(whole) is kept
        view[0].mul_(weight)
        for unknown in (kept.sum(), kept[1:] + 1, view.sum()):
            with pytest.raises(RuntimeError, match="meta"):
                bool((unknown == 0).all())


def test_fresh_real_numbers_stay_on_the_meta_device_and_are_known() -> None:
    unknown = torch.ones(3, device="meta")
    with PropagateShapes():
        mask = torch.ones(2, 3, device="meta")
        assert mask.is_meta
        assert bool(mask.all())
        assert (mask[:, 1:] * 2).is_meta
        assert (mask[:, 1:] * 2).sum().item() == 8
        mask[0, 1:] = 0.0
        assert mask.sum().item() == 4
        assert (mask.to(torch.long) == torch.tensor([[1, 0, 0], [1, 1, 1]])).all()
        mask[1] = unknown
        drawn = torch.rand(3, device="meta")
        for lost in (mask, mask[0] + 1, drawn):
            with pytest.raises(RuntimeError, match="meta"):
                lost.sum().item()


def test_a_model_that_looks_at_its_inputs_is_split_as_if_it_had_numbers() -> None:
    real = Looking()
    with torch.device("meta"):
        model = Looking()
    sample = (WORDS, torch.ones(1, 3))
    assert derive(model, 2, sample).split == derive(real, 2, sample).split != {}
