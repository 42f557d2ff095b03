"""Adasum against its definition."""

from functools import partial

import pytest
import torch

from tests.sync.nets import plain, sgd, train
from unisono.comm import simulate
from unisono.compress import Cast, CompressorMemory, Span
from unisono.sync import AllReduce
from unisono.sync.adasum import adasum, combined
from unisono.sync.pending_mean import PendingMean

SPANS = tuple(Span(f"p{i}", torch.Size([8]), (1,), 8 * i, 8 * i + 8) for i in range(2))


def random(seed: int, numel: int = 16) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_orthogonal_gradients_add_up_and_equal_ones_are_averaged() -> None:
    a, b = torch.zeros(16), torch.zeros(16)
    a[0], b[1] = 3.0, 2.0
    assert torch.equal(combined(a, b, SPANS), a + b)
    x = random(0)
    torch.testing.assert_close(combined(x, x, SPANS), x)
    assert torch.equal(combined(x, torch.zeros(16), SPANS), x)


def test_parameters_are_combined_separately() -> None:
    a, b = random(1), random(2)
    halves = [combined(a[part], b[part], SPANS[:1]) for part in (slice(0, 8), slice(8, 16))]
    torch.testing.assert_close(combined(a, b, SPANS), torch.cat(halves))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_it_is_a_tree_over_the_workers(size: int) -> None:
    def run(comm):
        pending = PendingMean(
            adasum(Cast(), random(comm.rank) / comm.size, SPANS, comm, CompressorMemory(), torch.float32)
        )
        return pending.wait().clone()

    xs = [random(rank) for rank in range(size)]
    while len(xs) > 1:
        xs = [_pair(*xs[i : i + 2]) for i in range(0, len(xs), 2)]
    for got in simulate(size, run):
        torch.testing.assert_close(got, xs[0])


def _pair(a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    if b is None:
        return a
    parts = []
    for x, y in zip(a.split(8), b.split(8)):
        parts.append((1 - x @ y / (2 * x @ x)) * x + (1 - x @ y / (2 * y @ y)) * y)
    return torch.cat(parts)


def test_all_replicas_stay_equal() -> None:
    outcome = simulate(4, partial(train, steps=5), AllReduce(reduce="adasum"), Cast())
    assert len({digest for _, digest, _ in outcome}) == 1
    losses, (expected, _) = outcome[0][0], plain(sgd)
    assert losses[0] == pytest.approx(expected[0], abs=1e-6)
    assert losses[-1] == pytest.approx(expected[-1], abs=0.5)  # the labels are noise: it stays near
