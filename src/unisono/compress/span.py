"""The ranges of parameters in a flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """The range of one parameter: ``flat[start:stop]``, in the parameter's shape and memory format."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    stop: int


def views(flat: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    """One view of `flat` per span, in the parameter's shape and memory format."""
    return [flat[span.start : span.stop].as_strided(span.shape, span.stride) for span in spans]
