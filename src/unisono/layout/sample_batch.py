"""What a layout may try a model on before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Sample:
    """A small batch, and what the task makes of it.

    Args:
        batch: of real lengths.
        inputs: ``inputs(batch)``, what the model is called with.
        loss: ``loss(output, batch)``.
        weight: ``weight(batch)``; None where each sample counts 1.
    """

    batch: Any
    inputs: Callable[[Any], Any]
    loss: Callable[[Any, Any], Tensor]
    weight: Callable[[Any], float] | None

    @property
    def arguments(self) -> tuple[Any, ...] | Mapping[str, Any]:
        """What the model is called with, by position or by name."""
        given = self.inputs(self.batch)
        return given if isinstance(given, tuple | Mapping) else (given,)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """The model's output for `batch`."""
        given = self.inputs(batch)
        if isinstance(given, tuple):
            return model(*given)
        return model(**given) if isinstance(given, Mapping) else model(given)
