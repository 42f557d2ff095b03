"""What loops do with gradients between `backward` and `step`, and how they accumulate them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.end_to_end.loop_cases.environments import Environment
from tests.end_to_end.loop_cases.fragments import STEPS, adam, mse, net, numbers, samples, sgd, train
from tests.end_to_end.loop_cases.table import Expected, Numbers, case

ABSENT, EITHER = Expected.ABSENT, Expected.EITHER
ONE_BATCH = "a step of world.steps is one global batch"


def parts(*columns: Tensor) -> list[tuple[Tensor, ...]]:
    """Both halves of a batch."""
    return list(zip(*(each.chunk(2) for each in columns), strict=True))


def set_by_hand(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    """Write `gradients` into the parameters."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()


# ---- read and changed


@case()
def plain_loop(env: Environment) -> Numbers:
    """Forward, backward, step."""
    model = net()
    return train(env, *env.bind(model, sgd(model)))


@case()
def clip_norm(env: Environment) -> Numbers:
    """`clip_grad_norm_` over the mean gradient."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    norms: list[Tensor] = []

    def clip() -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    return {**train(env, model, optimizer, before_step=clip), "norms": torch.stack(norms)}


@case()
def clip_value(env: Environment) -> Numbers:
    """`clip_grad_value_` over the mean gradient."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    return train(env, model, optimizer, before_step=lambda: nn.utils.clip_grad_value_(model.parameters(), 0.02))


@case()
def clip_each_layer(env: Environment) -> Numbers:
    """A norm of its own for each layer."""
    model = net(5, 8, 4, 1)
    model, optimizer = env.bind(model, sgd(model))

    def clip() -> None:
        for layer in (model[0], model[2], model[4]):
            nn.utils.clip_grad_norm_(layer.parameters(), 0.03)

    return train(env, model, optimizer, before_step=clip)


@case()
def scale_by_hand(env: Environment) -> Numbers:
    """Gradients are multiplied in place."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def halve() -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)

    return train(env, model, optimizer, before_step=halve)


@case()
def replace_by_hand(env: Environment) -> Numbers:
    """Gradients are replaced by their signs, in new tensors."""
    model = net()
    model, optimizer = env.bind(model, sgd(model, lr=0.01))

    def signs() -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.sign()

    return train(env, model, optimizer, before_step=signs)


@case()
def centralize(env: Environment) -> Numbers:
    """The mean of each row is subtracted from the gradient."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def centre() -> None:
        for parameter in model.parameters():
            if parameter.grad.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))

    return train(env, model, optimizer, before_step=centre)


@case()
def gradient_noise(env: Environment) -> Numbers:
    """Noise of one seed is added on all workers."""
    model, random = net(), torch.Generator().manual_seed(5)
    model, optimizer = env.bind(model, sgd(model))

    def add_noise() -> None:
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=random, dtype=parameter.dtype), alpha=0.01)

    return train(env, model, optimizer, before_step=add_noise)


@case()
def weight_decay_by_hand(env: Environment) -> Numbers:
    """A multiple of the weight is added to its gradient."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def decay() -> None:
        for parameter in model.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.01)

    return train(env, model, optimizer, before_step=decay)


@case()
def read_norms(env: Environment) -> Numbers:
    """The norm of each gradient is recorded, before the step and after it."""
    model = net()
    model, optimizer = env.bind(model, adam(model))
    seen: list[Tensor] = []

    def record() -> None:
        seen.extend(p.grad.norm() for p in model.parameters())

    return {**train(env, model, optimizer, before_step=record, after_step=record), "norms": torch.stack(seen)}


@case()
def scaled_loss_by_hand(env: Environment) -> Numbers:
    """The loss is multiplied by 1024, and gradients are divided by it."""
    model = net()
    model, optimizer = env.bind(model, adam(model))

    def unscale() -> None:
        for parameter in model.parameters():
            parameter.grad /= 1024

    return train(env, model, optimizer, loss_of=lambda m, x, y: 1024 * F.mse_loss(m(x), y), before_step=unscale)


@case(own=EITHER, steps=ABSENT, why="no optimizer is bound, so only p.grad can have the mean")
def step_by_hand(env: Environment) -> Numbers:
    """There is no optimizer: weights change by what is in `p.grad`."""
    (model,) = env.bind(net())
    for batch in env.batches(samples("x", "y"), STEPS):
        model.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return numbers(model)


@case(steps=EITHER, why="two steps were taken with one batch")
def step_twice(env: Environment) -> Numbers:
    """The optimizer takes two steps with the same gradient."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    return train(env, model, optimizer, optimizer)


# ---- steps that are left out


def with_bad_sample() -> TensorDataset:
    """One sample, of some worker in some step, has no finite target."""
    data = samples("x", "y")
    data.tensors[1][7] = torch.inf
    return data


@case()
def skip_if_gradient_not_finite(env: Environment) -> Numbers:
    """A step is left out on all workers if the mean gradient is not finite."""
    model = net()
    model, optimizer = env.bind(model, adam(model))
    taken = 0
    for batch in env.batches(with_bad_sample(), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        if all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()
            taken += 1
        else:
            env.skip(batch)
    return numbers(model, optimizer, taken=taken)


@case(steps=ABSENT, why="the loss of a micro-batch is not that of the step")
def skip_if_loss_not_finite(env: Environment) -> Numbers:
    """A batch is left out before its backward pass, if the mean loss is not finite."""
    model = net()
    model, optimizer = env.bind(model, adam(model))
    for batch in env.batches(with_bad_sample(), STEPS):
        for x, y in batch:
            loss = mse(model, x, y)
            if torch.isfinite(torch.tensor(env.mean(loss.item()))):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return numbers(model, optimizer)


@case()
def replace_what_is_not_finite(env: Environment) -> Numbers:
    """Numbers that are not finite are replaced by zeros, and the step is taken."""
    model = net()
    model, optimizer = env.bind(model, adam(model))

    def replace() -> None:
        for parameter in model.parameters():
            torch.nan_to_num_(parameter.grad, 0.0, 0.0, 0.0)

    return train(env, model, optimizer, data=with_bad_sample(), before_step=replace)


# ---- discarded


@case()
def zero_grad_discards_a_batch(env: Environment) -> Numbers:
    """Every other gradient is discarded."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        for x, y in batch:
            mse(model, x, y).backward()
        if step % 2:
            optimizer.step()
        else:
            env.skip(batch)
        optimizer.zero_grad()
    return numbers(model, optimizer)


@case(steps=ABSENT, why="zero_grad in the middle of a step would discard the micro-batches before")
def zero_grad_between_two_backwards(env: Environment) -> Numbers:
    """The gradient of a first pass, on other inputs, is discarded."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y", "pair"), STEPS):
        for x, y, other in batch:
            for inputs in (other, x):
                optimizer.zero_grad()
                mse(model, inputs, y).backward()
            optimizer.step()
    return numbers(model, optimizer)


@case()
def zeros_instead_of_none(env: Environment) -> Numbers:
    """`zero_grad(set_to_none=False)`, also before the first backward pass."""
    model = net()
    model, optimizer = env.bind(model, sgd(model, weight_decay=0.1))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad(set_to_none=False)
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case()
def none_by_hand(env: Environment) -> Numbers:
    """`p.grad = None` in place of `zero_grad`."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        for parameter in model.parameters():
            parameter.grad = None
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case()
def zero_in_place_by_hand(env: Environment) -> Numbers:
    """`p.grad.zero_()` keeps the tensors; so does the loop, across steps."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case()
def gradient_of_one_layer_removed(env: Environment) -> Numbers:
    """A parameter whose gradient is None does not change, though it has weight decay."""
    model = net()
    model, optimizer = env.bind(model, sgd(model, weight_decay=0.1))

    def remove() -> None:
        model[0].bias.grad = None

    return train(env, model, optimizer, before_step=remove)


@case()
def zero_grad_of_the_model(env: Environment) -> Numbers:
    """`model.zero_grad()`, after the step."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
        model.zero_grad()
    return numbers(model, optimizer)


# ---- accumulated


@case(steps=ABSENT, why="what is left in p.grad after the step counts in the next one")
def never_zeroed(env: Environment) -> Numbers:
    """All gradients so far add up."""
    model = net()
    model, optimizer = env.bind(model, sgd(model, momentum=0.0))
    for batch in env.batches(samples("x", "y"), STEPS):
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case()
def two_backwards_before_a_step(env: Environment) -> Numbers:
    """Gradients of both halves add up, each exchanged by itself."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            for half in parts(x, y):
                mse(model, *half).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(steps=ABSENT, why="world.steps accumulates by itself")
def no_sync_for_all_but_the_last(env: Environment) -> Numbers:
    """The gradient of the first half stays on its worker until the second one is exchanged."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            first, second = parts(x, y)
            with env.no_sync():
                mse(model, *first).backward()
            mse(model, *second).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(steps=ABSENT, why="world.steps accumulates by itself")
def two_forwards_without_sync(env: Environment) -> Numbers:
    """Three passes, of which the first two are accumulated in one `no_sync`."""
    model = net()
    model, optimizer = env.bind(model, adam(model))
    for batch in env.batches(samples("x", "y", "pair"), STEPS):
        optimizer.zero_grad()
        for x, y, other in batch:
            with env.no_sync():
                mse(model, x, y).backward()
                mse(model, other, y).backward()
            mse(model, x + other, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(steps=ABSENT, why=ONE_BATCH)
def step_every_second_batch(env: Environment) -> Numbers:
    """The loss is divided by the number of batches that one step takes."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        for x, y in batch:
            (mse(model, x, y) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return numbers(model, optimizer)


@case(steps=ABSENT, why=ONE_BATCH)
def no_sync_step_every_second_batch(env: Environment) -> Numbers:
    """The same, and only the last of the batches is exchanged."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        for x, y in batch:
            if step % 2:
                (mse(model, x, y) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with env.no_sync():
                    (mse(model, x, y) / 2).backward()
    return numbers(model, optimizer)


@case(steps=ABSENT, why=ONE_BATCH)
def batches_left_over(env: Environment) -> Numbers:
    """Three batches for each step, of which the last step has only one."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        for x, y in batch:
            mse(model, x, y).backward()
        if step % 3 == 2 or step == STEPS - 1:
            optimizer.step()
            optimizer.zero_grad()
    return numbers(model, optimizer)


@case(steps=ABSENT, why="world.steps accumulates by itself")
def discarded_without_sync(env: Environment) -> Numbers:
    """What was accumulated in `no_sync` is discarded before the next pass."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        for x, y in batch:
            with env.no_sync():
                mse(model, y.expand(-1, 5), y).backward()
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
    return numbers(model, optimizer)


@case(steps=ABSENT, why="world.steps decides how many passes a worker has")
def workers_with_unequal_numbers_of_passes(env: Environment) -> Numbers:
    """Each worker accumulates as many passes as its rank, and one that is exchanged."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            shares = env.shares(x, y)
            for number, share in shares:
                for _ in range(number):
                    with env.no_sync():
                        (mse(model, *share) / len(shares)).backward()
                (mse(model, *share) / len(shares)).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case()
def two_forwards_one_backward(env: Environment) -> Numbers:
    """Two forward passes before one backward pass."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    return train(
        env, model, optimizer, loss_of=lambda m, x, y, z: mse(m, x, y) + mse(m, z, y), data=samples("x", "y", "pair")
    )


@case()
def two_passes_over_a_batch(env: Environment) -> Numbers:
    """Both passes add up before the step."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            for x, y in batch:
                (mse(model, x, y) / 2).backward()
        optimizer.step()
    return numbers(model, optimizer)


# ---- several gradients of one step


@case()
def sharpness_aware(env: Environment) -> Numbers:
    """SAM: the gradient that counts is taken where the loss is highest nearby."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / norm for p in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
    return numbers(model, optimizer)


@case()
def projected_gradients(env: Environment) -> Numbers:
    """PCGrad: of two tasks' gradients, what conflicts is taken out."""
    model = net(5, 8, 2)
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y", "other"), STEPS):
        found = []
        for task in range(2):
            optimizer.zero_grad()
            for x, *targets in batch:
                F.mse_loss(model(x)[:, task, None], targets[task]).backward()
            found.append([p.grad.clone() for p in model.parameters()])
        dot = sum((a * b).sum() for a, b in zip(*found, strict=True))
        squared = sum((b * b).sum() for b in found[1])
        share = torch.clamp(dot / squared, max=0.0)
        set_by_hand(list(model.parameters()), [a - share * b + b for a, b in zip(*found, strict=True)])
        optimizer.step()
    return numbers(model, optimizer)


@case()
def variance_reduced(env: Environment) -> Numbers:
    """SVRG-like: the gradient at older weights is subtracted, and their mean gradient is added."""
    model, anchor = net(), net()
    model, anchor, optimizer = env.bind(model, anchor, sgd(model, momentum=0.0))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        anchor.zero_grad()
        for x, y in batch:
            (mse(model, x, y) + 0.5 * mse(anchor, x, y)).backward()
        for mine, old in zip(model.parameters(), anchor.parameters(), strict=True):
            mine.grad -= old.grad
        optimizer.step()
    return numbers(model, anchor)


@case()
def last_gradient_is_kept(env: Environment) -> Numbers:
    """Half of the gradient of the step before is added, from a copy of it."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    kept: list[Tensor] = []

    def mix() -> None:
        mine = [p.grad.clone() for p in model.parameters()]
        if kept:
            torch._foreach_add_([p.grad for p in model.parameters()], kept, alpha=0.5)
        kept[:] = mine

    return train(env, model, optimizer, before_step=mix)
