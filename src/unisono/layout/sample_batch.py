"""The batch on which a layout may try a model before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Sample:
    """A small batch, and how the task uses it.

    Args:
        batch: the batch, with sequence lengths of the training data.
        inputs: ``inputs(batch)`` returns the arguments of the model.
        loss: ``loss(output, batch)`` returns the loss, a scalar.
        weight: ``weight(batch)`` returns the batch's weight in a mean. None: the number of its samples.
    """

    batch: Any
    inputs: Callable[[Any], Any]
    loss: Callable[[Any, Any], Tensor]
    weight: Callable[[Any], float] | None

    @property
    def arguments(self) -> tuple[Any, ...] | Mapping[str, Any]:
        """The arguments of the model, by position or by name."""
        given = self.inputs(self.batch)
        return given if isinstance(given, tuple | Mapping) else (given,)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """The model's output for `batch`."""
        given = self.inputs(batch)
        if isinstance(given, tuple):
            return model(*given)
        return model(**given) if isinstance(given, Mapping) else model(given)
