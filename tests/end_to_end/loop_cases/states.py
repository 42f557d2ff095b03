"""Copies, averages, saving and loading, modes, buffers, and data that loops read in their own way."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, IterableDataset

from tests.end_to_end.loop_cases.architectures import normalized, share_mse
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
    seeded,
    sgd,
    train,
    weights,
)
from tests.end_to_end.loop_cases.table import Expected, Numbers, case

ABSENT, EITHER = Expected.ABSENT, Expected.EITHER
OWN = "the loop reads its data itself"


def follow(average: nn.Module, model: nn.Module) -> None:
    """Move `average` a tenth of the way to `model`."""
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)


# ---- averages of weights


@case()
def moving_average_of_a_seeded_model(env: Environment) -> Numbers:
    """EMA: the copy is made before bind, of a model that is the same everywhere."""
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    model, optimizer = env.bind(model, sgd(model))
    found = train(env, model, optimizer, after_step=lambda: follow(average, model))
    return {**found, **{f"average {n}": v for n, v in weights(average).items()}}


@case()
def moving_average_of_an_unseeded_model(env: Environment) -> Numbers:
    """The copy is of weights that bind replaces on all workers but worker 0, whose average is compared."""
    model = net(seed=env.rank)
    average = copy.deepcopy(model).requires_grad_(False)
    model, optimizer = env.bind(model, sgd(model))
    found = train(env, model, optimizer, after_step=lambda: follow(average, model))
    return {**found, **({f"average {n}": v for n, v in weights(average).items()} if env.rank == 0 else {})}


@case()
def moving_average_copied_after_bind(env: Environment) -> Numbers:
    """The copy is of the bound model; it computes and trains nothing."""
    model = net(seed=env.rank)
    model, optimizer = env.bind(model, sgd(model))
    average = copy.deepcopy(model).requires_grad_(False)
    found = train(env, model, optimizer, after_step=lambda: follow(average, model))
    outputs = average(samples("x").tensors[0])
    return {**found, **weights(average), **numbers(outputs=outputs)}


@case()
def averaged_model_of_torch(env: Environment) -> Numbers:
    """`AveragedModel` with a moving average, and the loss of the average at the end."""
    model = net()
    model, optimizer = env.bind(model, adam(model))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    found = train(env, model, optimizer, after_step=lambda: average.update_parameters(model))
    return {**found, **numbers(loss=mse(average, *samples("x", "y").tensors))}


@case()
def stochastic_weight_averaging(env: Environment) -> Numbers:
    """SWA with its schedule, and `update_bn` over all data at the end."""
    model = normalized()
    model, optimizer = env.bind(model, sgd(model))
    average, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)

    def after() -> None:
        average.update_parameters(model)
        schedule.step()

    train(env, model, optimizer, loss_of=share_mse(env), after_step=after)
    data = samples("x", "y")
    update_bn(DataLoader(data, batch_size=12), average)
    average.eval()
    return {**weights(model), **numbers(loss=mse(average, *data.tensors))}


@case()
def weights_averaged_and_put_back(env: Environment) -> Numbers:
    """For evaluation the average is swapped in, and the weights are restored."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = []

    @torch.no_grad()
    def evaluate() -> None:
        kept = {n: p.detach().clone() for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter, 0.5)
            parameter.copy_(average[name])
        losses.append(mse(model, *samples("x", "y").tensors))
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])

    return {**train(env, model, optimizer, after_step=evaluate), **numbers(losses=torch.stack(losses))}


# ---- saving and loading


@case()
def state_loaded_after_bind(env: Environment) -> Numbers:
    """`load_state_dict` of model and optimizer, once they are bound."""
    model, other = net(), net(seed=3)
    model, optimizer = env.bind(model, adam(model))
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(adam(other, lr=0.05).state_dict())
    return train(env, model, optimizer)


@case()
def best_weights_restored(env: Environment) -> Numbers:
    """The weights of the best mean loss are restored at the end."""
    model = net()
    model, optimizer = env.bind(model, sgd(model, lr=0.5))
    best, kept = float("inf"), b""
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        losses = []
        for x, y in batch:
            loss = mse(model, x, y)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        if (mean := env.mean(sum(losses) / len(losses))) < best:
            best, kept = mean, saved(model.state_dict())
    model.load_state_dict(loaded(kept))
    return numbers(model, best=best)


@case(steps=ABSENT, why=OWN)
def resumed_in_the_middle(env: Environment) -> Numbers:
    """Model, optimizer and scheduler are saved, spoiled, and loaded again half-way."""
    model = net()
    model, optimizer = env.bind(model, adam(model))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    things = (model, optimizer, schedule)
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        if step == 2:
            content = saved([thing.state_dict() for thing in things])
            with torch.no_grad():
                model[0].weight.zero_()
            optimizer.state.clear()
            for thing, state in zip(things, loaded(content, weights_only=False), strict=True):
                thing.load_state_dict(state)
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
        schedule.step()
    return numbers(model, optimizer)


@case()
def whole_model_saved(env: Environment) -> Numbers:
    """`torch.save(model)` after bind; what is read back computes the same, and trains by itself."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    found = train(env, model, optimizer)
    again = loaded(saved(model), weights_only=False)
    x, y = samples("x", "y").tensors
    own = torch.optim.SGD(again.parameters(), lr=0.1)
    first = mse(again, x, y)
    first.backward()
    own.step()
    return {**found, **numbers(first=first, second=mse(again, x, y))}


@case()
def copy_trains_by_itself(env: Environment) -> Numbers:
    """A deep copy of the bound model is fine-tuned on each worker alone, on the same data."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    found = train(env, model, optimizer)
    tuned = copy.deepcopy(model)
    own = torch.optim.SGD(tuned.parameters(), lr=0.1)
    for _ in range(2):
        own.zero_grad()
        mse(tuned, *samples("x", "y").tensors).backward()
        own.step()
    return {**found, **{f"tuned {n}": v for n, v in weights(tuned).items()}}


@case()
def weights_of_worker_0_count(env: Environment) -> Numbers:
    """Workers begin with weights and optimizer states of their own."""
    model = net(seed=env.rank)
    optimizer = adam(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1 + env.rank)
    optimizer.step()
    optimizer.zero_grad()
    return train(env, *env.bind(model, optimizer))


# ---- modes, and forward passes that are no part of a step


@case()
def evaluation_between_steps(env: Environment) -> Numbers:
    """After each step all data is evaluated in evaluation mode, without gradients."""
    model = normalized()
    model, optimizer = env.bind(model, sgd(model))

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        model(samples("x").tensors[0])
        model.train()

    train(env, model, optimizer, loss_of=share_mse(env), after_step=evaluate)
    return weights(model)


@case()
def forward_in_training_mode_between_steps(env: Environment) -> Numbers:
    """After each step the training loss is computed again in training mode, without a backward pass."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    losses: list[Tensor] = []

    def look() -> None:
        losses.append(mse(model, *samples("x", "y").tensors).detach())

    return {**train(env, model, optimizer, after_step=look), **numbers(losses=torch.stack(losses))}


@case()
def forward_with_graph_that_is_dropped(env: Environment) -> Numbers:
    """Before each backward pass a graph is built that has no backward pass."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mse(model, 2 * x, y)
        return mse(model, x, y)

    return train(env, model, optimizer, loss_of=loss_of)


@case()
def batch_read_before_it_is_trained_on(env: Environment) -> Numbers:
    """A first pass over the batch measures its loss, without gradients."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        with torch.no_grad():
            losses = [float(mse(model, x, y)) for x, y in batch]
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        scale = env.mean(sum(losses) / len(losses))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + scale)
        optimizer.step()
    return numbers(model, optimizer)


@case()
def stop_early(env: Environment) -> Numbers:
    """The loop is left once the mean loss is low enough, on all workers alike."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    taken = 0
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
        taken += 1
        with torch.no_grad():
            loss = float(mse(model, *samples("x", "y").tensors))
        if taken == 3 and env.mean(loss) < 100:
            break
    return numbers(model, optimizer, taken=taken)


# ---- buffers


class Counting(nn.Module):
    """A network with a buffer that counts calls, and one that is a shift of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("shift", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("table", torch.arange(5.0, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.shift + 0.01 * self.table)


@case()
def buffer_set_by_the_loop(env: Environment) -> Numbers:
    """Between steps the loop writes a buffer, alike on all workers."""
    model = Counting()
    model, optimizer = env.bind(model, sgd(model))

    def move() -> None:
        model.shift += 0.1

    return train(env, model, optimizer, after_step=move)


@case()
def buffer_replaced_by_the_loop(env: Environment) -> Numbers:
    """Between steps the loop puts another tensor in the buffer's place."""
    model = Counting()
    model, optimizer = env.bind(model, sgd(model))

    def move() -> None:
        model.shift = model.shift + 0.1

    return train(env, model, optimizer, after_step=move)


@case()
def buffers_differ_before_bind(env: Environment) -> Numbers:
    """Worker 0's buffers count."""
    model = Counting()
    model.shift.fill_(env.rank)
    return train(env, *env.bind(model, sgd(model)))


@case()
def statistics_reset_by_the_loop(env: Environment) -> Numbers:
    """Running statistics are reset half-way."""
    model = normalized()
    model, optimizer = env.bind(model, sgd(model))
    steps = iter(range(STEPS))

    def reset() -> None:
        if next(steps) == 1:
            model[1].reset_running_stats()

    train(env, model, optimizer, loss_of=share_mse(env), after_step=reset)
    return weights(model)


@case()
def weights_set_by_the_loop(env: Environment) -> Numbers:
    """After each step weights are normalized, pruned and clamped by hand."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    mask = (torch.arange(40).view(8, 5) % 4 > 0).double()

    @torch.no_grad()
    def edit() -> None:
        model[0].weight.mul_(mask)
        model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True).clamp(min=1.0))
        model[2].weight.data = model[2].weight.data.clamp(-0.2, 0.2)

    return train(env, model, optimizer, after_step=edit)


# ---- data


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples one after the other."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*samples("x", "y").tensors, strict=True)


@case(steps=ABSENT, why=OWN)
def iterable_dataset(env: Environment) -> Numbers:
    """A stream that every worker reads, and takes its slice of each batch."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for x, y in DataLoader(Stream(), batch_size=12):
        optimizer.zero_grad()
        mse(model, env.mine(x), env.mine(y)).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(steps=ABSENT, why=OWN)
def several_epochs_with_a_schedule(env: Environment) -> Numbers:
    """Three epochs with a schedule for each, and the mean loss of each."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    schedule, losses = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), []
    for _ in range(3):
        total = 0.0
        for batch in env.batches(samples("x", "y"), STEPS):
            for x, y in batch:
                optimizer.zero_grad()
                loss = mse(model, x, y)
                loss.backward()
                optimizer.step()
                total += loss.item()
        schedule.step()
        losses.append(env.mean(total / STEPS))
    return {**numbers(model, optimizer), **numbers(losses=torch.tensor(losses))}


@case(steps=ABSENT, why="all steps of world.steps have one size")
def smaller_last_batch(env: Environment) -> Numbers:
    """The last batch is half as large, on all workers."""
    return _with_sizes(env, [12, 12, 12, 6])


@case(steps=ABSENT, why="all steps of world.steps have one size")
def batch_size_of_the_step(env: Environment) -> Numbers:
    """Batches grow."""
    return _with_sizes(env, [6, 6, 12, 12])


def _with_sizes(env: Environment, sizes: list[int]) -> Numbers:
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS, keep=sizes):
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(steps=ABSENT, why="world.steps weighs samples alike")
def slices_of_unequal_size(env: Environment) -> Numbers:
    """Worker 0 has one sample less; each worker's mean counts alike."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return env.share_mean(lambda n, x, y: mse(model, x[int(n == 0) :], y[int(n == 0) :]), x, y)

    return train(env, model, optimizer, loss_of=loss_of)


@case(own=Expected.ENDS, steps=ABSENT, why="some workers have no data left while others wait for them")
def batches_of_unequal_number(env: Environment) -> Numbers:
    """Worker 0 has one batch more than the others; plain torch would take them all."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        if step == STEPS - 1 and env.rank > 0:
            break
        optimizer.zero_grad()
        for x, y in batch:
            mse(model, x, y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(steps=ABSENT, why="the loop draws samples itself")
def replayed_samples(env: Environment) -> Numbers:
    """Each worker draws from a memory that grows, by a generator that is the same everywhere."""
    model, random = seeded(0, lambda: nn.Linear(5, 1)), torch.Generator().manual_seed(1)
    model, optimizer = env.bind(model, adam(model))
    x, y = samples("x", "y").tensors
    for step in range(STEPS):
        drawn = torch.randint(12 * (step + 1), (12,), generator=random)
        optimizer.zero_grad()
        F.mse_loss(model(env.mine(x[drawn])), env.mine(y[drawn])).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(data_matters=False)
def same_data_on_all_workers(env: Environment) -> Numbers:
    """All workers compute the same loss; the mean of equal gradients is that gradient."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    x, y = samples("x", "y").tensors
    return train(env, model, optimizer, loss_of=lambda m, *_: mse(m, x, y))
