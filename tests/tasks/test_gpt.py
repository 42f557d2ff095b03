"""The byte-level GPT: sizes, causality, dropout, and what cannot be built."""

from __future__ import annotations

import pytest
import torch

from unisono.tasks.builtin.gpt import GPT, parameters

TINY = GPT(layers=2, width=16, heads=2, context=12)


@pytest.mark.parametrize(
    ("shape", "millions"), [(GPT(), 1.07), (GPT(layers=12, width=256), 9.64), (GPT(layers=1, width=64), 0.09)]
)
def test_parameters(shape: GPT, millions: float) -> None:
    assert parameters(shape.build()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_a_byte_changes_no_earlier_logit() -> None:
    torch.manual_seed(0)
    model = TINY.build()
    a = torch.randint(256, (3, 12))
    b = a.clone()
    b[:, 7] = (b[:, 7] + 1) % 256
    with torch.no_grad():
        x, y = model(a), model(b)
    assert torch.equal(x[:, :7], y[:, :7])
    assert not torch.equal(x[:, 7:], y[:, 7:])


def test_shorter_inputs_give_the_same_logits() -> None:
    model = TINY.build()
    tokens = torch.randint(256, (2, 12))
    assert torch.allclose(model(tokens)[:, :5], model(tokens[:, :5]), atol=1e-6)


def test_dropout_acts_in_training_only() -> None:
    model = GPT(layers=1, width=16, heads=2, context=8, dropout=0.5).build()
    tokens = torch.randint(256, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_the_same_seed_gives_the_same_weights() -> None:
    def weights() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        return TINY.build().state_dict()

    a, b = weights(), weights()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"layers": 0}, "layers=0 is below 1"),
        ({"heads": 3}, "width=128 is not a multiple of heads=3"),
        ({"dropout": 1.0}, "dropout=1.0 is not in"),
    ],
)
def test_a_shape_that_cannot_be_built_says_why(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        GPT(**wrong)  # type: ignore[arg-type]
