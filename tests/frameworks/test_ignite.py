"""Ignite's engines train a model that `unisono.DistributedDataParallel` wraps, as one process trains it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import EMAHandler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.small_loops import data, net, noisy, samples, state, world_of
from unisono import DistributedDataParallel, Exact
from unisono.comm import outcomes, simulate
from unisono.errors import PeerLost

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH, EPOCHS = 6, 12, 2


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def loader(rank: int, size: int) -> DataLoader[Any]:
    """This worker's part of `STEPS` global batches."""
    x, y = samples(0, STEPS * BATCH // 6)
    return DataLoader(TensorDataset(x[rank::size], y[rank::size]), BATCH // size)


def train(model: nn.Module, rank: int = 0, size: int = 1, bind: Any = None, **options: Any) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if bind is not None:
        bind(optimizer)
    trainer = create_supervised_trainer(model, optimizer, F.mse_loss, **options)
    average = EMAHandler(model, momentum=0.3)
    average.attach(trainer)
    trainer.run(loader(rank, size), max_epochs=EPOCHS)
    return average.ema_model


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "accumulation": {"gradient_accumulation_steps": 3}}


@pytest.mark.parametrize(("name", "size"), [("plain", 1), ("plain", 2), ("plain", 3), ("accumulation", 2)])
def test_its_steps_are_those_of_one_process(name: str, size: int) -> None:
    def run(comm) -> tuple[Tensor, Tensor]:
        model = DistributedDataParallel(net(comm.rank), world=world_of(comm))
        average = train(model, comm.rank, size, **OPTIONS[name])
        return weights(model), weights(average)

    model = net()
    average = train(model, **OPTIONS[name])
    for found, averaged in simulate(size, run):
        torch.testing.assert_close(found, weights(model), rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(averaged, weights(average), rtol=1e-4, atol=2e-6)


def test_mixed_precision() -> None:
    """Workers have the same bits. One process rounds activations of other batches, to 8 bits."""

    def fit(model: nn.Module, rank: int = 0, size: int = 1) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)

        def step(engine: Engine, batch: Any) -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()

        Engine(step).run(loader(rank, size), max_epochs=EPOCHS)

    def run(comm) -> Tensor:
        model = DistributedDataParallel(net(), world=world_of(comm))
        fit(model, comm.rank, 2)
        return weights(model)

    model = net()
    fit(model)
    one, two = simulate(2, run)
    assert torch.equal(one, two)
    torch.testing.assert_close(one, weights(model), rtol=0.01, atol=1e-3)


def test_running_statistics_are_equal_on_all_workers() -> None:
    def run(comm) -> Tensor:
        model = DistributedDataParallel(noisy(), world=world_of(comm))
        train(model, comm.rank, comm.size)
        return state(model)

    one, two = simulate(2, run)
    assert torch.equal(one, two)


@pytest.mark.parametrize("sync", ["LocalSGD(every=2)", "DiLoCo(every=2)", "Gossip()", "ParameterServer()"])
def test_other_synchronizers_take_the_steps_of_a_bound_optimizer(sync: str) -> None:
    def run(comm, engine: bool) -> Tensor:
        world, model = world_of(comm), net()
        if engine:
            wrapped = DistributedDataParallel(model, world=world, sync=sync)
            train(wrapped, comm.rank, comm.size, wrapped.bind)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            world.bind(model, optimizer, sync=sync)
            for _ in range(EPOCHS):
                for x, y in loader(comm.rank, comm.size):
                    optimizer.zero_grad()
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()
        world.synchronize()
        return weights(model)

    expected = simulate(2, partial(run, engine=False))
    found = simulate(2, partial(run, engine=True))
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compress", ["PowerSGD(rank=1)", "Quantize(bits=8)", "TopK(density=0.5)"])
def test_a_compressor_leaves_all_workers_with_the_same_weights(compress: str) -> None:
    def run(comm) -> Tensor:
        model = DistributedDataParallel(net(), world=world_of(comm), compress=compress)
        train(model, comm.rank, comm.size)
        return weights(model)

    one, two = simulate(2, run)
    assert torch.equal(one, two)
    assert not torch.equal(one, weights(net()))


def over_steps(world: Any, model: nn.Module, ends: Callable[[int], Any] = lambda step: None) -> None:
    """An engine whose data are those of `World.steps`."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    world.bind(model, optimizer, compress=Exact())

    def step(engine: Engine, batches: Any) -> float:
        optimizer.zero_grad()
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            loss.backward()
        ends(batches.step)
        optimizer.step()
        return loss.item()

    Engine(step).run(world.steps(data(), global_batch=8, micro_batch=2, epochs=2))


def test_data_of_the_world_give_the_same_bits_on_any_number_of_workers() -> None:
    def run(comm) -> Tensor:
        model = noisy()
        over_steps(world_of(comm), model)
        return state(model)

    found = [each for size in (1, 2, 3) for each in simulate(size, run)]
    assert all(torch.equal(each, found[0]) for each in found)


def test_a_lost_worker_is_named() -> None:
    def run(comm) -> None:
        model = DistributedDataParallel(net(), world=world_of(comm))
        trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), 0.1), F.mse_loss)
        if comm.rank == 1:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: 1 / 0)
        trainer.run(loader(comm.rank, comm.size))

    first, second = outcomes(2, run)
    assert isinstance(second, ZeroDivisionError)
    assert isinstance(first, PeerLost)
    assert first.ranks == (1,)


# --- real processes


SCRIPT = """
import json
import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine
from ignite.metrics import Accuracy, Loss, RunningAverage
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

world = unisono.join(threads=1)


def training(local_rank, at):
    torch.manual_seed(world.rank)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = unisono.DistributedDataParallel(nn.Linear(4, 2), world=world)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), 1e-2))
    train = idist.auto_dataloader(data, batch_size=24, shuffle=False)
    test = idist.auto_dataloader(data, batch_size=24, shuffle=False)
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
    RunningAverage(output_transform=lambda loss: loss, alpha=0.5).attach(trainer, "loss")
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "loss": Loss(F.cross_entropy)})
    best = Checkpoint({"model": model, "optimizer": optimizer}, DiskSaver(at, create_dir=True, require_empty=False),
                      score_name="accuracy", global_step_transform=global_step_from_engine(trainer))
    evaluator.add_event_handler(Events.COMPLETED, best)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(test))
    trainer.run(train, max_epochs=3)
    found = [evaluator.state.metrics, trainer.state.metrics["loss"], best.last_checkpoint.name]
    if idist.get_world_size() > 1:
        try:
            idist.auto_model(model)
        except RuntimeError as error:
            found.append(str(error))
    if world.rank == 0:
        print(json.dumps(found))


with idist.Parallel(backend="gloo" if world.size > 1 else None) as parallel:
    parallel.run(training, sys.argv[1])
world.close()
"""

LAUNCHERS: dict[str, Sequence[str]] = {
    "alone": [],
    "ours": ["-m", "unisono", "launch", "--workers", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


def printed(at: Path, script: str, launcher: str, *words: str) -> str:
    (at / "script.py").write_text(script)
    line = [sys.executable, *LAUNCHERS[launcher], "script.py", *words]
    found = os.environ | {"PYTHONPATH": str(ROOT)}  # where the script's imports are
    done = subprocess.run(line, cwd=at, env=found, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_metrics_data_and_checkpoints_of_ignite_are_those_of_one_process(tmp_path: Path) -> None:
    lines = [printed(tmp_path, SCRIPT, launcher, launcher).splitlines() for launcher in LAUNCHERS]
    one, *others = (json.loads(line) for each in lines for line in each if line.startswith("[{"))
    expected = torch.load(tmp_path / "alone" / one[2])
    assert list(expected["model"]) == ["weight", "bias"]
    for launcher, each in zip(("ours", "torchrun"), others, strict=True):
        assert each[0]["accuracy"] == one[0]["accuracy"] > 0.5
        assert each[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5)
        assert each[1] == pytest.approx(one[1], rel=1e-5)
        assert each[2] == one[2]
        assert each[3].startswith("DistributedDataParallel is not needed when a module doesn't have any parameter")
        torch.testing.assert_close(torch.load(tmp_path / launcher / each[2]), expected, rtol=1e-4, atol=2e-6)


LOSING = """
import os
import signal
import sys
from pathlib import Path

import unisono
from tests.frameworks.test_ignite import noisy, over_steps, state

world = unisono.join(threads=1)
model = noisy()


def end(step):
    if step == 4 and world.rank == 1 and len(sys.argv) > 1 and not Path(sys.argv[1]).exists():
        Path(sys.argv[1]).touch()
        os.kill(os.getpid(), signal.SIGKILL)


over_steps(world, model, end)
if world.rank == 0:
    print(state(model).tolist())
world.close()
"""


@pytest.mark.long
def test_training_goes_on_when_a_worker_is_lost(tmp_path: Path) -> None:
    expected = printed(tmp_path, LOSING, "alone")
    said = printed(tmp_path, LOSING, "ours", "lost")
    assert said.endswith(expected)
    assert " is over: worker " in said
    assert (tmp_path / "lost").exists()


SPAWNING = """
import ignite.distributed as idist
from torch import nn

import unisono


def training(local_rank):
    unisono.DistributedDataParallel(nn.Linear(4, 2))


if __name__ == "__main__":
    with idist.Parallel(backend="gloo", nproc_per_node=1) as parallel:
        parallel.run(training)
"""


@pytest.mark.long
def test_processes_that_ignite_starts_are_told_to_use_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SPAWNING)
    environ = {name: value for name, value in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
    line = [sys.executable, "script.py"]
    done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert "LOCAL_WORLD_SIZE = unset: the environment of a launcher is incomplete" in done.stderr
