"""Handwritten digits: 1,797 real images of 8 x 8 pixels that are part of scikit-learn."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from unisono.errors import InvalidInput
from unisono.tasks.lr_schedules import Cosine
from unisono.tasks.task import Evaluation, Task

HELD_OUT = 0.2
_SPLIT_SEED = 0


def digits(*, hidden: int = 32) -> Task:
    """A small convolutional network with batch normalisation that classifies handwritten digits.

    Args:
        hidden: the number of channels of the first convolution; the others have twice as many.

    Raises:
        InvalidInput: scikit-learn, which contains the images, is not installed, or `hidden` is below 1.
    """
    if hidden < 1:
        raise InvalidInput("--hidden", hidden, "below 1", "use 1 or more")
    if find_spec("sklearn") is None:
        raise InvalidInput("task", "digits", "its images come with scikit-learn", "pip install 'unisono[digits]'")
    return Task(
        name="digits",
        model=partial(network, hidden),
        data=partial(images, held_out=False),
        loss=_loss,
        optimizer=_optimizer,
        evaluate=Evaluation(partial(images, held_out=True), metrics={"accuracy": _accuracy}),
        schedule=Cosine(warmup=20),
        defaults={"steps": 240, "global_batch": 64, "micro_batch": 16},
    )


def network(hidden: int) -> nn.Module:
    """Three convolutions with batch normalisation: images (N, 1, 8, 8) to logits (N, 10)."""
    wide = 2 * hidden
    return nn.Sequential(
        *_convolution(1, hidden),
        *_convolution(hidden, wide),
        nn.MaxPool2d(2),
        *_convolution(wide, wide),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * wide, 10),
    )


def images(*, held_out: bool) -> TensorDataset:
    """Pixels (N, 1, 8, 8) in 0..1 and labels (N,): the held-out fifth, or the rest; always the same split."""
    from sklearn.datasets import load_digits  # takes a second to import

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    cut = round(HELD_OUT * len(labels))
    chosen = order[:cut] if held_out else order[cut:]
    x = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16
    return TensorDataset(x[chosen], torch.from_numpy(labels).long()[chosen])


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()


def _loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch[1])


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


def _accuracy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output.argmax(1) == batch[1]).float()
