"""What the cases share: data, small models, the plain loop, and the numbers that are compared."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.end_to_end.loop_cases.environments import Environment, bare
from tests.end_to_end.loop_cases.table import Numbers

SAMPLES, STEPS, CLASSES, WORDS = 48, 4, 3, 11

_COLUMNS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "x": lambda g: torch.randn(SAMPLES, 5, generator=g, dtype=torch.float64),
    "pair": lambda g: torch.randn(SAMPLES, 5, generator=g, dtype=torch.float64),
    "third": lambda g: torch.randn(SAMPLES, 5, generator=g, dtype=torch.float64),
    "y": lambda g: torch.randn(SAMPLES, 1, generator=g, dtype=torch.float64),
    "other": lambda g: torch.randn(SAMPLES, 1, generator=g, dtype=torch.float64),
    "noise": lambda g: torch.randn(SAMPLES, 4, generator=g, dtype=torch.float64),
    "uniform": lambda g: torch.rand(SAMPLES, 1, generator=g, dtype=torch.float64),
    "mask": lambda g: (torch.rand(SAMPLES, 8, generator=g) > 0.3).double() / 0.7,
    "image": lambda g: torch.randn(SAMPLES, 1, 6, 6, generator=g, dtype=torch.float64),
    "series": lambda g: torch.randn(SAMPLES, 6, 5, generator=g, dtype=torch.float64),
    "label": lambda g: torch.randint(CLASSES, (SAMPLES,), generator=g),
    "tokens": lambda g: torch.randint(WORDS, (SAMPLES, 7), generator=g),
}


def samples(*columns: str) -> TensorDataset:
    """A dataset of `SAMPLES` samples with these columns, always the same."""
    return TensorDataset(
        *(_COLUMNS[name](torch.Generator().manual_seed(zlib.crc32(name.encode()))) for name in columns)
    )


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` builds, in float64, with the same weights everywhere."""
    torch.manual_seed(seed)
    return make().double()


def net(*sizes: int, seed: int = 0) -> nn.Sequential:
    """A small network; by default of 5 numbers to one."""
    sizes = sizes or (5, 8, 1)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def sgd(*models: nn.Module, lr: float = 0.1, momentum: float = 0.9, **options: Any) -> torch.optim.SGD:
    """SGD with momentum over all parameters of `models`."""
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=lr, momentum=momentum, **options)


def adam(*models: nn.Module, lr: float = 0.02, **options: Any) -> torch.optim.Adam:
    """Adam over all parameters of `models`."""
    return torch.optim.Adam([p for m in models for p in m.parameters()], lr=lr, **options)


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The squared error of a batch."""
    return F.mse_loss(model(x), y)


def cross_entropy(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    """The cross-entropy of a batch."""
    return F.cross_entropy(model(x), label)


def _nothing() -> None:
    pass


def train(
    env: Environment,
    model: nn.Module,
    *optimizers: Optimizer,
    loss_of: Callable[..., Tensor] = mse,
    data: TensorDataset | None = None,
    before_step: Callable[[], object] = _nothing,
    after_step: Callable[[], object] = _nothing,
) -> Numbers:
    """The loop that everybody writes, for cases that differ in model, optimizer or in what surrounds the step."""
    for batch in env.batches(data or samples("x", "y"), STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for sample in batch:
            loss_of(model, *sample).backward()
        before_step()
        for optimizer in optimizers:
            optimizer.step()
        after_step()
    return numbers(model, *optimizers)


def numbers(*things: nn.Module | Optimizer, **named: Tensor | float) -> Numbers:
    """Weights and buffers of models, state and learning rates of optimizers, and what is named."""
    found: dict[str, Tensor] = {}
    for place, thing in enumerate(things):
        entries = bare(thing).state_dict() if isinstance(thing, nn.Module) else _state(thing)
        found |= {f"{place}.{name}": _copy(value) for name, value in entries.items()}
    return found | {name: _copy(torch.as_tensor(value)) for name, value in named.items()}


def weights(*models: nn.Module) -> Numbers:
    """The parameters of models without their buffers."""
    return {f"{i}.{n}": _copy(p) for i, model in enumerate(models) for n, p in bare(model).named_parameters()}


def saved(thing: object) -> bytes:
    """What `torch.save` writes of `thing`."""
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def loaded(content: bytes, *, weights_only: bool = True) -> Any:
    """What `torch.load` makes of what was `saved`."""
    return torch.load(io.BytesIO(content), weights_only=weights_only)


def _state(optimizer: Optimizer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for i, group in enumerate(optimizer.param_groups):
        found[f"lr {i}"] = torch.as_tensor(group["lr"])
        for j, parameter in enumerate(group["params"]):
            kept = optimizer.state.get(parameter, {})
            found |= {f"{i}.{j}.{k}": v for k, v in kept.items() if isinstance(v, Tensor)}
    return found


def _copy(value: Tensor) -> Tensor:
    value = value.detach()
    return (torch.view_as_real(value) if value.is_complex() else value).to(torch.float64, copy=True)
