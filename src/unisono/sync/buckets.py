"""Flat buckets in which gradients are summed and sent.

    bucket 0          bucket 1                       last bucket
    ┌────────┬─────┐  ┌───────────────┬──────────┐   ┌─────┬────────────┬──────────────┐
    │ head.w │ h.b │  │ block 3 ...   │ ...      │   │ ... │ used flags │ control word │
    └────────┴─────┘  └───────────────┴──────────┘   └─────┴────────────┴──────────────┘

Parameters are in the reverse of their order in the model, which is about the order in which backward computes their
gradients. The first bucket is small, so that communication starts early. Every worker computes the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.compress import Compressor, Span

_ALIGN = 16  # elements: a cache line of fp32, so that no two parameters share one


@dataclass(frozen=True)
class BucketPlan:
    """The plan of one bucket: spans of parameters of one dtype, device and compressor."""

    spans: tuple[Span, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int
    compress: Compressor


def plan_buckets(
    parameters: Mapping[str, nn.Parameter], compress: Compressor, bucket_bytes: int, first_bytes: int
) -> list[BucketPlan]:
    """The plans of the buckets for `parameters` (name to parameter, in the model's order).

    A bucket has at least `bucket_bytes`, the first one at least `first_bytes`. The last bucket of each compressor,
    dtype and device may be smaller.
    """
    kinds: dict[_Kind, list[tuple[str, nn.Parameter]]] = {}
    sizes: dict[_Kind, int] = {}
    plans: list[BucketPlan] = []
    for name, parameter in reversed(list(parameters.items())):
        kind = compress.choose(name, parameter.shape), parameter.dtype, parameter.device
        group = kinds.setdefault(kind, [])
        group.append((name, parameter))
        sizes[kind] = sizes.get(kind, 0) + parameter.numel() * parameter.element_size()
        if sizes[kind] >= (bucket_bytes if plans else first_bytes):
            plans.append(_lay_out(kind, kinds.pop(kind)))
            del sizes[kind]
    return plans + [_lay_out(kind, group) for kind, group in kinds.items()]


_Kind = tuple[Compressor, torch.dtype, torch.device]


def _lay_out(kind: _Kind, group: Sequence[tuple[str, nn.Parameter]]) -> BucketPlan:
    spans, start = [], 0
    for name, parameter in group:
        # The strides of autograd's gradients: fused optimizers index parameter and gradient by the same offsets.
        stride = torch.empty_like(parameter, device="meta").stride()
        spans.append(Span(name, parameter.shape, stride, start, start + parameter.numel()))
        start += -(-parameter.numel() // _ALIGN) * _ALIGN
    compress, dtype, device = kind
    return BucketPlan(tuple(spans), dtype, device, start, compress)


def refused(parameter: str, error: ValueError) -> ValueError:
    """The error of a compressor that refuses a gradient, with the name of its `parameter`."""
    return ValueError(f"{parameter}: {error}")


def gaps(plan: BucketPlan) -> list[tuple[int, int]]:
    """The ranges of a bucket that are padding, by which its parameters are aligned."""
    ends = [*(span.start for span in plan.spans[1:]), plan.numel]
    return [(span.stop, end) for span, end in zip(plan.spans, ends) if span.stop < end]


def pack(numbers: Sequence[float]) -> Tensor:
    """The bytes of `numbers` as float64, shape ``[8 * len(numbers)]``, uint8.

    Every dtype of messages represents whole numbers below 256 exactly, and also their sums with the zeros of other
    workers. So control words are exact with any additive compressor.
    """
    return torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)


def unpack(summed: Tensor) -> list[float]:
    """The inverse of `pack`, for a sum over workers in which at most one worker's number is not zero."""
    numbers: list[float] = summed.to(torch.uint8).contiguous().view(torch.float64).tolist()
    return numbers
