"""A task as a frozen value, independent of devices and of any cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from unisono.errors import InvalidInput
from unisono.tasks.checks import check_callable, check_function, check_optimizer, check_whole, name_of
from unisono.tasks.lr_schedules import Schedule
from unisono.tensors.batch import Batch

Data = Any  # a map-style torch dataset, or a function without arguments that returns one


def first(batch: Batch) -> Any:
    """The default `Task.inputs`: the batch's first element."""
    return batch[0]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default `Task.optimizer`: AdamW, learning rate 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Evaluation:
    """Metrics on held-out data.

    Args:
        data: a map-style dataset, or a function that returns one.
        metrics: for each metric, by name, ``metric(output, batch)``, which returns a mean over the batch or one value
            per sample. The loss of the task is always included, under the name ``loss``.
        batch: the number of samples per forward pass, which does not depend on the number of workers.

    Raises:
        InvalidInput: a metric is named ``loss``, or cannot be called with these arguments; or `batch` is below 1.
    """

    data: Data
    metrics: Mapping[str, Callable[[Any, Batch], Tensor | float]] = field(default_factory=dict)
    batch: int = 256

    def __post_init__(self) -> None:
        check_data("evaluate", self.data)
        check_whole("batch", self.batch, 1)
        if "loss" in self.metrics:
            raise InvalidInput("metrics", "loss", "the task's loss is measured under this name", "give it another name")
        for name, metric in self.metrics.items():
            check_function(name, metric, ("output", "batch"), f'metrics={{"{name}": lambda output, batch: ...}}')


@dataclass(frozen=True)
class Task:
    """A model, its data and its loss; the first three arguments are required.

    Args:
        model: builds the model. It is called on every worker with the same random seed.
        data: a map-style dataset (``__len__`` and ``__getitem__``), or a function that returns one.
        loss: ``loss(output, batch)`` returns a scalar, the mean over what `weight` counts.
        inputs: ``inputs(batch)`` returns the arguments of the model. A tuple is passed as positional arguments, a
            mapping as keywords, anything else as the only argument. Default: ``batch[0]``.
        optimizer: builds the optimizer from the parameters. Default: AdamW, learning rate 1e-3.
        weight: ``weight(batch)`` returns the weight of the batch in the mean over the global batch. Default: its number
            of samples. Give the number of target tokens if the loss is a mean over tokens.
        evaluate: an `Evaluation`, or its data.
        schedule: ``schedule(step, steps)`` returns the factor on the learning rate. Default: constant.
        collate: makes a batch from a list of samples. Default: torch's.
        defaults: `Config` fields for this task, which the user may override (``{"steps": 300}``).
        name: the name of the task, in logs and names of directories.

    Raises:
        InvalidInput: a function cannot be called with the arguments above, or an object was given instead of a
            function that builds it.
    """

    model: Callable[[], nn.Module]
    data: Data
    loss: Callable[[Any, Batch], Tensor]
    inputs: Callable[[Batch], Any] = first
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw
    weight: Callable[[Batch], float] | None = None
    evaluate: Evaluation | Data | None = None
    schedule: Schedule | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    name: str = "task"

    def __post_init__(self) -> None:
        _check_builders(self)
        check_data("data", self.data)
        if not isinstance(self.evaluate, Evaluation):
            check_data("evaluate", self.evaluate)
        check_function("loss", self.loss, ("output", "batch"), _LOSS)
        if self.inputs is first and _compares_tensors(self.loss):
            raise _needs_target(self.loss)
        check_callable("inputs", self.inputs, ("batch",), "inputs=lambda batch: batch[0]")
        if self.weight is not None:
            check_callable("weight", self.weight, ("batch",), "weight=lambda batch: len(batch[0])")
        if self.schedule is not None:
            check_function("schedule", self.schedule, ("step", "steps"), _SCHEDULE)
        if self.collate is not None:
            check_callable("collate", self.collate, ("samples",), "collate=lambda samples: ...")


_OPTIMIZER = "optimizer=lambda parameters: torch.optim.AdamW(parameters)"
_LOSS = "loss=lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1])"
_SCHEDULE = "schedule=Cosine(), or schedule=lambda step, steps: 0.99**step"


def _check_builders(task: Task) -> None:
    """Raise `InvalidInput` unless the task's model and optimizer are functions that build them."""
    _check_unbuilt("model", task.model, nn.Module, "lambda: {}(...)")
    check_callable("model", task.model, (), "model=lambda: Net(...)")
    _check_unbuilt("optimizer", task.optimizer, Optimizer, "lambda parameters: torch.optim.{}(parameters)")
    check_callable("optimizer", task.optimizer, ("parameters",), _OPTIMIZER)
    made = task.optimizer.func if isinstance(task.optimizer, partial) else task.optimizer
    if isinstance(made, type) and issubclass(made, Optimizer):
        check_optimizer(made)


def _check_unbuilt(field: str, value: Any, kind: type, example: str) -> None:
    if isinstance(value, kind):
        name = type(value).__name__
        problem = "already built, and each worker builds its own"
        raise InvalidInput(field, name, problem, f"write {field}={example.format(name)}")


def batch_loss(task: Task) -> Callable[[Any, Batch], Tensor]:
    """The loss of `task`, which raises `InvalidInput` if a loss of torch is called with a batch that is no tensor."""
    loss = task.loss
    if not _compares_tensors(loss):
        return loss

    def checked(output: Any, batch: Batch) -> Tensor:
        if not isinstance(batch, Tensor):
            raise _needs_target(loss)
        return loss(output, batch)

    return checked


def _compares_tensors(loss: Any) -> bool:
    """Whether `loss` is a module or function of torch, which compares two tensors."""
    return isinstance(loss, nn.modules.loss._Loss) or getattr(loss, "__module__", "") == "torch.nn.functional"


def _needs_target(loss: Any) -> InvalidInput:
    name = name_of(loss)
    called = f"torch.nn.{name}()" if isinstance(loss, nn.Module) else f"torch.nn.functional.{name}"
    return InvalidInput("loss", name, "it is called with (output, batch), and a batch has inputs and targets",
                        f"write loss=lambda output, batch: {called}(output, batch[1])")  # fmt: skip


def build_dataset(data: Data) -> Any:
    """The dataset: `data`, or its return value if it is a function.

    Raises:
        InvalidInput: the dataset is not a map-style dataset.
    """
    check_data("data", data)
    dataset = data() if _builds(data) else data
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing or isinstance(dataset, IterableDataset):
        raise InvalidInput("data", type(dataset).__name__, "not a map-style dataset: samples are read by index",
                           "give it __len__ and __getitem__(i)")  # fmt: skip
    return dataset


def check_data(field: str, data: Data) -> None:
    """Raise `InvalidInput` if `data` is a function with required arguments, without calling it."""
    if _builds(data):
        check_callable(field, data, (), f"{field}=lambda: ...")


def _builds(data: Data) -> bool:
    """Whether `data` is a function that returns the dataset."""
    return isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__"))


def with_data(task: Task) -> Task:
    """`task` with its datasets built, so that they are built only once."""
    made = {"data": build_dataset(task.data)}
    if task.evaluate is not None:
        given = task.evaluate if isinstance(task.evaluate, Evaluation) else Evaluation(task.evaluate)
        made["evaluate"] = replace(given, data=build_dataset(given.data))
    return replace(task, **made)


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call `model` with the result of `Task.inputs`."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs)
