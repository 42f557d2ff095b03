"""Flat buckets in which gradients are summed and travel.

    bucket 0          bucket 1                       last bucket
    ┌────────┬─────┐  ┌───────────────┬──────────┐   ┌─────┬─────────────┬──────────────┐
    │ head.w │ h.b │  │ block 3 ...   │ ...      │   │ ... │ who is used │ control word │
    └────────┴─────┘  └───────────────┴──────────┘   └─────┴─────────────┴──────────────┘

Parameters lie in the reverse of their order in the model, which is about the order in which backward finishes them.
The first bucket is small, so that the wire gets work early. Every worker computes the same cut from the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_ALIGN = 16  # elements: a cache line of fp32, so that no two parameters share one


@dataclass(frozen=True)
class Span:
    """Where one parameter lies in its bucket."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """One bucket's plan: spans of parameters of one dtype on one device."""

    spans: tuple[Span, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int


def cut(parameters: Mapping[str, nn.Parameter], bucket_bytes: int, first_bytes: int) -> list[Cut]:
    """The buckets for `parameters` (name to parameter, in the model's order): at least `bucket_bytes` each, but for
    the first, which takes `first_bytes`, and the last of each kind of tensor."""
    cuts: list[Cut] = []
    group: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in reversed(list(parameters.items())):
        if group and (parameter.dtype, parameter.device) != (group[0][1].dtype, group[0][1].device):
            cuts.append(_lay_out(group))
            group, size = [], 0
        group.append((name, parameter))
        size += parameter.numel() * parameter.element_size()
        if size >= (bucket_bytes if cuts else first_bytes):
            cuts.append(_lay_out(group))
            group, size = [], 0
    return [*cuts, _lay_out(group)] if group else cuts


def _lay_out(group: Sequence[tuple[str, nn.Parameter]]) -> Cut:
    spans, start = [], 0
    for name, parameter in group:
        # As autograd lays out a gradient: fused optimizers walk parameter and gradient by the same offsets.
        stride = torch.empty_like(parameter, device="meta").stride()
        spans.append(Span(name, parameter.shape, stride, start, start + parameter.numel()))
        start += -(-parameter.numel() // _ALIGN) * _ALIGN
    return Cut(tuple(spans), group[0][1].dtype, group[0][1].device, start)


def views(flat: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    """One view of `flat` per span, in the parameter's shape and memory format."""
    return [flat[span.start : span.stop].as_strided(span.shape, span.stride) for span in spans]


def gaps(plan: Cut) -> list[tuple[int, int]]:
    """Where a bucket holds no parameter: what aligns the next one."""
    ends = [*(span.start for span in plan.spans[1:]), plan.numel]
    return [(span.stop, end) for span, end in zip(plan.spans, ends) if span.stop < end]


def pack(numbers: Sequence[float]) -> Tensor:
    """Numbers as the bytes of their float64 forms, shape ``[8 * len(numbers)]``, uint8.

    A byte is a whole number below 256, which every dtype that gradients travel in holds exactly, and so does its sum
    with the zeros that the other workers say: control words arrive bit for bit through any additive compressor.
    """
    return torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)


def unpack(summed: Tensor) -> list[float]:
    """The numbers of `pack`, from the sum of all workers' packed numbers, of which all but one were zero."""
    numbers: list[float] = summed.to(torch.uint8).contiguous().view(torch.float64).tolist()
    return numbers
