"""Loops of several kinds in which workers kill themselves, each once: ``killed_loops.py FOLDER KIND MOMENT COUNT``.

At this moment of one step, worker 1 is killed. If `COUNT` is 2, worker 2 is killed when that step is repeated.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import unisono
from tests.support.replacements import await_replacement
from unisono.checkpoint import fingerprint
from unisono.trainer.loop_steps import Batches

STEPS, HIT = 16, 7
RANDOM = torch.Generator().manual_seed(3)
DATA = TensorDataset(torch.randn(96, 5, generator=RANDOM), torch.randn(96, 1, generator=RANDOM))


class Faults:
    """Kills the processes of `count` workers, one after the other, at `moment` of step `HIT`."""

    def __init__(self, here: Path, moment: str, count: int) -> None:
        self._here, self._moment, self._places = here, moment, ["1", "2"][:count]
        self._place = os.environ.get("UNISONO_RANK", "0")
        self._repeats = -1  # of step `HIT`, on this worker
        self.sizes: list[int] = []

    def at(self, moment: str, step: int) -> None:
        """It is `moment` of `step`."""
        killed = sum((self._here / f"killed-{place}").exists() for place in self._places)
        is_next = killed < len(self._places) and self._places[killed] == self._place
        if is_next and (moment, step) == (self._moment, HIT) and max(self._repeats, 0) == killed:
            (self._here / f"killed-{self._place}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def steps(self, world: unisono.World) -> Iterator[Batches]:
        """The steps of `world`, which after a loss go on once there is a replacement."""
        for batches in world.steps(DATA, global_batch=12, micro_batch=2, steps=STEPS, seed=1):
            self._repeats += batches.step == HIT
            yield batches
            self.sizes.append(world.size)
            if batches.step == HIT + 2 and any(self._here.glob("killed-*")):
                await_replacement(world, 3)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def bound(world: unisono.World, make: Callable[..., Optimizer], **options: Any) -> tuple[nn.Sequential, Optimizer]:
    model = net()
    optimizer = make(model.parameters(), lr=1e-2)
    world.bind(model, optimizer, **{"compress": unisono.Exact()} | options)
    return model, optimizer


def scaler(world: unisono.World, faults: Faults) -> Mapping[str, Tensor]:
    """In the step in which a worker is killed a gradient is infinite: it is left out, and the scale is halved."""
    model, optimizer = bound(world, torch.optim.Adam, compress=unisono.Exact(24))  # a range for scaled gradients
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    world.register_state("scaler", scaler)
    for batches in faults.steps(world):
        optimizer.zero_grad()
        for x, y in batches:
            scaler.scale(F.mse_loss(model(x), y)).backward()
            faults.at("pass", batches.step)
        if batches.step == HIT:
            gradient = next(model.parameters()).grad
            assert gradient is not None  # also where a worker was lost
            gradient[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        faults.at("update", batches.step)
    return {**model.state_dict(), **{name: torch.tensor(value) for name, value in scaler.state_dict().items()}}


def accumulation(world: unisono.World, faults: Faults) -> Mapping[str, Tensor]:
    """Micro-batches add up."""
    model, optimizer = bound(world, torch.optim.Adam)
    for batches in faults.steps(world):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(batches):
            F.mse_loss(model(x), y).backward()
            faults.at(f"micro-batch {i}", batches.step)
        optimizer.step()
    return model.state_dict()


def closure(world: unisono.World, faults: Faults) -> Mapping[str, Tensor]:
    """Each evaluation of the loss iterates the batches again."""
    model, optimizer = bound(world, partial(torch.optim.LBFGS, max_iter=3))
    for batches in faults.steps(world):
        evaluations = 0

        def loss() -> float:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            losses = []
            for x, y in batches:  # noqa: B023 (it is called in this iteration)
                each = F.mse_loss(model(x), y)
                each.backward()
                losses.append(each.detach())
                faults.at(f"evaluation {evaluations}", batches.step)  # noqa: B023
            return float(torch.stack(losses).mean())

        optimizer.step(loss)
    return model.state_dict()


def average(world: unisono.World, faults: Faults) -> Mapping[str, Tensor]:
    """A moving average of the weights, which follows also a step that is not taken."""
    model, optimizer = bound(world, torch.optim.Adam)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    world.register_state("average", average)
    for batches in faults.steps(world):
        optimizer.zero_grad()
        for x, y in batches:
            F.mse_loss(model(x), y).backward()
            faults.at("pass", batches.step)
        optimizer.step()
        faults.at("step", batches.step)
        average.update_parameters(model)
    return {**model.state_dict(), **{f"average {name}": each for name, each in average.state_dict().items()}}


def unfreezing(world: unisono.World, faults: Faults) -> Mapping[str, Tensor]:
    """Layers are trained from a step on; the first one is frozen again later."""
    model = net()
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.bind(model, optimizer, compress=unisono.Exact())
    for batches in faults.steps(world):
        if batches.step == 4:
            model[0].requires_grad_(True)
        if batches.step == HIT - 1:
            model[0].requires_grad_(False)
        if batches.step == HIT:
            model[3].requires_grad_(True)
            faults.at("unfrozen", batches.step)
        optimizer.zero_grad()
        for x, y in batches:
            F.mse_loss(model(x), y).backward()
            faults.at("pass", batches.step)
            faults.at("next pass", batches.step - 1)
        optimizer.step()
    return model.state_dict()


def in_turns(world: unisono.World, faults: Faults) -> Mapping[str, Tensor]:
    """Two networks, of which one is frozen while the other is trained."""
    first, second = net(), net()
    optimizers = torch.optim.Adam(first.parameters(), lr=1e-2), torch.optim.Adam(second.parameters(), lr=1e-2)
    world.bind(first, second, *optimizers, compress=unisono.Exact())
    for batches in faults.steps(world):
        for model, other, optimizer in ((first, second, optimizers[0]), (second, first, optimizers[1])):
            model.requires_grad_(True)
            other.requires_grad_(False)
            optimizer.zero_grad()
            for x, y in batches:
                F.mse_loss(model(x), y + other(x)).backward()
                faults.at("pass of the first" if model is first else "pass of the second", batches.step)
            optimizer.step()
    return {**first.state_dict(), **{f"second {name}": each for name, each in second.state_dict().items()}}


def own_data(world: unisono.World, faults: Faults) -> Mapping[str, Tensor]:
    """The loop reads its data itself, and accumulates by `no_sync`."""
    model, optimizer = bound(world, torch.optim.Adam)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = torch.randint(96, (4, 3), generator=torch.Generator().manual_seed(100 * step + world.rank))
        for row in rows[:-1]:
            with world.no_sync():
                F.mse_loss(model(DATA.tensors[0][row]), DATA.tensors[1][row]).backward()
            faults.at("pass", step)
        F.mse_loss(model(DATA.tensors[0][rows[-1]]), DATA.tensors[1][rows[-1]]).backward()
        optimizer.step()
    return model.state_dict()


KINDS = {each.__name__: each for each in (scaler, accumulation, closure, average, unfreezing, in_turns, own_data)}

if __name__ == "__main__":
    here, kind = Path(sys.argv[1]), KINDS[sys.argv[2]]
    faults = Faults(here, sys.argv[3], int(sys.argv[4]))
    with unisono.join(threads=1, device="cpu") as world:
        found = fingerprint(kind(world, faults))
    told = {"weights": found, "sizes": faults.sizes}
    (here / f"told-{os.environ.get('UNISONO_RANK', '0')}.json").write_text(json.dumps(told))
