"""Which numbers an optimizer's step brings together: found out by trying it on small tensors, whole and in pieces."""

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
STEPS = 32  # long enough for what begins late or is done every ten steps, as in Shampoo's kin
_SIZES = (8, 6, 4)  # of the tensors that are tried, by dimension
_ALIKE = 3  # tensors of each number of dimensions that are tried
_TOLERANCE = 1e-3  # of the way that a tensor has gone
_RATE = 1e-2  # where the optimizer is made with a learning rate of zero


class Coupling(Enum):
    """What the step of a number depends on, beside that number and its gradients.

    ``NUMBER``: nothing; any part of a tensor can be stepped without the rest. ``TENSOR``: other numbers of the same
    parameter (Adafactor, Muon, LARS, Shampoo). ``MODEL``: other parameters (a norm or a step size of all together).
    """

    NUMBER = "number"
    TENSOR = "tensor"
    MODEL = "model"


def coupling(make: Make, dims: Collection[int], device: torch.device) -> Coupling:
    """What the optimizer that `make` makes couples in a model whose trainable parameters have so many dimensions.

    Torch's own elementwise optimizers are known. Any other one takes `STEPS` steps on `device` with small tensors: with
    all of them, with some of them, and with halves of them, by the same gradients. What is coupled more seldom than
    that is not found.

    Raises:
        InvalidInput: the optimizer does not step by given gradients.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer warns when it is made in earnest
        for dtype in (torch.float64, torch.float32):  # some know but the second
            try:
                return _Trial.of(make, dims, device, dtype).found()
            except Exception as error:  # whatever the user's optimizer raises
                failed = error
    raise InvalidInput(
        "optimizer", getattr(make, "__qualname__", type(make).__name__),
        f"on small tensors with given gradients it fails: {type(failed).__name__}: {failed}",
        "use one that steps by gradients alone") from failed  # fmt: skip


def needs_wholes(make: Make, dims: Collection[int], layout: Layout, device: torch.device) -> bool:
    """Whether tensors that are cut under `layout` have to be stepped whole. See `coupling` for the arguments.

    Raises:
        InvalidInput: the optimizer couples parameters that lie on several workers.
    """
    apart = [f"{axis}={size}" for axis in ("pipeline", *SHARDING_AXES) if (size := getattr(layout, axis)) > 1]
    found = coupling(make, dims, device) if apart else Coupling.NUMBER
    if found is Coupling.MODEL:
        optimizer = make([nn.Parameter(torch.zeros([1] * dim)) for dim in dims])
        raise InvalidInput(
            "optimizer", type(optimizer).__name__, "its step of one parameter depends on others, and with "
            f"{', '.join(apart)} no worker has all of them",
            "leave the layout out, so that each has the whole model, or use an optimizer that steps each parameter by "
            "itself")  # fmt: skip
    return found is Coupling.TENSOR and any(getattr(layout, axis) > 1 for axis in SHARDING_AXES)


@dataclass(frozen=True)
class _Trial:
    """Steps of `make`'s optimizer from `starts`, with as many gradients for each step."""

    make: Make
    starts: Sequence[Tensor]
    gradients: Sequence[Sequence[Tensor]]

    @staticmethod
    def of(make: Make, dims: Collection[int], device: torch.device, dtype: torch.dtype) -> _Trial:
        """Tensors whose numbers differ in size from row to row, and gradients that are now and then large, or small,
        or turn a tensor without making it longer: optimizers look at such things."""
        random = torch.Generator().manual_seed(0)
        tried = [dim for dim in sorted(dims) for _ in range(_ALIKE)]
        starts, *gradients = ([_uneven(dim, random).to(device, dtype) for dim in tried] for _ in range(STEPS + 1))
        for step, each in enumerate(gradients):
            for gradient, start in zip(each, starts):
                gradient *= {1: 30.0, 3: 0.03}.get(step % 5, 1.0)
                if step % 5 == 4:
                    gradient -= (gradient * start).sum() / (start * start).sum() * start
        return _Trial(make, starts, gradients)

    def found(self) -> Coupling:
        """What is coupled."""
        if self._is_known():
            return Coupling.NUMBER
        numbers = range(len(self.starts))
        whole = self._end(_all, numbers)
        if not all(bool(x.isfinite().all()) for x in whole):
            raise ValueError("its numbers do not stay finite")
        if any(self._differs(whole, _all, some) for some in (numbers[::2], numbers[1::2])):
            return Coupling.MODEL
        halves = (partial(_half, dim, of) for dim in range(max(x.dim() for x in whole)) for of in (0, 1))
        return Coupling.TENSOR if any(self._differs(whole, half, numbers) for half in halves) else Coupling.NUMBER

    def _is_known(self) -> bool:
        """Whether it is an elementwise optimizer of torch, as it is."""
        optimizer = self.make([nn.Parameter(start) for start in self.starts])
        hooks: Any = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
        return ELEMENTWISE.get(type(optimizer).__name__) is type(optimizer) and not hooks

    def _end(self, part: Part, which: Sequence[int]) -> list[Tensor]:
        """Where the parts of the tensors `which` come to in an optimizer of their own."""
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
        """Whether an optimizer of these parts alone takes them to other values than one of the `whole` does."""
        for i, end in zip(which, self._end(part, which) if which else ()):
            wanted = part(whole[i])
            way = float((wanted - part(self.starts[i])).abs().max())
            if not torch.allclose(end, wanted, rtol=0.0, atol=_TOLERANCE * way):
                return True
        return False


def _all(x: Tensor) -> Tensor:
    return x


def _half(dim: int, of: int, x: Tensor) -> Tensor:
    return x.tensor_split(2, dim)[of] if x.dim() > dim else x


def _uneven(dim: int, random: torch.Generator) -> Tensor:
    size = (*_SIZES, *[2] * dim)[:dim]
    x = torch.randn(size, generator=random) * torch.randn((), generator=random).exp()
    for axis in range(dim):
        x *= torch.randn([n if i == axis else 1 for i, n in enumerate(size)], generator=random).exp()
    return x
