"""Optimizers and schedulers of torch and of one's own; several of them, and changes to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler

from tests.end_to_end.loop_cases.environments import Environment
from tests.end_to_end.loop_cases.fragments import (
    STEPS,
    adam,
    loaded,
    mse,
    net,
    numbers,
    samples,
    saved,
    sgd,
    train,
    weights,
)
from tests.end_to_end.loop_cases.table import Case, Expected, Numbers, add, case

ABSENT, EITHER = Expected.ABSENT, Expected.EITHER
Make = Callable[[Any], Optimizer]
LATER = "parameters become trainable after bind"


# ---- every optimizer of torch

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd_nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_dampening": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5),
    "sgd_maximize": lambda ps: torch.optim.SGD(ps, lr=0.01, maximize=True),
    "sgd_foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "sgd_tensor_lr": lambda ps: torch.optim.SGD(ps, lr=torch.tensor(0.1)),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.02),
    "adam_weight_decay": lambda ps: torch.optim.Adam(ps, lr=0.02, weight_decay=0.1),
    "adam_amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.02, amsgrad=True),
    "adam_maximize": lambda ps: torch.optim.Adam(ps, lr=0.02, maximize=True),
    "adam_foreach": lambda ps: torch.optim.Adam(ps, lr=0.02, foreach=True),
    "adam_fused": lambda ps: torch.optim.Adam(ps, lr=0.02, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0.1),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.02),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.02),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.02),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.05),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.1, t0=1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
    "rmsprop_centered": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
}


def _with(make: Make, env: Environment) -> Numbers:
    model = net()
    return train(env, *env.bind(model, make(model.parameters())))


for _name, _make in OPTIMIZERS.items():
    add(Case(f"optimizer_{_name}", partial(_with, _make)))


@case(tolerance=1e-3)
def optimizer_muon(env: Environment) -> Numbers:
    """Muon for matrices, in bfloat16 inside, and AdamW for the rest."""
    model = net(5, 8, 8, 1)
    matrices = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=0.02)
    model, matrices, rest = env.bind(model, matrices, rest)
    train(env, model, matrices, rest)
    return weights(model)


# ---- optimizers of one's own


class Lamb(Optimizer):
    """LAMB: Adam's step, scaled by the norm of each layer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].lerp_(p.grad.square(), 0.001)
                step = state["mean"] / (state["square"].sqrt() + 1e-6) + 0.01 * p
                trust = p.norm() / step.norm() if p.norm() > 0 else 1.0
                p.sub_(step, alpha=float(group["lr"] * trust))


class Lion(Optimizer):
    """Lion: the sign of an average, with a step that has no argument."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.sub_((0.9 * average + 0.1 * p.grad).sign(), alpha=group["lr"])
                average.lerp_(p.grad, 0.01)


class Lookahead:
    """Steps of `inner`; every second one, weights go back half of the way to slow ones."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self._steps = inner, 0
        self._slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]

    def step(self) -> None:
        self.inner.step()
        self._steps += 1
        if self._steps % 2 == 0:
            fast = (p for g in self.inner.param_groups for p in g["params"])
            with torch.no_grad():
                for slow, parameter in zip(self._slow, fast, strict=True):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)


@case()
def optimizer_lamb(env: Environment) -> Numbers:
    """An optimizer of one's own, with norms of each layer."""
    model = net()
    return train(env, *env.bind(model, Lamb(model.parameters(), 0.02)))


@case()
def optimizer_lion(env: Environment) -> Numbers:
    """An optimizer of one's own, whose step takes no closure."""
    model = net()
    return train(env, *env.bind(model, Lion(model.parameters(), 0.01)))


@case()
def optimizer_lookahead(env: Environment) -> Numbers:
    """A wrapper that is no optimizer itself."""
    model = net()
    model, inner = env.bind(model, sgd(model))
    outer = Lookahead(inner)
    for batch in env.batches(samples("x", "y"), STEPS):
        inner.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        outer.step()
    return numbers(model, inner)


# ---- closures


@case()
def closure_sgd(env: Environment) -> Numbers:
    """`step(closure)` of an optimizer that calls it once."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    return _by_closure(env, model, optimizer)


@case()
def closure_lbfgs(env: Environment) -> Numbers:
    """L-BFGS calls its closure several times in each step."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3, tolerance_change=0.0)
    model, optimizer = env.bind(model, optimizer)
    _by_closure(env, model, optimizer)
    return weights(model)


@case()
def closure_lbfgs_with_line_search(env: Environment) -> Numbers:
    """A line search compares losses, so the closure returns the mean loss of all workers."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    model, optimizer = env.bind(model, optimizer)
    _by_closure(env, model, optimizer)
    return weights(model)


def _by_closure(env: Environment, model: nn.Module, optimizer: Optimizer) -> Numbers:
    for batch in env.batches(samples("x", "y"), STEPS):

        def closure() -> Tensor:
            optimizer.zero_grad()
            losses = []
            for x, y in batch:  # noqa: B023 (it is called in this iteration)
                loss = mse(model, x, y)
                loss.backward()
                losses.append(loss.item())
            return torch.tensor(env.mean(sum(losses) / len(losses)))

        optimizer.step(closure)
    return numbers(model, optimizer)


# ---- schedulers

SCHEDULERS: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.1),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.8),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS + 1),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


def _scheduled(make: Callable[[Optimizer], lr_scheduler.LRScheduler], env: Environment) -> Numbers:
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    return train(env, model, optimizer, after_step=make(optimizer).step)


for _name, _schedule in SCHEDULERS.items():
    add(Case(f"schedule_{_name}", partial(_scheduled, _schedule)))


@case()
def schedule_made_before_bind(env: Environment) -> Numbers:
    """A scheduler that has wrapped the optimizer's step already."""
    model = net()
    optimizer = sgd(model)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer = env.bind(model, optimizer)
    return train(env, model, optimizer, after_step=scheduler.step)


@case()
def schedule_on_plateau(env: Environment) -> Numbers:
    """ReduceLROnPlateau on the mean loss of all workers."""
    model = net()
    model, optimizer = env.bind(model, sgd(model, lr=1.0))
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        losses = []
        for x, y in batch:
            loss = mse(model, x, y)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        scheduler.step(env.mean(sum(losses) / len(losses)))
    return numbers(model, optimizer)


@case()
def lr_set_by_hand(env: Environment) -> Numbers:
    """The loop writes `param_groups[0]["lr"]`."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def halve() -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    return train(env, model, optimizer, after_step=halve)


@case()
def momentum_set_by_hand(env: Environment) -> Numbers:
    """The loop changes momentum and weight decay."""
    model = net()
    model, optimizer = env.bind(model, sgd(model, momentum=0.5))

    def change() -> None:
        optimizer.param_groups[0].update(momentum=0.9, weight_decay=0.1)

    return train(env, model, optimizer, after_step=change)


# ---- groups, and several optimizers


@case()
def parameter_groups(env: Environment) -> Numbers:
    """Two groups with learning rates and weight decay of their own."""
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.02, "weight_decay": 0.1}, {"params": model[2].parameters()}]
    return train(env, *env.bind(model, torch.optim.AdamW(groups, lr=0.05, weight_decay=0.0)))


@case()
def some_parameters_in_no_optimizer(env: Environment) -> Numbers:
    """The first layer has gradients, and no optimizer takes them."""
    model = net()
    model, optimizer = env.bind(model, sgd(model[2]))

    def clear() -> None:
        model.zero_grad()

    return train(env, model, optimizer, after_step=clear)


@case()
def two_optimizers_for_one_model(env: Environment) -> Numbers:
    """SGD for the body, Adam for the head."""
    model = net()
    model, body, head = env.bind(model, sgd(model[0]), adam(model[2]))
    return train(env, model, body, head)


@case()
def second_optimizer_every_second_step(env: Environment) -> Numbers:
    """The head's optimizer steps at every second step, with what has accumulated."""
    model = net()
    model, body, head = env.bind(model, sgd(model[0]), sgd(model[2]))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        body.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        body.step()
        if step % 2:
            head.step()
            head.zero_grad()
    return numbers(model, body, head)


@case()
def embeddings_apart(env: Environment) -> Numbers:
    """SGD for embeddings, Adam for the rest, each with a scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(42, 3)).double()
    model, table, rest = env.bind(model, sgd(model[0]), adam(model[2]))
    schedules = [lr_scheduler.ExponentialLR(o, 0.9) for o in (table, rest)]
    return train(
        env, model, table, rest, loss_of=lambda m, tokens, label: F.cross_entropy(m(tokens), label),
        data=samples("tokens", "label"), after_step=lambda: [s.step() for s in schedules],
    )  # fmt: skip


@case(own=EITHER, steps=EITHER, why="the second optimizer is not bound")
def new_optimizer_not_bound(env: Environment) -> Numbers:
    """Half-way, the loop continues with another optimizer, which is not bound."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    return _with_new_optimizer(env, model, optimizer, lambda: adam(model))


@case(steps=EITHER, why="bind comes in the middle of world.steps")
def new_optimizer_bound(env: Environment) -> Numbers:
    """Half-way, the loop binds another optimizer of the same model."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    return _with_new_optimizer(env, model, optimizer, lambda: env.bind(model, adam(model))[1])


def _with_new_optimizer(
    env: Environment, model: nn.Module, optimizer: Optimizer, make: Callable[[], Optimizer]
) -> Numbers:
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        if step == 2:
            optimizer = make()
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case()
def both_optimizers_bound_at_first(env: Environment) -> Numbers:
    """Adam takes over from SGD half-way; both were bound."""
    model = net()
    model, first, second = env.bind(model, sgd(model), adam(model))
    optimizers = iter([first, first, second, second])
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer = next(optimizers)
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, first, second)


# ---- what trains changes


@case()
def freeze_later(env: Environment) -> Numbers:
    """After two steps the first layer is frozen, and keeps its weights."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        model[0].requires_grad_(step < 2)
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(own=EITHER, steps=EITHER, why=LATER)
def unfreeze_later(env: Environment) -> Numbers:
    """The first layer trains after two steps; the optimizer has it from the start."""
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = env.bind(model, sgd(model))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        model[0].requires_grad_(step >= 2)
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(own=EITHER, steps=EITHER, why=LATER)
def add_param_group_of_frozen_layer(env: Environment) -> Numbers:
    """The first layer is unfrozen and added to the optimizer after two steps."""
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = env.bind(model, sgd(model[2]))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        if step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(steps=EITHER, why="bind comes in the middle of world.steps")
def unfreeze_and_bind_again(env: Environment) -> Numbers:
    """The first layer is unfrozen after two steps, and model and a new optimizer are bound again."""
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = env.bind(model, sgd(model[2]))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        if step == 2:
            model.requires_grad_(True)
            model, optimizer = env.bind(model, sgd(model))
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(own=EITHER, steps=EITHER, why="the new head is not bound")
def replaced_head(env: Environment) -> Numbers:
    """After two steps the head is another one, with an optimizer of its own."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        if step == 2:
            model[2] = net(8, 1, seed=7)[0]
            optimizer = sgd(model)
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(steps=EITHER, why="bind comes in the middle of world.steps")
def replaced_head_bound_again(env: Environment) -> Numbers:
    """After two steps the head is another one, of another seed on each worker, and all is bound again."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        if step == 2:
            model[2] = net(8, 1, seed=7 + env.rank)[0]
            model, optimizer = env.bind(model, sgd(model))
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(own=EITHER, steps=EITHER, why="the new layer is not bound")
def add_param_group_of_new_layer(env: Environment) -> Numbers:
    """A layer is put on top after two steps, and added to the optimizer."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        if step == 2:
            model.append(net(1, 1, seed=7)[0])
            optimizer.add_param_group({"params": list(model[-1].parameters())})
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(steps=EITHER, why="bind comes in the middle of world.steps")
def growing_network(env: Environment) -> Numbers:
    """A second network is bound after two steps, and trains on top of the first."""
    model = net(5, 8)
    model, optimizer = env.bind(model, sgd(model))
    top, other = nn.Identity(), optimizer
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        if step == 2:
            top = net(8, 8, seed=7)
            top, other = env.bind(top, adam(top))
        optimizer.zero_grad()
        other.zero_grad()
        for x, y in batch:
            F.mse_loss(top(model(x)).mean(1, keepdim=True), y).backward()
        optimizer.step()
        if other is not optimizer:
            other.step()
    return numbers(model, top, optimizer, other)


@case(own=EITHER, steps=EITHER, why="the parameter is of no model")
def parameter_outside_of_the_model(env: Environment) -> Numbers:
    """The optimizer has a parameter that belongs to no model: the logarithm of a variance."""
    model, spread = net(), nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([*model.parameters(), spread], lr=0.02)
    model, optimizer = env.bind(model, optimizer)
    return train(env, model, optimizer, loss_of=lambda m, x, y: ((m(x) - y).square() * (-spread).exp() + spread).mean())


# ---- the optimizer's state


@case()
def state_loaded_into_the_same_optimizer(env: Environment) -> Numbers:
    """The optimizer's state of the first step is loaded after the third."""
    model = net()
    model, optimizer = env.bind(model, adam(model))
    kept: list[bytes] = []

    def keep_or_load() -> None:
        kept.append(saved(optimizer.state_dict()))
        if len(kept) == 3:
            optimizer.load_state_dict(loaded(kept[0]))

    return train(env, model, optimizer, after_step=keep_or_load)


@case(own=EITHER, steps=EITHER, why="the second optimizer is not bound")
def state_loaded_into_a_new_optimizer(env: Environment) -> Numbers:
    """A new optimizer continues with the state of the old one."""
    model = net()
    model, optimizer = env.bind(model, adam(model))

    def continued() -> Optimizer:
        other = adam(model, lr=1.0)
        other.load_state_dict(loaded(saved(optimizer.state_dict())))
        return other

    return _with_new_optimizer(env, model, optimizer, continued)


@case()
def state_cleared(env: Environment) -> Numbers:
    """Momentum starts anew after two steps."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    count = iter(range(STEPS))
    return train(env, model, optimizer, after_step=lambda: optimizer.state.clear() if next(count) == 1 else None)


@case()
def step_hooks(env: Environment) -> Numbers:
    """Hooks of the optimizer clip before each step and clamp weights after it."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    @torch.no_grad()
    def clamp(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(clamp)
    return train(env, model, optimizer)


# ---- mixed precision


@case()
def grad_scaler(env: Environment) -> Numbers:
    """GradScaler with unscaling and clipping."""
    model = net()
    model, optimizer = env.bind(model, adam(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            scaler.scale(mse(model, x, y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return numbers(model, optimizer, scale=scaler.get_scale())


@case()
def grad_scaler_leaves_a_step_out(env: Environment) -> Numbers:
    """One sample has no finite loss: the scaler leaves the step out on all workers, and scales less."""
    model = net()
    data = samples("x", "y")
    data.tensors[1][7] = torch.inf
    model, optimizer = env.bind(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in env.batches(data, STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            scaler.scale(mse(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return numbers(model, optimizer, scale=scaler.get_scale())


@case()
def grad_scaler_with_two_optimizers(env: Environment) -> Numbers:
    """One scaler for two models and two optimizers."""
    one, two = net(), net(seed=1)
    one, two, first, second = env.bind(one, two, sgd(one), adam(two))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for batch in env.batches(samples("x", "y"), STEPS):
        first.zero_grad()
        second.zero_grad()
        for x, y in batch:
            scaler.scale(mse(one, x, y) + mse(two, x, y)).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    return numbers(one, two, first, second)


@case(tolerance=2e-2)
def autocast(env: Environment) -> Numbers:
    """The forward pass in bfloat16."""
    model = net().float()
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x.float())
        return F.mse_loss(output.float(), y.float())

    return train(env, model, optimizer, loss_of=loss_of)
