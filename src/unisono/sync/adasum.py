"""Add gradients as far as they differ, average them as far as they agree.

Maleki et al. 2021, "Scaling Distributed Training with Adaptive Summation", eq. 3 (operator) and section 3.4 (a tree
over the workers, parameter by parameter):

    Adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

Two orthogonal gradients add up, two equal ones give their mean, so that a large global batch steps about as far as its
parts would one after the other.
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
    """In place of `Compressor.mean`: everybody gathers everybody's message and folds the same tree, so it costs
    ``n - 1`` messages per worker.

    The operator is symmetric and knows no weights. Each worker's total is taken for the gradient of ``1 / n`` of the
    global batch, so that a worker with half as many samples as another hands in a gradient half as long.
    """
    rows = yield comm.gather(compress.owe(total, spans, memory))
    totals = [compress.decode(row, spans, total.numel(), dtype) for row in rows]
    gradients = [compress.value(each, dtype) * comm.size for each in totals]
    while len(gradients) > 1:
        pairs = zip(gradients[0::2], gradients[1::2])
        odd = gradients[-1:] if len(gradients) % 2 else []
        gradients = [combined(a, b, spans) for a, b in pairs] + odd
    return gradients[0]


def combined(a: Tensor, b: Tensor, spans: Sequence[Span]) -> Tensor:
    """Adasum of two flat gradients, for each span by itself; between spans, 0."""
    result = torch.zeros_like(a)
    for span in spans:
        x, y = a[span.start : span.stop], b[span.start : span.stop]
        dot, xx, yy = (float(torch.dot(p.double(), q.double())) for p, q in ((x, y), (x, x), (y, y)))
        result[span.start : span.stop] = x * (1 - dot / (2 * xx) if xx else 1.0) + y * (
            1 - dot / (2 * yy) if yy else 1.0
        )
    return result
