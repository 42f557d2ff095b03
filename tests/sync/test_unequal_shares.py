"""Replicas with unequal work: the weight of a sample does not depend on the rank that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.support.replicas import replica_of
from unisono import notation
from unisono.comm import Communicator, simulate
from unisono.compress import Cast, Compressor, Exact, Quantize, TopK
from unisono.data import assign
from unisono.sync import AllReduce, Average, BlockMomentum, DiLoCo, LocalSGD, Synchronizer

STEPS, LR = 6, 0.3
EACH_STEP: list[Synchronizer] = [LocalSGD(1), BlockMomentum(1, momentum=0.0), DiLoCo(1, outer=Average())]


def samples_of(m: int) -> int:
    """Micro-batches are of different lengths."""
    return 1 + m % 3


def micro_batch(t: int, m: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * t + m)
    x = torch.randn(samples_of(m), 3, generator=random, dtype=torch.float64)
    return x, torch.sin(x.sum(1, keepdim=True) + m)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class Run:
    """One worker's part of a run; the shares are ranges of the micro-batches of each step."""

    def __init__(
        self,
        comm: Communicator,
        sync: Synchronizer,
        shares: Sequence[range],
        compress: Compressor = Cast(),
        momentum: float = 0.0,
    ) -> None:
        self.rank, self.mine, count = comm.rank, shares[comm.rank], shares[-1].stop
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), LR, momentum=momentum)
        self.reference = float(sum(map(samples_of, range(count))))
        self.replica = replica_of(self.model, self.optimizer, comm, sync=sync, compress=compress, micro_batches=count,
                               reference_weight=self.reference)  # fmt: skip

    def step(self, t: int) -> Tensor:
        for m in self.mine:
            x, y = micro_batch(t, m)
            self.replica.begin_micro_batch(m, len(x))
            loss = mse_loss(self.model(x), y)
            self.replica.end_forward(float(loss.detach()), last=m == self.mine[-1])
            self.replica.backward(loss)
        self.replica.settle().apply()
        return weights(self.model)


def with_constant_gradients(run: Run) -> Run:
    """Replace the mean gradient of each replica by its rank + 1, independent of the weights."""
    own = sum(map(samples_of, run.mine))
    each = (1 + run.rank) * own / run.reference / len(run.mine)
    for p in run.model.parameters():
        p.register_hook(lambda g: torch.full_like(g, each))
    return run


def ranges(*counts: int) -> list[range]:
    return [range(first, until) for first, until in pairwise(accumulate(counts, initial=0))]


def run(comm: Communicator, *args, synchronizations: Sequence[int] = (), **options) -> list[Tensor]:
    """The weights after each step."""
    mine, path = Run(comm, *args, **options), []
    for t in range(STEPS):
        path.append(mine.step(t))
        if t in synchronizations:
            mine.replica.synchronize()
    return path


def whole(count: int, **options) -> list[Tensor]:
    """The result of one worker with the mean gradient over all samples."""
    (path,) = simulate(1, partial(run, **options), AllReduce(), ranges(count))
    return path


def close(paths: Sequence[Sequence[Tensor]], expected: Sequence[Tensor], atol: float = 1e-12) -> None:
    for path in paths:
        torch.testing.assert_close(list(path), list(expected), rtol=0, atol=atol)


@pytest.mark.parametrize("sync", EACH_STEP, ids=notation.show)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [4, 5, 7])
def test_an_average_after_each_plain_step_is_all_reduce(sync, size, count) -> None:
    close(simulate(size, run, sync, assign(count, [1.0] * size)), whole(count))


@pytest.mark.parametrize("counts", [(1, 6), (6, 1), (1, 2, 4), (3, 3, 1)])
def test_an_average_after_each_plain_step_is_all_reduce_for_any_shares(counts) -> None:
    close(simulate(len(counts), run, LocalSGD(1), ranges(*counts)), whole(7))


def test_exact_sums_count_samples_too() -> None:
    """Up to rounding."""
    close(simulate(3, partial(run, compress=Exact()), LocalSGD(1), ranges(1, 2, 4)), whole(7), atol=1e-6)


@pytest.mark.parametrize("every", [2, 3])
def test_local_updates_are_weighted_by_samples(every) -> None:
    """McMahan et al. 2017, algorithm 1: the sum of n_k / n times the weights of k."""
    counts = (1, 2, 4)
    shares, total = ranges(*counts), sum(map(samples_of, range(7)))
    portions = [sum(map(samples_of, share)) / total for share in shares]
    models = [net() for _ in counts]
    for t in range(STEPS):
        for model, share in zip(models, shares):
            parts = [micro_batch(t, m) for m in share]
            losses = [mse_loss(model(x), y, reduction="sum") for x, y in parts]
            gradients = torch.autograd.grad(sum(losses) / sum(len(x) for x, _ in parts), list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients):
                    p -= LR * g
        if (t + 1) % every == 0:
            with torch.no_grad():
                for group in zip(*(model.parameters() for model in models)):
                    mean = sum(portion * p for portion, p in zip(portions, group))
                    for p in group:
                        p.copy_(mean)
    found = simulate(3, run, LocalSGD(every), shares)
    for path, model in zip(found, models):
        close([path[-1:]], [weights(model)])


@pytest.mark.parametrize("sync", [LocalSGD(4), DiLoCo(4, outer=Average(), fragments=2)], ids=notation.show)
@pytest.mark.parametrize("synchronizations", [(0,), (1, 2), (3,), (4,)])
def test_a_synchronization_within_a_round_preserves_the_mean(sync, synchronizations) -> None:
    """With constant gradients, so that local updates do not depend on the weights."""
    shares = ranges(1, 2, 4)

    def last_anchor(comm: Communicator, synchronizations: Sequence[int]) -> Tensor:
        mine = with_constant_gradients(Run(comm, sync, shares))
        for t in range(STEPS):
            mine.step(t)
            if t in synchronizations:
                mine.replica.synchronize()
        mine.replica.synchronize()
        return weights(mine.model)

    for found, expected in zip(simulate(3, last_anchor, synchronizations), simulate(3, last_anchor, ())):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_optimizer_states_are_averaged_by_samples() -> None:
    expected = whole(7, momentum=0.9)
    synchronizing = partial(run, momentum=0.9, synchronizations=range(STEPS))
    close(simulate(3, synchronizing, LocalSGD(1), ranges(1, 2, 4)), expected)


@pytest.mark.short(2)
@pytest.mark.parametrize("compress", [Cast(), TopK(0.5), Quantize(4)], ids=notation.show)
@pytest.mark.parametrize("fragments", [1, 2])
def test_compressed_local_updates_are_weighted_by_samples_in_the_limit(compress, fragments) -> None:
    """By error feedback, what a message leaves out is sent later."""
    shares, steps = ranges(1, 2, 4), 120

    def end(comm: Communicator) -> Tensor:
        mine = with_constant_gradients(Run(comm, DiLoCo(3, outer=Average(), fragments=fragments), shares, compress))
        for t in range(steps):
            mine.step(t % STEPS)
        mine.replica.synchronize()
        return weights(mine.model)

    samples = [sum(map(samples_of, share)) for share in shares]
    gradient = sum((1 + rank) * n for rank, n in enumerate(samples)) / sum(samples)
    for found in simulate(3, end):
        slope = (weights(net()) - found) / (LR * steps)
        torch.testing.assert_close(slope, torch.full_like(slope, gradient), rtol=0.05, atol=0)
