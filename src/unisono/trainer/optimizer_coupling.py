"""Finds which numbers the step of an optimizer couples, by trials on small tensors, whole and in parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import InvalidInput
from unisono.layout import SHARDING_AXES, Layout
from unisono.sync import ELEMENTWISE

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
Part = Callable[[Tensor], Tensor]
STEPS = 32  # covers what begins late or happens every ten steps, as in variants of Shampoo
_SIZES = (8, 6, 4)  # of the trial tensors, by dimension
_TENSORS_PER_DIM = 3  # trial tensors of each number of dimensions
_TOLERANCE = 1e-3  # relative to the largest change of a number of the tensor
_RATE = 1e-2  # in place of a learning rate of zero


class Coupling(Enum):
    """What the step of a number depends on, beside that number and its gradients.

    ``NUMBER``: nothing else; any part of a tensor can be stepped without the rest. ``TENSOR``: other numbers of the
    same parameter (Adafactor, Muon, LARS, Shampoo). ``MODEL``: other parameters (such as a norm over all of them).
    """

    NUMBER = "number"
    TENSOR = "tensor"
    MODEL = "model"


def coupling(make: Make, dims: Collection[int], device: torch.device) -> Coupling:
    """What the optimizer from `make` couples.

    Torch's own elementwise optimizers are known. Any other one takes `STEPS` steps on `device` with small tensors: with
    all of them, with some of them, and with halves of them, by the same gradients. A coupling that takes effect more
    rarely is not found.

    Args:
        dims: the numbers of dimensions of the model's trainable parameters.

    Raises:
        InvalidInput: the optimizer fails with given gradients, such as one that needs a closure.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it will warn again when the real one is created
        for dtype in (torch.float64, torch.float32):  # some support float32 only
            try:
                return _Trial.of(make, dims, device, dtype).result()
            except Exception as error:  # code of the user: anything can be raised
                failure = error
    raise InvalidInput(
        "optimizer", getattr(make, "__qualname__", type(make).__name__),
        f"on small tensors with given gradients it fails: {type(failure).__name__}: {failure}",
        "use one that steps by gradients alone") from failure  # fmt: skip


def needs_wholes(make: Make, dims: Collection[int], layout: Layout, device: torch.device) -> bool:
    """Whether tensors that are sharded under `layout` must be stepped whole. See `coupling` for the arguments.

    Raises:
        InvalidInput: the optimizer couples parameters that are on different workers.
    """
    split_axes = [f"{axis}={size}" for axis in ("pipeline", *SHARDING_AXES) if (size := getattr(layout, axis)) > 1]
    coupled = coupling(make, dims, device) if split_axes else Coupling.NUMBER
    if coupled is Coupling.MODEL:
        optimizer = make([nn.Parameter(torch.zeros([1] * dim)) for dim in dims])
        raise InvalidInput(
            "optimizer", type(optimizer).__name__, "its step of one parameter depends on others, and with "
            f"{', '.join(split_axes)} no worker has all of them",
            "leave the layout out, so that each worker has the whole model, or use an optimizer that steps each "
            "parameter independently")  # fmt: skip
    return coupled is Coupling.TENSOR and any(getattr(layout, axis) > 1 for axis in SHARDING_AXES)


@dataclass(frozen=True)
class _Trial:
    """A trial of the optimizer from `make`: steps from `starts`, with one gradient per tensor for each step."""

    make: Make
    starts: Sequence[Tensor]
    gradients: Sequence[Sequence[Tensor]]

    @staticmethod
    def of(make: Make, dims: Collection[int], device: torch.device, dtype: torch.dtype) -> _Trial:
        """A trial whose tensors and gradients trigger what optimizers react to.

        The magnitudes of a tensor differ from row to row. Some gradients are large, some small, some orthogonal to the
        tensor, so that they change its direction but not its norm.
        """
        random = torch.Generator().manual_seed(0)
        tried = [dim for dim in sorted(dims) for _ in range(_TENSORS_PER_DIM)]
        starts, *gradients = (
            [_uneven_tensor(dim, random).to(device, dtype) for dim in tried] for _ in range(STEPS + 1)
        )
        for step, each in enumerate(gradients):
            for gradient, start in zip(each, starts):
                gradient *= {1: 30.0, 3: 0.03}.get(step % 5, 1.0)
                if step % 5 == 4:
                    gradient -= (gradient * start).sum() / (start * start).sum() * start
        return _Trial(make, starts, gradients)

    def result(self) -> Coupling:
        """What the optimizer couples."""
        if self._is_known():
            return Coupling.NUMBER
        numbers = range(len(self.starts))
        whole = self._final_values(_all, numbers)
        if not all(bool(x.isfinite().all()) for x in whole):
            raise ValueError("its parameters do not stay finite")
        if any(self._differs(whole, _all, some) for some in (numbers[::2], numbers[1::2])):
            return Coupling.MODEL
        halves = (partial(_half, dim, of) for dim in range(max(x.dim() for x in whole)) for of in (0, 1))
        return Coupling.TENSOR if any(self._differs(whole, half, numbers) for half in halves) else Coupling.NUMBER

    def _is_known(self) -> bool:
        """Whether it is an elementwise optimizer of torch, without hooks."""
        optimizer = self.make([nn.Parameter(start) for start in self.starts])
        hooks: Any = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
        return ELEMENTWISE.get(type(optimizer).__name__) is type(optimizer) and not hooks

    def _final_values(self, part: Part, which: Sequence[int]) -> list[Tensor]:
        """The parts of the tensors `which` after all steps, with an optimizer of these alone."""
        torch.manual_seed(0)
        parameters = [nn.Parameter(part(self.starts[i]).clone()) for i in which]
        optimizer = self.make(parameters)
        for group in optimizer.param_groups:
            group["lr"] = group.get("lr") or _RATE
        for gradients in self.gradients:
            for i, parameter in zip(which, parameters):
                parameter.grad = part(gradients[i]).clone()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    def _differs(self, whole: Sequence[Tensor], part: Part, which: Sequence[int]) -> bool:
        """Whether an optimizer of these parts alone yields other values than `whole`, those of one of all tensors."""
        for i, end in zip(which, self._final_values(part, which) if which else ()):
            expected = part(whole[i])
            change = float((expected - part(self.starts[i])).abs().max())
            if not torch.allclose(end, expected, rtol=0.0, atol=_TOLERANCE * change):
                return True
        return False


def _all(x: Tensor) -> Tensor:
    return x


def _half(dim: int, of: int, x: Tensor) -> Tensor:
    return x.tensor_split(2, dim)[of] if x.dim() > dim else x


def _uneven_tensor(dim: int, random: torch.Generator) -> Tensor:
    size = (*_SIZES, *[2] * dim)[:dim]
    x = torch.randn(size, generator=random) * torch.randn((), generator=random).exp()
    for axis in range(dim):
        x *= torch.randn([n if i == axis else 1 for i, n in enumerate(size)], generator=random).exp()
    return x
