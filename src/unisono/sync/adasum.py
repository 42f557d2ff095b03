"""Adasum: adds orthogonal components of gradients, and averages parallel ones.

Maleki et al. 2021, "Scaling Distributed Training with Adaptive Summation", eq. 3 (operator) and section 3.4 (a tree
over the workers, for each parameter):

    Adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

The result is the sum of two orthogonal gradients, and the mean of two equal ones. So the step of a large global batch
is about as long as sequential steps of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.compress import CollectiveVerbs, Compressor, CompressorMemory, Mean, Span


def adasum(
    compress: Compressor,
    total: Tensor,
    spans: Sequence[Span],
    comm: CollectiveVerbs,
    memory: CompressorMemory,
    dtype: torch.dtype,
) -> Mean:
    """Collective, in place of `Compressor.mean`: combine the gradients of all ranks of `comm` by Adasum.

    Every rank gathers the compressed totals of all n ranks, and combines them pairwise in the same tree. Each rank
    receives ``n - 1`` messages. Each decoded total is multiplied by n, as if each rank had an equal share of the global
    batch. Adasum does not weight ranks by samples: a rank with half the samples of another contributes a gradient that
    is half as long.
    """
    rows = yield comm.gather(compress.encode_with_feedback(total, spans, memory))
    totals = [compress.decode(row, spans, total.numel(), dtype) for row in rows]
    gradients = [compress.value(each, dtype) * comm.size for each in totals]
    while len(gradients) > 1:
        pairs = zip(gradients[0::2], gradients[1::2])
        odd = gradients[-1:] if len(gradients) % 2 else []
        gradients = [combined(a, b, spans) for a, b in pairs] + odd
    return gradients[0]


def combined(a: Tensor, b: Tensor, spans: Sequence[Span]) -> Tensor:
    """Combine two flat gradients by Adasum, separately in each span; elements between spans are 0."""
    result = torch.zeros_like(a)
    for span in spans:
        x, y = a[span.start : span.stop], b[span.start : span.stop]
        dot, xx, yy = (float(torch.dot(p.double(), q.double())) for p, q in ((x, y), (x, x), (y, y)))
        result[span.start : span.stop] = x * (1 - dot / (2 * xx) if xx else 1.0) + y * (
            1 - dot / (2 * yy) if yy else 1.0
        )
    return result
