"""What is trained: a frozen value that a user writes, free of devices and of any cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from unisono.batch import Batch
from unisono.errors import InvalidInput
from unisono.schedule import Schedule

Data = Any  # a map-style torch dataset, or a function without arguments that returns one


def first(batch: Batch) -> Any:
    """The default `Task.inputs`: the batch's first element."""
    return batch[0]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default `Task.optimizer`: AdamW, learning rate 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Evaluation:
    """What is measured on held-out data.

    Args:
        data: a map-style dataset, or a function that returns one.
        metrics: name to ``metric(output, batch)``, a mean over the batch or one value per sample. The loss of the
            task is always measured, under the name ``loss``.
        batch: samples per forward pass; part of the run's identity, not of the number of workers.
    """

    data: Data
    metrics: Mapping[str, Callable[[Any, Batch], Tensor | float]] = field(default_factory=dict)
    batch: int = 256


@dataclass(frozen=True)
class Task:
    """A network, its data and its loss. The first three are required.

    Args:
        model: builds the network. Called on every worker under the same random seed.
        data: a map-style dataset (``__len__`` and ``__getitem__``), or a function that returns one.
        loss: ``loss(output, batch)``, the mean over the batch's weight, a scalar.
        inputs: ``inputs(batch)``, what the model is called with: a tuple is passed as positional arguments, a
            mapping as keywords, anything else as the only argument. Default: ``batch[0]``.
        optimizer: builds the optimizer from the parameters. Default: AdamW, learning rate 1e-3.
        weight: ``weight(batch)``, what the batch counts for in the mean over the global batch. Default: its number
            of samples. Give the number of target tokens where the loss is a mean over tokens.
        evaluate: an `Evaluation`, or just its data.
        schedule: ``schedule(step, steps)``, the factor on the learning rate. Default: constant.
        collate: makes a batch of a list of samples. Default: torch's.
        defaults: `Config` fields as this task wants them where the user does not say (``{"steps": 300}``).
        name: what the run is called.
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


def build_dataset(data: Data) -> Any:
    """The dataset itself: `data`, or what it returns if it is a function rather than a dataset.

    Raises:
        InvalidInput: it has no length, or no samples by number.
    """
    builder = isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__"))
    dataset = data() if builder else data
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing or isinstance(dataset, IterableDataset):
        raise InvalidInput("data", type(dataset).__name__, "not a map-style dataset: samples are dealt out by number",
                           "give it __len__ and __getitem__(i)")  # fmt: skip
    return dataset


def with_data(task: Task) -> Task:
    """`task` with its data made, so that it is made once, whoever asks for it."""
    made = {"data": build_dataset(task.data)}
    if task.evaluate is not None:
        given = task.evaluate if isinstance(task.evaluate, Evaluation) else Evaluation(task.evaluate)
        made["evaluate"] = replace(given, data=build_dataset(given.data))
    return replace(task, **made)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """`model` called with what `Task.inputs` returned."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs)
