"""A custom loop on many workers takes the steps that plain PyTorch takes on all their samples."""

from __future__ import annotations

import copy
import io
import logging
import math
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

import unisono
from tests.support import processes
from tests.trainer.small_loops import MAKERS, SHARE, STEPS, data, loss_of, net, noisy, samples, state, world_of
from unisono import AllReduce, Exact, LocalSGD, ParameterServer, World
from unisono.checkpoint import fingerprint
from unisono.comm import outcomes, simulate
from unisono.elastic.model_state import weights_of
from unisono.errors import InvalidInput, TaskMismatch, UnisonoError
from unisono.launch import WorkerIdentity

SMALL = AllReduce(bucket_bytes=1, first_bytes=1)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def loop(world: World, maker: str, passes: int = 1, scheduled: str = "", seed: int = 0, **options) -> torch.Tensor:
    """`world` of one worker stands for all: it then computes the whole batch, as plain PyTorch does."""
    model = net(seed)
    optimizer = MAKERS[maker](model.parameters())
    early = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduled == "early" else None
    world.bind(model, optimizer, backward_passes=passes, **options)
    late = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduled == "late" else None
    for step in range(STEPS):
        x, y = (t[world.rank * SHARE : (world.rank + 1) * SHARE] for t in samples(step, world.size))
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(passes), y.chunk(passes)):
            loss_of(model, xs, ys).backward()
        optimizer.step()
        for scheduler in (early, late):
            if scheduler:
                scheduler.step()
    return weights(model)


def plain(size: int, maker: str, passes: int = 1, scheduled: str = "", clip: float | None = None) -> torch.Tensor:
    """The same in PyTorch, on the concatenated batch."""
    model = net()
    optimizer = MAKERS[maker](model.parameters())
    for step in range(STEPS):
        if scheduled:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * 0.5**step
        optimizer.zero_grad()
        x, y = (t.view(size, passes, SHARE // passes, -1) for t in samples(step, size))
        for worker in range(size):
            for xs, ys in zip(x[worker], y[worker]):
                (loss_of(model, xs, ys) / size).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    "options",
    [{}, {"passes": 2}, {"passes": 2, "overlap": False, "sync": SMALL}, {"passes": 2, "sync": SMALL}, {"clip": 0.05},
     {"scheduled": "early"}, {"scheduled": "late"}, {"compress": Exact()}],
    ids=str,
)  # fmt: skip
def test_without_a_plan_it_is_plain_pytorch_on_all_samples(size, maker, options) -> None:
    expected = plain(size, maker, **{k: v for k, v in options.items() if k in ("passes", "scheduled", "clip")})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of schedulers that lost their optimizer's step
        # Every worker starts from weights of its own: those of worker 0 count.
        found = simulate(size, lambda comm: loop(world_of(comm), maker, seed=comm.rank, **options))
    for mine in found:
        assert torch.equal(mine, found[0])
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=2e-6)


def test_a_worker_alone_is_left_to_autograd() -> None:
    def run(comm) -> None:
        model = net()
        optimizer = MAKERS["sgd"](model.parameters())
        world_of(comm).bind(model, optimizer)
        loss_of(model, *samples(0, 1)).backward()
        assert model[0].weight.grad.abs().sum() > 0
        assert not any(m._forward_pre_hooks for m in model.modules())

    simulate(1, run)


def one_step(comm, work: Callable[[World, nn.Module, torch.optim.Optimizer], None], **options) -> torch.Tensor:
    """How far one SGD step of length 1 goes, after `work` did the forward and backward passes."""
    world, model = world_of(comm), net()
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    world.bind(model, optimizer, **options)
    work(world, model, optimizer)
    optimizer.step()
    return before - weights(model)


def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model = net()
    loss_of(model, x, y).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("options", [{}, {"sync": SMALL}], ids=str)
def test_gradients_of_several_backward_passes_before_a_step_add_up(options) -> None:
    def twice(world, model, optimizer) -> None:
        for step in range(2):
            loss_of(model, *samples(2 * step + world.rank, 1)).backward()

    expected = sum(gradient(*samples(step, 1)) for step in range(4)) / 2
    for moved in simulate(2, lambda comm: one_step(comm, twice, **options)):
        torch.testing.assert_close(moved, expected)


def test_two_forward_passes_and_one_backward() -> None:
    def both(world, model, optimizer) -> None:
        (loss_of(model, *samples(0, 1)) + loss_of(model, *samples(1, 1))).backward()

    expected = gradient(*samples(0, 1)) + gradient(*samples(1, 1))
    torch.testing.assert_close(simulate(3, one_step, both)[1], expected)


@pytest.mark.parametrize("options", [{}, {"sync": SMALL}], ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_a_worker_without_a_backward_pass_counts_as_a_zero_and_nobody_hangs(first, options) -> None:
    def run(comm) -> torch.Tensor:
        def some(world, model, optimizer) -> None:
            if not first:  # a whole step before, so that the replica is there
                loss_of(model, *samples(1, 1)).mul(0.0).backward()
                optimizer.step()
            if world.rank == 0:
                loss_of(model, *samples(0, 1)).backward()

        return one_step(comm, some, **options)

    for moved in simulate(2, run):
        torch.testing.assert_close(moved, gradient(*samples(0, 1)) / 2)


def test_a_gradient_that_the_user_sets_is_averaged_when_asked_for_and_else_refused() -> None:
    def by_hand(world, model, optimizer, averages: bool = True) -> None:
        x, y = samples(world.rank, 1)
        found = torch.autograd.grad(
            F.mse_loss(model[4](model[3](model[2](model[1](model[0](x))))), y), model.parameters()
        )
        for parameter, value in zip(model.parameters(), found):
            parameter.grad = value
        if averages:
            world.average_gradients()

    with pytest.raises(
        InvalidInput, match=r"grad = 0\.weight: it was set without a backward pass, .* call world\.average"
    ):
        simulate(2, one_step, partial(by_hand, averages=False))
    expected = (gradient(*samples(0, 1)) + gradient(*samples(1, 1))) / 2
    for moved in simulate(2, one_step, by_hand):
        torch.testing.assert_close(moved, expected)


def test_evaluation_between_steps_changes_nothing() -> None:
    def run(comm, looks: bool) -> str:
        world, model = world_of(comm), noisy()
        optimizer = MAKERS["sgd"](model.parameters())
        if looks:
            model.eval()
        world.bind(model, optimizer)
        for step in range(3):
            if looks:
                model.eval()
                with torch.no_grad():
                    model(samples(9, 1)[0])
                model.train()
            torch.manual_seed(step)
            loss_of(model, *samples(step + comm.rank, 1)).backward()
            optimizer.step()
        return fingerprint(weights_of(model))

    assert len({*simulate(2, run, True), *simulate(2, run, False)}) == 1


def test_close_leaves_model_and_optimizer_as_they_were() -> None:
    def run(comm, scheduled: bool) -> None:
        model = net()
        optimizer = MAKERS["sgd"](model.parameters())
        if scheduled:
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        before = dict(optimizer.__dict__)
        with world_of(comm) as world:
            world.bind(model, optimizer)
            loss_of(model, *samples(0, 1)).backward()
            optimizer.step()
        assert optimizer.__dict__.keys() - {"_opt_called"} == before.keys() - {"_opt_called"}
        assert optimizer.__dict__.get("step") is before.get("step")
        assert not any(m._forward_pre_hooks for m in model.modules())
        loss_of(model, *samples(0, 1)).backward()
        assert all(p.grad is not None and not p._post_accumulate_grad_hooks for p in model.parameters())

    for scheduled in (False, True):
        simulate(2, run, scheduled)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_layer_is_frozen_and_trained_as_in_plain_pytorch(size) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, share: Callable[[int], list]) -> torch.Tensor:
        model[0].weight.requires_grad_(False)
        for step in range(6):
            model[0].weight.requires_grad_(step in (2, 3))
            model[2].weight.requires_grad_(step != 3)
            optimizer.zero_grad()
            for x, y in share(step):
                (loss_of(model, x, y) / len(share(step))).backward()
            optimizer.step()
        return weights(model)

    def run(comm) -> torch.Tensor:
        world, model = world_of(comm), net(comm.rank)
        model[0].weight.requires_grad_(False)
        model, optimizer = world.bind(model, MAKERS["sgd"](model.parameters()))
        mine = slice(comm.rank * SHARE, (comm.rank + 1) * SHARE)
        return train(model, optimizer, lambda step: [[t[mine] for t in samples(step, size)]])

    model = net()
    parts = lambda step: list(zip(*(t.chunk(size) for t in samples(step, size))))
    expected = train(model, MAKERS["sgd"](model.parameters()), parts)
    for found in simulate(size, run):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), torch.optim.Adagrad])
def test_the_optimizer_state_of_worker_0_counts(kind) -> None:
    """A checkpoint is loaded on worker 0 alone, or on each: the steps that follow are the same."""

    def saved() -> tuple[dict, dict]:
        model = net()
        optimizer = kind(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, *samples(step, 1)).backward()
            optimizer.step()
        return model.state_dict(), optimizer.state_dict()

    def run(comm, loads) -> torch.Tensor:
        world, model = world_of(comm), net(comm.rank)
        optimizer = kind(model.parameters(), lr=0.01)
        if loads(comm.rank):
            for thing, state in zip((model, optimizer), saved()):
                thing.load_state_dict(state)
        world.bind(model, optimizer)
        optimizer.zero_grad()
        loss_of(model, *samples(3 + comm.rank, 1)).backward()
        optimizer.step()
        return weights(model)

    expected, _ = simulate(2, run, lambda rank: True)
    for found in (*simulate(2, run, lambda rank: rank == 0), *simulate(2, run, lambda rank: True)):
        assert torch.equal(found, expected)
    fresh, _ = simulate(2, run, lambda rank: rank == 1)  # what worker 1 loaded is not what counts
    assert not torch.equal(fresh, expected)


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda model, rank: torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1)),
      "optimizer = SGD: lr of group 0 is 0.1 on worker 0 and 0.2 on worker 1; build the same optimizer on"),
     (lambda model, rank: (torch.optim.Adam if rank else torch.optim.SGD)(model.parameters(), lr=0.1),
      "optimizer = .*: amsgrad of group 0 is none on worker 0 and False on worker 1"),
     (lambda model, rank: torch.optim.SGD([{"params": list(model.parameters())[rank:]}], lr=0.1),
      "params of group 0 is 0.weight, 0.bias, .* on worker 0 and 0.bias, 2.weight"),
     (lambda model, rank: torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.99 - 0.09 * rank)),
      r"betas of group 0 is \(0.9, 0.99\) on worker 0 and \(0.9, 0.9\) on worker 1")],
)  # fmt: skip
def test_optimizers_that_differ_between_workers_are_refused(make, words) -> None:
    def run(comm) -> None:
        model = net()
        world_of(comm).bind(model, make(model, comm.rank))

    with pytest.raises(InvalidInput, match=words):
        simulate(2, run)


def foreign() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], 0.1)


def frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net().requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def complex_numbers() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def lazy() -> tuple[nn.Module, torch.optim.Optimizer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that lazy modules are new
        model = nn.Sequential(nn.LazyLinear(2))
    return model, torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [(foreign, r"optimizer = \(7,\): .* not one of the model's"), (frozen, "no parameter requires a gradient"),
     (complex_numbers, "model = weight: complex numbers"), (lazy, "model = 0.weight: a lazy parameter")],
)  # fmt: skip
def test_what_cannot_be_trained_together_is_refused_at_once(make, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        simulate(2, lambda comm: world_of(comm).bind(*make()))


class Odd(nn.Module):
    """Channels-last kernels, a zero-sized parameter, a shared one, a second dtype, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = self.one
        self.wide = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(x).mean((2, 3)) + self.empty.sum()
        hidden = self.one(torch.tanh(self.again(hidden))) if x.mean() > 0 else self.other(hidden)
        return self.wide(hidden.double())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"sync": SMALL}, {"compress": Exact()}], ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_odd_parameters_and_branches_that_only_some_workers_take(size, options, fused, kind) -> None:
    def batch(step: int, rank: int) -> torch.Tensor:
        x = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank)) + 0.1
        return (x if rank % 2 else -x).contiguous(memory_format=torch.channels_last)

    def run(comm) -> torch.Tensor:
        world, model = world_of(comm), Odd()
        optimizer = kind(model.parameters(), 1e-2, fused=fused)
        world.bind(model, optimizer, **options)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, comm.rank)).square().mean().backward()
            optimizer.step()
        return weights(model)

    model = Odd()
    optimizer = kind(model.parameters(), 1e-2)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(size):
            (model(batch(step, rank)).square().mean() / size).backward()
        optimizer.step()
    found = simulate(size, run)
    assert all(torch.equal(found[0], mine) for mine in found)
    torch.testing.assert_close(found[0], weights(model), rtol=1e-4, atol=1e-5)


# --- world.steps


def dealt(world: World, build: Callable = noisy, micro_batch: int = 3, **options) -> tuple[str, list[float]]:
    model = build()
    optimizer = MAKERS["adamw"](model.parameters())
    world.bind(model, optimizer, **options)
    losses = []
    for batches in world.steps(data(), global_batch=12, micro_batch=micro_batch, steps=5, seed=1):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for x, y in batches:
            loss = loss_of(model, x, y)
            loss.backward()
            total, count = total + float(loss.detach()) * len(x), count + len(x)
        optimizer.step()
        losses.append(world.mean(total / count, count))
    return fingerprint(weights_of(model)), losses


def test_steps_have_the_same_bits_on_any_number_of_workers() -> None:
    found = [r for size in (1, 2, 3, 4) for r in simulate(size, lambda comm: dealt(world_of(comm), compress=Exact()))]
    assert len({digest for digest, _ in found}) == 1
    assert all(losses == pytest.approx(found[0][1], abs=1e-9) for _, losses in found)


def test_steps_are_plain_pytorch_on_the_global_batch() -> None:
    """The order of samples is the plan's; what is done with them is an ordinary loop over global batches."""
    ((_, losses),) = simulate(1, lambda comm: dealt(world_of(comm), net, micro_batch=12))
    for size in (2, 3, 4):
        for _, mine in simulate(size, lambda comm: dealt(world_of(comm), net)):
            assert mine == pytest.approx(losses, abs=1e-5)


def test_samples_that_no_step_reaches_are_told_once(caplog) -> None:
    def run(comm, **length) -> int:
        world, taken = world_of(comm), 0
        model, optimizer = bound(world)
        for batches in world.steps(data(45), global_batch=8, **length):
            optimizer.zero_grad()
            for x, y in batches:
                loss_of(model, x, y).backward()
            taken += optimizer.step()
        return taken

    assert simulate(2, run) == [5, 5]
    (record,) = caplog.records
    assert "the last 5 of 45 samples are not used" in record.message
    caplog.clear()
    assert simulate(2, lambda comm: run(comm, steps=6)) == [6, 6]
    assert simulate(2, lambda comm: run(comm, epochs=8 / 9)) == [5, 5]
    assert not caplog.records


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "sizes", "words"),
    [(data(), {"global_batch": 12, "micro_batch": 5}, "micro_batch = 5: does not divide global_batch = 12"),
     (data(), {"global_batch": 41}, "global_batch = 41: larger than the dataset, which has 40 samples"),
     (data(), {"global_batch": 2, "micro_batch": 1}, "workers = 3: a step has only 2 micro-batches"),
     (Endless(), {}, "data = Endless: not a map-style dataset")],
)  # fmt: skip
def test_batches_that_do_not_fit_are_named(dataset, sizes, words) -> None:
    def run(comm) -> None:
        world, model = world_of(comm), net()
        world.bind(model, MAKERS["sgd"](model.parameters()))
        next(iter(world.steps(dataset, **sizes)))

    with pytest.raises(InvalidInput, match=words):
        simulate(3, run)


def half_a_step(world, model, optimizer, batches) -> None:
    loss_of(model, *next(batches)).backward()
    optimizer.step()


def zero_in_between(world, model, optimizer, batches) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
    optimizer.step()


def half_a_pass(world, model, optimizer, batches) -> None:
    loss_of(model, *next(batches)).backward()


@pytest.mark.parametrize(
    ("body", "words"),
    [(half_a_step, "before all micro-batches of this worker"), (half_a_pass, "before all micro-batches of this worker"),
     (zero_in_between, r"zero_grad\(\) between the micro-batches of a step would discard")],
)  # fmt: skip
def test_a_loop_that_would_compute_something_else_is_refused(body, words) -> None:
    def run(comm) -> None:
        world, model = world_of(comm), net()
        _, optimizer = world.bind(model, MAKERS["sgd"](model.parameters()))
        for batches in world.steps(data(), global_batch=8, micro_batch=2, steps=2):
            body(world, model, optimizer, batches)

    with pytest.raises(UnisonoError, match=words):
        simulate(2, run)


def test_the_order_of_calls_is_checked() -> None:
    def run(comm) -> None:
        world, model = world_of(comm), net()
        with pytest.raises(UnisonoError, match=r"call world\.bind"):
            next(iter(world.steps(data(), global_batch=8)))
        _, optimizer = world.bind(model, MAKERS["sgd"](model.parameters()))
        with pytest.raises(InvalidInput, match="bind = SGD: this optimizer is bound already"):
            world.bind(model, optimizer)
        loss_of(model, *samples(0, 1)).backward()
        optimizer.step()
        with pytest.raises(UnisonoError, match=r"world\.steps came too late"):
            next(iter(world.steps(data(), global_batch=8)))

    simulate(2, run)


@pytest.mark.parametrize("left_out", [0, 2])
def test_a_micro_batch_without_a_backward_pass_adds_a_zero(left_out) -> None:
    """Of four micro-batches of 3, one is looked at and left: the gradient is the others' sum over all 12 samples."""

    def run(comm) -> torch.Tensor:
        world, model = world_of(comm), noisy()
        before = weights(model)
        _, optimizer = world.bind(model, torch.optim.SGD(model.parameters(), 1.0), compress=Exact())
        for batches in world.steps(data(), global_batch=12, micro_batch=3, steps=1):
            optimizer.zero_grad()
            for m, (x, y) in enumerate(batches, start=2 * comm.rank if comm.size == 2 else 0):
                loss = loss_of(model, x, y)
                if m != left_out:
                    loss.backward()
            optimizer.step()
        return torch.cat([before - weights(model), *(b.double().reshape(-1) for b in model.buffers())])

    (alone,) = simulate(1, run)
    for mine in simulate(2, run):
        assert torch.equal(mine, alone)


def test_the_mean_is_weighted_and_the_same_everywhere() -> None:
    assert simulate(3, lambda comm: world_of(comm).mean(comm.rank + 1.0, comm.rank)) == [(2 + 6) / 3] * 3
    assert all(v != v for v in simulate(2, lambda comm: world_of(comm).mean(1.0, 0.0)))


# --- what the loop does between two steps


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "reset": lambda model: model[1].reset_running_stats(),
    "zero": lambda model: model[1].running_mean.zero_(),
    "load": lambda model: model.load_state_dict(normed().state_dict()),
}
PASSES = {"forward passes": lambda model: model(samples(9, 3)[0])}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_loop_changes_counts_as_in_plain_pytorch(name) -> None:
    def run(comm) -> torch.Tensor:
        world, model = world_of(comm), normed()
        _, optimizer = world.bind(model, MAKERS["sgd"](model.parameters()))
        for step in range(STEPS):
            if step == 2:
                with torch.no_grad():
                    CHANGES[name](model)
            x, y = (t[comm.rank * SHARE : (comm.rank + 1) * SHARE] for t in samples(step, comm.size))
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        return state(model)

    model = normed()
    optimizer = MAKERS["sgd"](model.parameters())
    for step in range(STEPS):
        if step == 2:
            with torch.no_grad():
                CHANGES[name](model)
        optimizer.zero_grad()
        for x, y in zip(*(t.chunk(2) for t in samples(step, 2))):
            (loss_of(model, x, y) / 2).backward()
        optimizer.step()
    for found in simulate(2, run):
        torch.testing.assert_close(found, state(model), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", CHANGES | PASSES)
def test_in_steps_it_is_the_same_on_any_number_of_workers(name) -> None:
    def run(comm, change: bool = True) -> torch.Tensor:
        world, model = world_of(comm), normed()
        _, optimizer = world.bind(model, MAKERS["sgd"](model.parameters()), compress=Exact())
        for batches in world.steps(data(), global_batch=12, micro_batch=3, steps=STEPS):
            optimizer.zero_grad()
            if batches.step == 2 and change:
                with torch.no_grad():
                    (CHANGES | PASSES)[name](model)
            for x, y in batches:
                loss_of(model, x, y).backward()
            optimizer.step()
        return state(model)

    (expected,) = simulate(1, run)
    assert not torch.equal(expected, simulate(1, lambda comm: run(comm, change=False))[0])
    for size in (2, 3):
        assert all(torch.equal(found, expected) for found in simulate(size, run))


@pytest.mark.parametrize("planned", [True, False])
def test_a_bound_model_may_be_copied_and_saved(planned) -> None:
    """And the copies, which need nothing of ours, have nothing to do with the training."""

    def copies(model: nn.Module) -> list[nn.Module]:
        stream = io.BytesIO()
        torch.save(model, stream)
        assert b"unisono" not in stream.getvalue()
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        return [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded]  # noqa: S301

    def run(comm, copying: bool) -> torch.Tensor:
        world, model = world_of(comm), normed()
        optimizer = MAKERS["sgd"](model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        world.bind(model, optimizer)
        steps = world.steps(data(), global_batch=12, micro_batch=3, steps=STEPS)
        for step in steps if planned else range(STEPS):
            for each in copies(model) if copying else []:
                F.mse_loss(each(samples(7, 1)[0]), samples(7, 1)[1]).backward()
                assert torch.equal(state(each)[:48], state(model)[:48])
                assert each[0].weight.grad is not None
            copy.deepcopy((optimizer, scheduler)) if copying else None
            for x, y in step if planned else [samples(step, 1)]:
                loss_of(model, x, y).backward()
            optimizer.step()
            scheduler.step()
        return state(model)

    (expected, _), found = (simulate(2, run, copying) for copying in (False, True))
    assert all(torch.equal(each, expected) for each in found)


def test_a_forward_pass_with_other_weights_has_gradients_of_the_own_ones() -> None:
    def work(world, model, optimizer) -> None:
        doubled = {name: p * 2 for name, p in model.named_parameters()}
        x, y = samples(world.rank, 1)
        F.mse_loss(torch.func.functional_call(model, doubled, (x,)), y).backward()

    model = net()
    for rank in range(2):
        doubled = {name: p * 2 for name, p in model.named_parameters()}
        x, y = samples(rank, 1)
        (F.mse_loss(torch.func.functional_call(model, doubled, (x,)), y) / 2).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    for moved in simulate(2, one_step, work):
        torch.testing.assert_close(moved, expected)


def test_a_parameter_that_joins_the_optimizer_later_is_one_of_a_model_or_refused() -> None:
    def run(comm, bound_too: bool) -> torch.Tensor:
        world, model = world_of(comm), net()
        model, optimizer = world.bind(model, torch.optim.SGD(model.parameters(), 0.1))
        loss_of(model, *samples(comm.rank, 1)).backward()
        optimizer.step()
        torch.manual_seed(comm.rank)
        late = nn.Linear(1, 1)
        if bound_too:
            model.append(late)
        optimizer.zero_grad()
        optimizer.add_param_group({"params": late.parameters()})
        loss_of(model, *samples(comm.rank, 1)).backward()
        optimizer.step()
        return torch.cat([weights(model), weights(late)])

    with pytest.raises(
        InvalidInput, match=r"optimizer = \(1, 1\): a parameter of this shape is not one of the model's"
    ):
        simulate(2, run, False)
    one, other = simulate(2, run, True)
    assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_model_is_trained_as_any_other() -> None:
    def run(comm) -> torch.Tensor:
        world, model = world_of(comm), torch.jit.script(net())
        _, optimizer = world.bind(model, MAKERS["sgd"](model.parameters()))
        for step in range(STEPS):
            x, y = (t[comm.rank * SHARE : (comm.rank + 1) * SHARE] for t in samples(step, comm.size))
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        return weights(model)

    for found in simulate(2, run):
        torch.testing.assert_close(found, plain(2, "sgd"), rtol=1e-4, atol=2e-6)


# --- what is given is checked


def bound(world: World, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return world.bind(model, MAKERS["sgd"](model.parameters()), **options)


def scheduler_as_optimizer(world: World) -> None:
    model = net()
    world.bind(model, torch.optim.lr_scheduler.StepLR(MAKERS["sgd"](model.parameters()), 1))


def closing(world: World) -> None:
    model = net()
    world.bind(model, torch.optim.LBFGS(model.parameters()), sync=LocalSGD(2))


def two_models(world: World) -> None:
    world.bind(net(), net(), sync=LocalSGD(2))


def other_options(world: World) -> None:
    bound(world)
    bound(world, compress=Exact())


def stepping(world: World, **options) -> None:
    bound(world)
    world.steps(data(), **options)  # refused here, not when the first step is asked for


@pytest.mark.parametrize(
    ("ask", "words"),
    [(partial(bound, clip=-1), "clip = -1: not a positive number; use a number above 0"),
     (partial(bound, clip=math.nan), "clip = nan: not a positive number"),
     (partial(bound, sync="LocalSGD(every=0)"), r"sync = LocalSGD\(every=0\): .*every"),
     (partial(bound, sync="LocalSDG(4)"), "LocalSDG is not a listed name; did you mean LocalSGD?"),
     (partial(bound, compress=3), "compress = 3: not one of Cast, Exact"),
     (partial(bound, compress=AllReduce()), r"compress = AllReduce\(.*: not one of Cast, Exact"),
     (partial(bound, backward_passes=0), "backward_passes = 0: below 1; use 1 or more"),
     (partial(bound, backward_passes=1.5), "backward_passes = 1.5: not a whole number"),
     (partial(bound, overlap=1), "overlap = 1: not true or false"),
     (scheduler_as_optimizer, r"bind = StepLR: neither a torch\.nn\.Module nor a torch\.optim\.Optimizer; write "
      r"world\.bind\(model, optimizer\), and world\.register_state\(\"scheduler\", scheduler\)"),
     (closing, "optimizer = LBFGS: its step runs the model several times, through closure, which workers cannot"),
     (two_models, "bind = 2 new models and 0 optimizers: LocalSGD.* bind one of each in a call"),
     (other_options, "bind = LoopOptions.*: an earlier call was given .*; give all calls the same"),
     (partial(stepping, load=4), r"load = 4: not one of Inline, Threads, Processes; write it as in load=Inline\(\)"),
     (partial(stepping, steps=-1), "steps = -1: below 1"),
     (partial(stepping, epochs=0), "epochs = 0: not a positive number"),
     (partial(stepping, steps=3, epochs=1), "epochs = 1: steps = 3 is given too; give one of the two"),
     (partial(stepping, global_batch=0), "global_batch = 0: below 1"),
     (partial(stepping, global_batch=8.0), "global_batch = 8.0: not a whole number"),
     (partial(stepping, seed=-1), "seed = -1: below 0"),
     (partial(stepping, collate=3), "collate = int: cannot be called")],
    ids=lambda each: "" if isinstance(each, str) else getattr(each, "keywords", {}) or each.__name__,
)  # fmt: skip
def test_bind_and_steps_check_by_the_rules_of_config(ask, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        simulate(1, lambda comm: ask(world_of(comm)))


@pytest.mark.parametrize(
    ("given_", "words"),
    [({"device": "gpu"}, "device = gpu: not one of the choices; choose auto or cpu or cuda"),
     ({"communicator": "mpi"}, "communicator = mpi: not one of the choices"),
     ({"threads": -1}, "threads = -1: below 0"),
     ({"timeout_seconds": 0}, "timeout_seconds = 0: not a positive number")],
    ids=str,
)  # fmt: skip
def test_join_checks_by_the_rules_of_config(given_, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        unisono.join(**given_)


def test_values_may_be_written_in_the_notation() -> None:
    as_values = simulate(2, lambda comm: dealt(world_of(comm), sync=unisono.LocalSGD(2), compress=Exact(), clip=1.0))
    as_text = simulate(2, lambda comm: dealt(world_of(comm), sync="LocalSGD(2)", compress="Exact()", clip="1.0"))
    assert as_text == as_values


# --- on real processes


def join_and_train(rank: int, size: int, meeting: str) -> list[tuple[torch.Tensor, str]]:
    """Two worlds, one after the other, in one process."""
    found = []
    for life in range(2):
        os.environ.update(WorkerIdentity(rank, size, rank, size, f"file://{meeting}/{life}", "unisono").environ())
        with unisono.join(threads=1) as world:
            assert (world.rank, world.size) == (rank, size)
            found.append(loop(world, "adamw", seed=rank, clip=0.5))
        world.close()  # may be called twice
    os.environ.update(WorkerIdentity(rank, size, rank, size, f"file://{meeting}/last", "unisono").environ())
    with unisono.join(threads=1) as world:
        digest, _ = dealt(world, compress=Exact())
    return [(f, digest) for f in found]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_real_processes_join_twice_and_compute_the_same(size) -> None:
    with tempfile.TemporaryDirectory() as meeting:
        found = processes.run(size, join_and_train, meeting)
    ((digest, _),) = simulate(1, lambda comm: dealt(world_of(comm), compress=Exact()))
    for lives in found:
        for moved, mine in lives:
            torch.testing.assert_close(moved, plain(size, "adamw", clip=0.5), rtol=1e-4, atol=2e-6)
            assert mine == digest


# --- data of one's own that was not divided


def loop_on(world: World, parts: Callable[[int, int], torch.Tensor], steps: int = 8, **options) -> None:
    """A loop over ``parts(step, rank)``."""
    model = net()
    optimizer = MAKERS["sgd"](model.parameters())
    world.bind(model, optimizer, **options)
    for step in range(steps):
        x = parts(step, world.rank)
        F.mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
        with torch.no_grad():
            model(x)  # as an evaluation does


def part(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


SYNCS = [AllReduce(), ParameterServer(), LocalSGD(every=2)]


@pytest.mark.parametrize("sync", SYNCS, ids=type)
def test_workers_that_all_compute_the_same_input_are_told_so_once(sync, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        simulate(3, lambda comm: loop_on(world_of(comm), lambda step, rank: part(step, 0), sync=sync))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("workers 0 to 2 computed the same inputs in their first 3 forward passes")
    assert "DistributedSampler(data, num_replicas=world.size, rank=world.rank)" in said


def test_the_inputs_of_the_first_eight_of_many_workers_are_compared(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        simulate(9, lambda comm: loop_on(world_of(comm), lambda step, rank: part(step, rank // 8)))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("workers 0 to 7 computed the same inputs")


@pytest.mark.parametrize("sync", SYNCS, ids=type)
@pytest.mark.parametrize(
    "parts",
    [
        part,
        lambda step, rank: part(step, min(rank, 1)),  # two of three have the same
        lambda step, rank: part(step, 0 if step < 2 else rank),  # the first two steps alone
        lambda step, rank: part(step, rank if step < 1 else 0),  # all steps but the first
    ],
)
def test_workers_with_inputs_of_their_own_are_told_nothing(sync, parts, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        simulate(3, lambda comm: loop_on(world_of(comm), parts, sync=sync))
    assert not caplog.records


def test_one_worker_alone_is_told_nothing(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        simulate(1, lambda comm: loop_on(world_of(comm), part))
    assert not caplog.records


def test_looking_at_inputs_changes_no_bit_and_ends() -> None:
    def run(comm) -> int:
        world = world_of(comm)
        model = net()
        optimizer = MAKERS["sgd"](model.parameters())
        world.bind(model, optimizer)
        for step in range(3):
            x = part(step, 0)
            F.mse_loss(model(x), x[:, :1]).backward()
            optimizer.step()
        return sum(len(module._forward_pre_hooks) for module in model.modules())

    assert simulate(2, run) == [0, 0]


# --- workers that differ


def test_a_loop_whose_workers_have_other_data_or_batches_is_refused() -> None:
    def run(comm, what: str) -> None:
        world, odd, model = world_of(comm), comm.rank == 1, net()
        world.bind(model, MAKERS["sgd"](model.parameters()))
        mine = data(41 if odd and what == "samples" else 40)
        if odd and what == "data":
            mine = TensorDataset(mine.tensors[0].flip(0), mine.tensors[1])
        next(iter(world.steps(mine, global_batch=12 if odd or what != "batch" else 9, micro_batch=3)))

    for what, words in {
        "samples": "samples = 41: that is worker 1's, and worker 0 has 40",
        "data": "data = sample 0: that is worker 1's, and worker 0 has another one under this number",
        "batch": "global_batch = 12: that is worker 1's, and worker 0 has 9",
    }.items():
        found = outcomes(2, run, what)
        assert all(isinstance(each, TaskMismatch) and words in str(each) for each in found), found
    simulate(2, run, "nothing")


# --- workers that drift apart


def loads_alone(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        model.load_state_dict(net(7).state_dict())


def momentum_alone(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        for state in optimizer.state.values():
            state["momentum_buffer"].add_(1.0)


def schedules_alone(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 1.0 - 0.5 * (rank == 1)


def steps_alone(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(
    ("change", "words"),
    [(loads_alone, r"weights differ between workers 0 and 1, .* or call world\.share\(model\)"),
     (momentum_alone, "weights differ between workers 0 and 1"),
     (schedules_alone, "hyperparameters of SGD, or the number of its steps, differ between workers 0 and 1"),
     (steps_alone, "the number of its steps, differ between workers 0 and 1")],
    ids=lambda each: getattr(each, "__name__", ""),
)  # fmt: skip
def test_what_is_changed_on_one_worker_alone_is_named_within_two_steps(planned, change, words) -> None:
    def run(comm) -> None:
        world, model = world_of(comm), net()
        _, optimizer = world.bind(model, MAKERS["sgd"](model.parameters()))
        steps = world.steps(data(), global_batch=12, micro_batch=3, steps=8) if planned else range(8)
        for step, batches in enumerate(steps):
            optimizer.zero_grad()
            for x, y in batches if planned else [samples(step + comm.rank, 1)]:
                loss_of(model, x, y).backward()
            optimizer.step()
            if step == 3:
                change(comm.rank, model, optimizer)
            assert step < 6, "too late"

    with pytest.raises(UnisonoError, match=words):
        simulate(3, run)


def test_a_mean_is_refused_where_workers_take_as_many_steps_as_they_can() -> None:
    """Their calls would not pair: one of them could wait for ever, or get the mean of another moment."""

    def run(comm) -> bool:
        world, model = world_of(comm), net()
        world.bind(model, torch.optim.SGD(model.parameters(), 0.1), sync="ParameterServer(staleness=2)")
        refused = 0
        for batches in world.steps(data(), global_batch=8, micro_batch=4, steps=3):
            for x, y in batches:
                loss_of(model, x, y).backward()
            for optimizer in [world._loop.optimizers[0].optimizer]:
                optimizer.step()
                optimizer.zero_grad()
            with pytest.raises(UnisonoError, match=r"world\.mean came in a loop in which each worker takes as many"):
                world.mean(1.0)
            refused += 1
        return refused > 0 and world.mean(1.0) == 1.0

    assert any(simulate(2, run))
