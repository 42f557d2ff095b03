"""Models, data, loss, optimizer and step timer of `layout_loop.py`, `torch_layouts.py` and `single_gpu.py`."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from unisono.data import MicroBatchPlan, seed_compute, stream
from unisono.tasks.builtin.gpt import GPT

SAMPLES = 512
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """What is trained, and on what; ``build()`` gives a model, ``data()`` inputs and targets."""

    build: Callable[[], nn.Module]
    data: Callable[[], Batch]


def text(context: int) -> Batch:
    """Bytes (SAMPLES, context) and those that follow."""
    tokens = torch.randint(256, (SAMPLES, context + 1))
    return tokens[:, :-1], tokens[:, 1:]


def pictures() -> Batch:
    """Small pictures of ten kinds."""
    return torch.randn(SAMPLES, 3, 32, 32), torch.randint(10, (SAMPLES,))


def vectors() -> Batch:
    """Vectors of ten kinds."""
    return torch.randn(SAMPLES, 256), torch.randint(10, (SAMPLES,))


def uneven() -> nn.Sequential:
    """Eight blocks, of which the last two compute most."""
    hidden = [512] * 6 + [4096] * 2
    blocks = [nn.Sequential(nn.Linear(256, h), nn.ReLU(), nn.Linear(h, 256)) for h in hidden]
    return nn.Sequential(*blocks)


def convolutions() -> nn.Sequential:
    """Eight layers: the first ones compute most, the last ones weigh most."""
    sizes = ((3, 64, 1), (64, 64, 1), (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 2))
    layers = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1, stride=by), nn.ReLU()) for a, b, by in sizes]
    tail = nn.Sequential(nn.Flatten(), nn.Linear(128 * 8 * 8, 512), nn.ReLU())
    return nn.Sequential(*layers, tail, nn.Linear(512, 10))


MODELS = {
    "gpt": Shape(GPT(layers=12, width=256, heads=4, context=128).build, functools.partial(text, 128)),
    "tiny": Shape(GPT(layers=2, width=32, heads=2, context=16).build, functools.partial(text, 16)),
    "uneven": Shape(uneven, vectors),
    "convolutions": Shape(convolutions, pictures),
}


class Samples(Dataset[Batch]):
    """In memory; many at once by ``__getitems__``."""

    def __init__(self, model: str) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inputs, self.targets = MODELS[model].data()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Batch:
        return self.inputs[i], self.targets[i]

    def __getitems__(self, indices: list[int]) -> Batch:
        at = torch.as_tensor(indices)
        return self.inputs[at], self.targets[at]


def together(samples: Batch | list[Batch]) -> Batch:
    """What ``__getitems__`` gave, or a list of samples as one batch."""
    if isinstance(samples, tuple):
        return samples
    inputs, targets = zip(*samples)
    return torch.stack(inputs), torch.stack(targets)


def loss(output: Tensor, batch: Batch) -> Tensor:
    """The mean cross-entropy over all positions."""
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def built(model: str) -> nn.Module:
    """The model with the weights that a run of seed 0 begins with."""
    seed_compute(stream(0, 0, 0, "init"))
    return MODELS[model].build()


def batches(model: str, step: int, global_batch: int, micro_batch: int) -> list[Batch]:
    """The micro-batches of `step` in a run of seed 0."""
    plan, samples = MicroBatchPlan(SAMPLES, global_batch, micro_batch, 0), Samples(model)
    return [samples.__getitems__(plan.indices(step, m).tolist()) for m in range(plan.micro_batches)]


def timed(step: Callable[[int], None], steps: int) -> float:
    """Seconds of the median step."""
    marks = [time.monotonic()]
    for t in range(steps):
        step(t)
        marks.append(time.monotonic())
    return statistics.median(b - a for a, b in pairwise(marks))
