"""Optimizers are fused where possible, and their state survives a round trip under global names."""

import pytest
import torch
from torch import nn

from unisono.elastic.model_state import load_state, state_of
from unisono.trainer.optimizer import LearningRate, build_optimizer, prefer_fused


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 1))


def groups(model: nn.Sequential) -> list[dict]:
    """Two groups with rates of their own; the last layer is not trained at all."""
    return [{"params": list(model[1].parameters()), "lr": 0.5}, {"params": list(model[0].parameters())}]


MAKERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.1),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, 0.1, amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.1, momentum=0.9, centered=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 0.1),
    "rprop": lambda ps: torch.optim.Rprop(ps, 0.1),
}


def walk(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_optimizer_goes_on_bit_for_bit(name, fused) -> None:
    whole, part, fresh = net(), net(), net()
    made = [MAKERS[name](groups(model)) for model in (whole, part, fresh)]
    for optimizer in made if fused else []:
        prefer_fused(optimizer, sparse=False)
    walk(whole, made[0], range(6))
    walk(part, made[1], range(3))
    fresh.load_state_dict(part.state_dict())
    tensors, numbers = state_of(made[1], part)
    assert all(key.split("/")[0] in dict(part.named_parameters()) for key in [*tensors, *numbers])
    load_state(made[2], fresh, {key: t.clone() for key, t in tensors.items()}, dict(numbers))
    assert [g["lr"] for g in made[2].param_groups] == [0.5, 0.1]
    walk(fresh, made[2], range(3, 6))
    for a, b in zip(whole.parameters(), fresh.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [MAKERS["sgd"], MAKERS["momentum"], MAKERS["adam"], MAKERS["adagrad"],
                                  lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, dampening=0.5)])  # fmt: skip
def test_a_parameter_may_get_its_first_gradient_later_than_others(make) -> None:
    models = net(), net()
    plain, fused = (make(groups(model)) for model in models)
    prefer_fused(fused, sparse=False)
    for model, optimizer in zip(models, (plain, fused)):
        model[0].bias.requires_grad_(False)  # as if a branch had left it out
        walk(model, optimizer, range(2))
        model[0].bias.requires_grad_(True)
        walk(model, optimizer, range(2, 5))
    for a, b in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(a, b)


class Mine(torch.optim.SGD):
    """An optimizer of the user's own, whose step nobody knows."""


@pytest.mark.parametrize(
    ("make", "sparse", "fused"),
    [
        (lambda ps: torch.optim.SGD(ps, 0.1), False, True),
        (lambda ps: torch.optim.Adam(ps), False, True),
        (lambda ps: torch.optim.AdamW(ps), False, True),
        (lambda ps: torch.optim.Adagrad(ps), False, True),
        (lambda ps: torch.optim.RMSprop(ps), False, None),
        (lambda ps: torch.optim.SGD(ps, 0.1), True, None),
        (lambda ps: torch.optim.SGD(ps, 0.1, foreach=True), False, None),
        (lambda ps: torch.optim.SGD(ps, 0.1, foreach=False), False, None),
        (lambda ps: torch.optim.AdamW(ps, fused=False), False, False),
        (lambda ps: torch.optim.Adam(ps, differentiable=True), False, None),
        (lambda ps: Mine(ps, 0.1), False, None),
    ],
)
def test_fused_is_chosen_where_it_exists_and_nobody_chose(make, sparse, fused) -> None:
    optimizer = make(net().parameters())
    prefer_fused(optimizer, sparse)
    assert optimizer.param_groups[0].get("fused") is fused


@pytest.mark.parametrize("size", [1, 33, 2053])  # a processor's vector instructions see some of these, and not others
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "amsgrad", "adagrad"])
def test_the_chosen_step_is_the_plain_one(name, dtype, size) -> None:
    random = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, size, generator=random).to(dtype)
    pair = [nn.Parameter(start.clone()) for _ in range(2)]
    chosen, plain = (MAKERS[name]([parameter]) for parameter in pair)
    prefer_fused(chosen, sparse=False)
    for gradient in gradients:
        for parameter, optimizer in zip(pair, (chosen, plain)):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(*pair, equal_nan=True)
    kept, expected = (state_of(each, nn.ParameterList([p]))[0] for each, p in zip((chosen, plain), pair))
    torch.testing.assert_close(kept, expected)


@pytest.mark.parametrize(("lr", "rates"), [(None, [0.25, 0.05]), (0.2, [0.1, 0.1])])
def test_the_learning_rate_is_scheduled_group_by_group(lr, rates) -> None:
    model = net()
    optimizer = MAKERS["sgd"](groups(model))
    rate = LearningRate(optimizer, lr)
    for factor in (0.1, 0.5):
        rate.set(factor)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(rates)


@pytest.mark.parametrize("name", MAKERS)
def test_a_worker_may_have_nothing_to_train(name) -> None:
    optimizer = build_optimizer(MAKERS[name], [])
    prefer_fused(optimizer, sparse=False)
    LearningRate(optimizer, 0.3).set(0.5)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.15
    assert state_of(optimizer, nn.Module()) == ({}, {})
    load_state(optimizer, nn.Module(), {}, {})
    optimizer.step()
