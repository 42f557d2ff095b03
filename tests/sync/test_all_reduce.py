"""All-reduce beyond the laws: buckets, order, control words, special parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.replicas import replica_of
from tests.sync.nets import plain, sgd, train
from unisono.bad_steps import NOT_REPRESENTABLE
from unisono.comm import simulate
from unisono.compress import Cast, Exact
from unisono.errors import UnisonoError
from unisono.sync import AllReduce, Loop
from unisono.sync.buckets import gaps, pack, plan_buckets, unpack

SMALL = AllReduce(bucket_bytes=600, first_bytes=100)


def parameters(*sizes: int) -> dict[str, nn.Parameter]:
    return {f"p{i}": nn.Parameter(torch.zeros(n)) for i, n in enumerate(sizes)}


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(1, 2000), st.integers(1, 500))
def test_every_parameter_has_its_own_place_in_reverse_order(sizes, bucket_bytes, first_bytes) -> None:
    given = parameters(*sizes)
    plans = plan_buckets(given, Cast(), bucket_bytes, first_bytes)
    assert [s.name for c in plans for s in c.spans] == list(reversed(given))
    for c in plans:
        covered = [i for s in c.spans for i in range(s.start, s.stop)] + [i for a, b in gaps(c) for i in range(a, b)]
        assert sorted(covered) == list(range(c.numel))
        assert all(s.start % 16 == 0 for s in c.spans)


def test_buckets_hold_one_dtype_each() -> None:
    mixed = parameters(4, 4, 4)
    mixed["p1"] = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    assert [c.dtype for c in plan_buckets(mixed, Cast(), 10**6, 10**6)] == [torch.float32, torch.float64]


@given(st.lists(st.floats(allow_nan=False), max_size=20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64])
def test_control_words_survive_any_additive_dtype(dtype, numbers) -> None:
    zeros = torch.zeros(8 * len(numbers), dtype=dtype)
    assert unpack(pack(numbers).to(dtype) + zeros + zeros) == numbers


def test_a_nan_in_a_control_word_stays_a_nan() -> None:
    assert torch.isnan(torch.tensor(unpack(pack([float("nan")]).bfloat16())[0]))


@pytest.mark.parametrize("compress", [Cast(), Cast("bf16"), Exact()])
def test_control_words_of_all_workers_are_summed(compress) -> None:
    def run(comm):
        p = parameters(40)
        bound = SMALL.bind(p, comm, compress, Loop(sgd(p.values()), control=3))
        bound.close([comm.rank + 0.1 if i == comm.rank else 0.0 for i in range(3)])
        bound.offer("p0", torch.ones(40), 1.0)
        return bound.settle().control

    assert simulate(3, run) == [[0.1, 1.1, 2.1]] * 3


def test_buckets_are_launched_while_backward_runs_and_in_order() -> None:
    starts: list[int] = []

    def run(comm):
        class Watched:
            def __getattr__(self, name):
                return getattr(comm, name)

            def sum(self, x, dtype=None):
                starts.append(x.numel())
                return comm.sum(x, dtype)

        given = parameters(100, 200, 300, 400)
        bound = AllReduce(bucket_bytes=1, first_bytes=1).bind(given, Watched(), Cast(), Loop(sgd(given.values())))
        bound.close([])
        for name in ("p2", "p3"):  # the second bucket fills first, and has to wait for the first
            before = len(starts)
            bound.offer(name, torch.ones(given[name].shape), 1.0)
            assert len(starts) - before == (0 if name == "p2" else 2)
        bound.offer("p1", torch.ones(200), 1.0)
        bound.offer("p0", torch.ones(100), 1.0)
        bound.settle()
        return starts[:3]

    assert simulate(1, run) == [[400, 304, 208]]


class Branches(nn.Module):
    """A branch is chosen by the input, and the other one gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return (self.left if x[0, 0] < 0 else self.right)(x)


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("reference", [4.0, 3.0])  # one by one as well, where 1 / reference is no power of two
def test_a_gradient_that_is_refused_is_named_with_its_micro_batch(bad, reference, caplog) -> None:
    """The branches alternate, so that no micro-batch has the gradients of a whole bucket."""

    def run(comm):
        torch.manual_seed(0)
        model = Branches()
        replica = replica_of(model, sgd(model.parameters()), comm, sync=AllReduce(), compress=Exact(),
                          micro_batches=4, reference_weight=reference, may_drop=True)  # fmt: skip
        for m in range(4):
            replica.begin_micro_batch(m, 1.0)
            out = model(torch.full((1, 3), 1e9 if m == bad else 1.0) * (-1) ** m)
            replica.end_forward(1.0, last=m == 3)
            replica.backward(out.sum())
        return replica.settle().losses

    [losses] = simulate(1, run)
    assert [loss == NOT_REPRESENTABLE for loss in losses] == [m == bad for m in range(4)]
    branch = "left" if bad % 2 else "right"
    assert [r.getMessage() for r in caplog.records if f"micro-batch {bad}, {branch}.weight: " in r.getMessage()]


def test_a_gradient_after_its_exchange_is_refused_with_the_cure() -> None:
    def run(comm):
        ps = parameters(3, 3)
        bound = AllReduce(bucket_bytes=1, first_bytes=1).bind(ps, comm, Cast(), Loop(sgd(ps.values())))
        bound.close([])
        bound.offer("p1", torch.ones(3), 1.0)
        with pytest.raises(UnisonoError, match=r"p1 was computed again .* overlap=False"):
            bound.offer("p1", torch.ones(3), 1.0)
        return True

    assert simulate(1, run) == [True]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("sync", [AllReduce(), SMALL])
def test_sparse_embeddings(size, sync) -> None:
    def sparse_adam(ps):
        ps = list(ps)
        return torch.optim.SGD(ps, 0.1)

    expected, model = plain(sparse_adam, sparse=True)
    kinds = []

    def run(comm):
        def look(model, step) -> None:
            plain_step = step._replica.optimizer.step

            def spy():
                kinds.append(model.embed.weight.grad.is_sparse)
                return plain_step()

            step._replica.optimizer.step = spy

        return train(comm, sync, Cast(), sparse_adam, sparse=True, steps=5, on_step=look)

    for losses, _, trained in simulate(size, run):
        assert losses == pytest.approx(expected, abs=2e-6)
        torch.testing.assert_close(trained.embed.weight, model.embed.weight, rtol=1e-5, atol=1e-6)
    assert kinds
    assert all(kinds)


def test_weights_of_micro_batches_give_the_exact_mean_over_tokens() -> None:
    """Micro-batches that count 1, 2, 3 and 10: the step is that of the weighted mean, clipped or not."""
    weights, gradients = (
        [1.0, 2.0, 3.0, 10.0],
        [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(4)],
    )
    mean = sum(w * g for w, g in zip(weights, gradients)) / sum(weights)

    def run(comm, clip):
        model = nn.Linear(5, 1, bias=False)
        nn.init.zeros_(model.weight)
        replica = replica_of(model, torch.optim.SGD(model.parameters(), 1.0), comm, sync=AllReduce(), compress=Exact(),
                          micro_batches=4, reference_weight=7.0, clip=clip)  # fmt: skip
        mine = range(comm.rank, 4, comm.size)
        for m in mine:
            replica.begin_micro_batch(m, weights[m])
            loss = model(gradients[m]).sum()
            replica.end_forward(float(m), last=m == mine[-1])
            replica.backward(loss)
        step = replica.settle()
        step.apply()
        return step.loss, -model.weight.detach()[0]

    for clip in (None, 0.1):
        expected = mean if clip is None else mean * clip / (mean.norm() + 1e-6)
        for size in (1, 2, 4):
            for loss, moved in simulate(size, run, clip):
                assert loss == pytest.approx((2 + 2 * 3 + 3 * 10) / 16)
                torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-7)
