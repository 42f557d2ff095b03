"""A loop with `unisono.DistributedDataParallel` is one with torch's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F

from tests.trainer.small_loops import SHARE, STEPS, net, samples, world_of
from unisono import DistributedDataParallel as DDP
from unisono.comm import simulate
from unisono.compress import Compressor
from unisono.errors import InvalidInput, UnisonoError


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def mine(step: int, rank: int, size: int) -> list[torch.Tensor]:
    return [t[rank * SHARE : (rank + 1) * SHARE] for t in samples(step, size)]


def plain(size: int, steps: int = STEPS, accumulates: bool = False, ranks: Callable = range) -> torch.Tensor:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        if not accumulates or step % 2 == 0:
            optimizer.zero_grad()
        for rank in ranks(size) if ranks is range else ranks(step):
            x, y = mine(step, rank, size)
            (F.mse_loss(model(x), y) / size).backward()
        if not accumulates or step % 2 == 1:
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_its_steps_are_those_of_plain_pytorch(size: int) -> None:
    def run(comm) -> tuple[torch.Tensor, list[str]]:
        model = DDP(net(comm.rank), world=world_of(comm))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(STEPS):
            x, y = mine(step, comm.rank, size)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        return weights(model), list(model.state_dict())

    for found, keys in simulate(size, run):
        torch.testing.assert_close(found, plain(size), rtol=1e-4, atol=2e-6)
        assert keys == [f"module.{name}" for name in net().state_dict()]


@pytest.mark.parametrize("size", [1, 2])
def test_no_sync_accumulates(size: int) -> None:
    def run(comm) -> torch.Tensor:
        model = DDP(net(), world=world_of(comm))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(0, STEPS, 2):
            optimizer.zero_grad()
            with model.no_sync():
                x, y = mine(step, comm.rank, size)
                F.mse_loss(model(x), y).backward()
            x, y = mine(step + 1, comm.rank, size)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        return weights(model)

    for found in simulate(size, run):
        torch.testing.assert_close(found, plain(size, accumulates=True), rtol=1e-4, atol=2e-6)


def test_workers_may_run_out_of_data_at_different_times() -> None:
    last = [2, 5, 4]

    def run(comm) -> torch.Tensor:
        model = DDP(net(), world=world_of(comm))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        with model.join():
            for step in range(last[comm.rank]):
                x, y = mine(step, comm.rank, 3)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
        return weights(model)

    expected = plain(3, steps=5, ranks=lambda step: [rank for rank in range(3) if step < last[rank]])
    for found in simulate(3, run):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("sync", ["LocalSGD(every=2)", "DiLoCo(every=2)", "ParameterServer()"])
@pytest.mark.parametrize("closes", [False, True])
def test_a_synchronizer_takes_the_steps_of_a_bound_optimizer(sync: str, closes: bool) -> None:
    """As those of `world.bind`, also where the step is given a closure that computes the gradients."""

    def run(comm, wrapped: bool) -> torch.Tensor:
        world, model = world_of(comm), net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
        if wrapped:
            model = DDP(model, world=world, sync=sync)
            model.bind(optimizer)
        else:
            world.bind(model, optimizer, sync=sync)
        for step in range(STEPS):
            x, y = mine(step, comm.rank, 2)

            def compute(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            if wrapped and closes:
                assert optimizer.step(compute).item() > 0
            else:
                compute()
                optimizer.step()
        world.synchronize()
        return weights(model)

    expected = simulate(2, partial(run, wrapped=False))
    found = simulate(2, partial(run, wrapped=True))
    assert all(torch.equal(each, expected[0]) for each in [*found, *expected])
    assert not torch.equal(expected[0], weights(net()))


class Own(torch.optim.SGD):
    """An optimizer of the user's."""


def test_what_may_call_a_closure_twice_takes_no_local_steps() -> None:
    def run(comm) -> None:
        model = DDP(net(), world=world_of(comm), sync="LocalSGD(every=2)")
        optimizer = Own(model.parameters())
        model.bind(optimizer)
        x, y = mine(0, comm.rank, 2)
        F.mse_loss(model(x), y).backward()
        with pytest.raises(InvalidInput, match=r"closure = Own: it may compute the loss several times"):
            optimizer.step(lambda: F.mse_loss(model(x), y))

    simulate(2, run)


def test_a_model_in_evaluation_mode_is_trained_by_the_mean_as_well() -> None:
    def run(comm) -> torch.Tensor:
        model = DDP(net(), world=world_of(comm)).eval()
        x, y = mine(0, comm.rank, 2)
        F.mse_loss(model(x), y).backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    first, second = simulate(2, run)
    assert torch.equal(first, second)


def test_libraries_take_it_for_the_class_of_torch() -> None:
    def run(comm) -> None:
        model = DDP(net(), world=world_of(comm))
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        copied = copy.deepcopy(model)
        assert torch.equal(weights(copied), weights(model))
        assert model.train(False).module.training is False

    simulate(2, run)


def test_a_model_that_is_gone_is_released() -> None:
    """As the models of a search for hyperparameters, one after the other."""

    def run(comm) -> list[bool]:
        world, gone = world_of(comm), []
        for seed in range(3):
            model = DDP(net(seed), world=world)
            x, y = mine(0, comm.rank, 2)
            F.mse_loss(model(x), y).backward()
            gone.append(weakref.ref(model.module[0].weight))
            kept = model.module[2].weight if seed == 2 else None
            del model
        gc.collect()
        own = torch.ones(1, 1) * comm.rank
        kept.grad = None
        (own * kept.sum()).sum().backward()
        assert torch.equal(kept.grad, torch.full_like(kept, comm.rank))  # the worker's own again
        return [each() is None for each in gone]

    assert simulate(2, run) == [[True] * 3] * 2


def test_a_model_that_is_released_leaves_what_others_have_of_it() -> None:
    """The parameters that two models share, and one that was frozen, are trained by the other from then on."""

    def run(comm) -> None:
        world, whole = world_of(comm), net()
        whole[0].weight.requires_grad_(False)
        first, second = DDP(whole[2], world=world), DDP(whole, world=world)
        x, y = mine(0, comm.rank, 2)
        F.mse_loss(second(x), y).backward()
        first(torch.ones(1, 8)).sum().backward()
        world.release(first.module)
        whole[0].weight.requires_grad_(True)
        second.zero_grad()
        F.mse_loss(second(x), y).backward()
        for parameter in whole.parameters():
            rows = comm.gather(parameter.grad).wait()
            assert torch.equal(rows[0], rows[1])

    simulate(2, run)


def test_the_class_of_torch_refuses_to_wrap_it() -> None:
    """Its gradients would be averaged twice, or lost."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    def run(comm) -> None:
        with pytest.raises(RuntimeError, match="not needed when a module doesn't have any parameter"):
            nn.parallel.DistributedDataParallel(DDP(net(), world=world_of(comm)))

    try:
        simulate(2, run)
    finally:
        distributed.destroy_process_group()


def test_several_models_have_a_class_each() -> None:
    """As the two networks of a GAN, where a pass of one reaches the parameters of the other."""

    def train(first: nn.Module, second: nn.Module, share: Callable[[int], list]) -> torch.Tensor:
        optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (first, second)]
        for step in range(STEPS):
            for turn, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                parts = share(step)
                for x, y in parts:
                    hidden = first(x)
                    output = second((hidden if turn == 0 else hidden.detach()).expand(-1, 5))
                    (F.mse_loss(output, y) / len(parts)).backward()
                optimizer.step()
        return torch.cat([weights(first), weights(second)])

    def run(comm) -> torch.Tensor:
        world = world_of(comm)
        return train(DDP(net(), world=world), DDP(net(1), world=world), lambda step: [mine(step, comm.rank, 2)])

    expected = train(net(), net(1), lambda step: [mine(step, rank, 2) for rank in range(2)])
    for found in simulate(2, run):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("state", "hook", "expected"),
    [(None, default_hooks.fp16_compress_hook, "Cast(to='fp16')"),
     (powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=3), powerSGD_hook.powerSGD_hook, "PowerSGD(rank=3")],
)  # fmt: skip
def test_hooks_of_torch_are_compressors(state: object, hook: Callable, expected: str) -> None:
    def run(comm) -> Compressor:
        model = DDP(net(), world=world_of(comm))
        model.register_comm_hook(state, hook)
        F.mse_loss(model(samples(0, 1)[0]), samples(0, 1)[1]).backward()
        with pytest.raises(UnisonoError, match="after the first forward pass"):
            model.register_comm_hook(state, hook)
        return model._compress

    assert all(repr(each).startswith(expected) for each in simulate(2, run))


def test_what_is_not_supported_is_refused() -> None:
    def run(comm) -> None:
        world = world_of(comm)
        with pytest.raises(InvalidInput, match="process_group = 3: the workers of a world are all of a run"):
            DDP(net(), process_group=3, world=world)
        with pytest.raises(InvalidInput, match=r"write with model.join\(\) instead"), Join([DDP(net(), world=world)]):
            pass
        with pytest.raises(InvalidInput, match="broadcast_buffers = False"):
            DDP(net(), broadcast_buffers=False, world=world)
        with pytest.raises(InvalidInput, match="hook = <lambda>: not one of torch's"):
            DDP(net(), world=world).register_comm_hook(None, lambda state, bucket: None)

    simulate(1, run)
