"""The environments of a training loop: plain torch, our world, DistributedDataParallel.

All of them see the same global batches, in the order of `MicroBatchPlan`. A share is what one worker has of a batch; in
the data of `World.steps` it is a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from unisono import World
from unisono.data import MicroBatchPlan

GLOBAL_BATCH, MICRO_BATCH = 12, 2
MICRO_BATCHES = GLOBAL_BATCH // MICRO_BATCH

Batch = Iterable[Sequence[Tensor]]
"""The micro-batches of one step that a worker computes. Each may be read several times."""


class Environment:
    """Where a training loop runs. This one is plain torch: one process that computes whole global batches.

    Args:
        shares: into how many shares a batch is cut where the loss is no mean over samples.

    Attributes:
        rank, size: of this worker, and of the group.
    """

    rank, size = 0, 1

    def __init__(self, shares: int = 1) -> None:
        self._shares = shares

    def bind(self, *things: Any) -> tuple[Any, ...]:
        """Models and optimizers as the loop uses them, in the same order."""
        return things

    def batches(self, data: TensorDataset, steps: int, keep: Sequence[int] = ()) -> Iterator[Batch]:
        """The batches of all steps; of step *t* only the first ``keep[t]`` samples, where `keep` is given."""
        for step in range(steps):
            chosen = global_indices(len(data), step)[: keep[step] if keep else None]
            yield RepeatedBatch([[self.mine(column[chosen]) for column in data.tensors]])

    def mine(self, whole: Tensor) -> Tensor:
        """This worker's slice of `whole`, along its first dimension."""
        return whole

    def shares(self, *tensors: Tensor) -> list[tuple[int, tuple[Tensor, ...]]]:
        """The shares of a batch that this worker computes, with the number of each."""
        return list(enumerate(zip(*(each.chunk(self._shares) for each in tensors), strict=True)))

    def share_mean(self, loss_of: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """The mean of ``loss_of(number, *share)`` over the shares of a batch."""
        losses = [loss_of(number, *share) for number, share in self.shares(*tensors)]
        return torch.stack(losses).mean()

    def skip(self, batch: Batch) -> None:
        """The loop takes no step with this batch."""

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients are accumulated on this worker alone."""
        return nullcontext()

    def mean(self, value: float) -> float:
        """The mean of `value` over all workers."""
        return value


class RepeatedBatch:
    """Micro-batches that may be read several times, with tensors of its own each time."""

    def __init__(self, micro_batches: Sequence[Sequence[Tensor]]) -> None:
        self._micro_batches = micro_batches

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        for micro_batch in self._micro_batches:
            yield [column.clone() for column in micro_batch]


def global_indices(samples: int, step: int) -> Tensor:
    """The samples of the global batch of `step`, in the order of `World.steps`."""
    plan = MicroBatchPlan(samples, GLOBAL_BATCH, MICRO_BATCH, 0)
    return torch.cat([torch.from_numpy(plan.indices(step, m)) for m in range(plan.micro_batches)])


class MicroBatches(Environment):
    """Plain torch in one process that accumulates the mean gradient over micro-batches.

    It is the meaning of `World.steps` in its simplest form. Each micro-batch of a pass starts from the same buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._models = nn.ModuleList()

    def bind(self, *things: Any) -> tuple[Any, ...]:
        self._models.extend(thing for thing in things if isinstance(thing, nn.Module))
        optimizers = (thing for thing in things if isinstance(thing, Optimizer))
        self._models.extend(nn.ParameterList(g["params"]) for o in optimizers for g in o.param_groups)
        return things

    def batches(self, data: TensorDataset, steps: int, keep: Sequence[int] = ()) -> Iterator[Batch]:
        for step in range(steps):
            chosen = global_indices(len(data), step).split(MICRO_BATCH)
            yield _MeanOfPasses([[column[part] for column in data.tensors] for part in chosen], self._models)


class _MeanOfPasses(RepeatedBatch):
    """Micro-batches after whose last one gradients have grown by the mean, and not by the sum."""

    def __init__(self, micro_batches: Sequence[Sequence[Tensor]], models: nn.ModuleList) -> None:
        super().__init__(micro_batches)
        self._models = models

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        parameters = list(self._models.parameters())
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        buffers = [(buffer, buffer.clone()) for buffer in self._models.buffers()]
        for micro_batch in super().__iter__():
            for buffer, first in buffers:
                buffer.copy_(first)
            yield micro_batch
        for parameter, start in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                added = parameter.grad if start is None else parameter.grad - start
                mean = added / len(self._micro_batches)
                parameter.grad = (mean if start is None else start + mean).to(parameter.dtype)


class OwnSlices(Environment):
    """One of several workers, each with its slice of every global batch. Here they exchange nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def mine(self, whole: Tensor) -> Tensor:
        assert len(whole) % self.size == 0, "slices are equal"
        return whole.chunk(self.size)[self.rank]

    def shares(self, *tensors: Tensor) -> list[tuple[int, tuple[Tensor, ...]]]:
        return [(self.rank, tensors)]


class OwnData(OwnSlices):
    """A world whose workers read their own data."""

    def __init__(self, world: World) -> None:
        super().__init__(world.rank, world.size)
        self._world = world

    def bind(self, *things: Any) -> tuple[Any, ...]:
        return _bound(self._world, things)

    def no_sync(self) -> AbstractContextManager[None]:
        return cast(Any, self._world).no_sync()  # type: ignore[no-any-return]

    def mean(self, value: float) -> float:
        return self._world.mean(value)


class AssignedData(OwnData):
    """A world whose `steps` gives the data."""

    def batches(self, data: TensorDataset, steps: int, keep: Sequence[int] = ()) -> Iterator[Batch]:
        assert not keep, "a step of world.steps is one whole global batch"
        yield from self._world.steps(data, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=steps)

    def mine(self, whole: Tensor) -> Tensor:
        raise AssertionError("world.steps gives the data")

    def skip(self, batch: Batch) -> None:
        cast(Any, batch).skip()


def _bound(world: World, things: Sequence[Any]) -> tuple[Any, ...]:
    found = cast(Any, world.bind)(*things)
    return found if isinstance(found, tuple) else (found,)


class WrappedModel(DistributedDataParallel):
    """Has the attributes and the state of the model that it wraps, as many training scripts have it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def __getitem__(self, place: Any) -> Any:
        return self.module[place]  # type: ignore[index]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


class DataParallel(OwnSlices):
    """torch's DistributedDataParallel on the default process group."""

    def __init__(self, rank: int, size: int, find_unused: bool) -> None:
        super().__init__(rank, size)
        self._find_unused = find_unused
        self._models: list[WrappedModel] = []

    def bind(self, *things: Any) -> tuple[Any, ...]:
        return tuple(self._wrapped(thing) if isinstance(thing, nn.Module) else thing for thing in things)

    def _wrapped(self, model: nn.Module) -> nn.Module:
        if isinstance(model, WrappedModel) or not any(p.requires_grad for p in model.parameters()):
            return model
        self._models.append(WrappedModel(model, find_unused_parameters=self._find_unused))
        return self._models[-1]

    def no_sync(self) -> AbstractContextManager[None]:
        stack = ExitStack()
        for model in self._models:
            stack.enter_context(model.no_sync())
        return cast(AbstractContextManager[None], stack)

    def mean(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        all_reduce(total)
        return float(total) / self.size


def bare(model: nn.Module) -> nn.Module:
    """The model as the loop built it."""
    return model.module if isinstance(model, DistributedDataParallel) else model
