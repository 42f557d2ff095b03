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

from unisono.compress import Compressor, Span

_ALIGN = 16  # elements: a cache line of fp32, so that no two parameters share one


@dataclass(frozen=True)
class Cut:
    """One bucket's plan: spans of parameters of one dtype on one device, which one compressor sends."""

    spans: tuple[Span, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int
    compress: Compressor


def cut(parameters: Mapping[str, nn.Parameter], compress: Compressor, bucket_bytes: int, first_bytes: int) -> list[Cut]:
    """The buckets for `parameters` (name to parameter, in the model's order): at least `bucket_bytes` each, but for
    the first, which takes `first_bytes`, and the last of each kind of tensor and choice of `compress`."""
    kinds: dict[_Kind, list[tuple[str, nn.Parameter]]] = {}
    sizes: dict[_Kind, int] = {}
    cuts: list[Cut] = []
    for name, parameter in reversed(list(parameters.items())):
        kind = compress.choose(name, parameter.shape), parameter.dtype, parameter.device
        group = kinds.setdefault(kind, [])
        group.append((name, parameter))
        sizes[kind] = sizes.get(kind, 0) + parameter.numel() * parameter.element_size()
        if sizes[kind] >= (bucket_bytes if cuts else first_bytes):
            cuts.append(_lay_out(kind, kinds.pop(kind)))
            del sizes[kind]
    return cuts + [_lay_out(kind, group) for kind, group in kinds.items()]


_Kind = tuple[Compressor, torch.dtype, torch.device]


def _lay_out(kind: _Kind, group: Sequence[tuple[str, nn.Parameter]]) -> Cut:
    spans, start = [], 0
    for name, parameter in group:
        # As autograd lays out a gradient: fused optimizers walk parameter and gradient by the same offsets.
        stride = torch.empty_like(parameter, device="meta").stride()
        spans.append(Span(name, parameter.shape, stride, start, start + parameter.numel()))
        start += -(-parameter.numel() // _ALIGN) * _ALIGN
    compress, dtype, device = kind
    return Cut(tuple(spans), dtype, device, start, compress)


def refused(parameter: str, error: ValueError) -> ValueError:
    """What is raised where a compressor refuses a gradient of `parameter` with `error`."""
    return ValueError(f"{parameter}: {error}")


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
