"""Top-k, random-k and their index coding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.comm import simulate
from unisono.compress import Cast, Compressor, CompressorMemory, RandomK, TopK, bits, top_k
from unisono.compress import index_coding as indices
from unisono.compress.memory import RESIDUAL
from unisono.compress.top_k import count, largest
from unisono.sync.pending_mean import PendingMean


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def steps(comm, compress: Compressor, gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The mean of each step's gradients, ``gradients[step][rank]``, with one memory."""
    memory, means = CompressorMemory(), []
    for step in gradients:
        total = step[comm.rank] / comm.size
        means.append(PendingMean(compress.mean(total, (), comm, memory, torch.float32)).wait().clone())
        memory.commit()
    return means


def sent(comm, compress: Compressor, x: torch.Tensor, times: int) -> int:
    memory = CompressorMemory()
    before = comm.bytes_sent
    for _ in range(times):
        PendingMean(compress.mean(x.clone(), (), comm, memory, torch.float32)).wait()
        memory.commit()
    return comm.bytes_sent - before


@st.composite
def subsets(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    n = draw(st.integers(0, 1 << 20))
    chosen = draw(st.sets(st.integers(0, n - 1), max_size=300)) if n else set()
    return torch.tensor(sorted(chosen), dtype=torch.int64), n


@given(subsets())
@settings(max_examples=300)
def test_packed_indices_come_back(subset) -> None:
    chosen, n = subset
    packed = indices.pack(chosen, n)
    assert packed.dtype == torch.uint8
    assert packed.shape == (indices.packed_bytes(chosen.numel(), n),)
    kept = packed.clone()
    assert torch.equal(indices.unpack(packed, chosen.numel(), n), chosen)
    assert torch.equal(packed, kept)


@given(st.data())
@settings(max_examples=500)
def test_any_bytes_are_either_growing_indices_or_refused(data) -> None:
    n = data.draw(st.integers(1, 5000))
    k = data.draw(st.integers(0, min(n, 60)))
    length = indices.packed_bytes(k, n)
    packed = torch.tensor(list(data.draw(st.binary(min_size=length, max_size=length))), dtype=torch.uint8)
    try:
        back = indices.unpack(packed, k, n)
    except ValueError:
        return
    assert back.shape == (k,)
    assert bool((back.diff() > 0).all())
    assert not k or (int(back[0]) >= 0 and int(back[-1]) < n)
    assert torch.equal(indices.pack(back, n), packed)


@given(subsets(), st.data())
@settings(max_examples=200)
def test_a_flipped_bit_of_the_indices_is_other_indices_or_refused(subset, data) -> None:
    chosen, n = subset
    packed = indices.pack(chosen, n)
    if not packed.numel():
        return
    packed[data.draw(st.integers(0, packed.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        back = indices.unpack(packed, chosen.numel(), n)
    except ValueError:
        return
    assert not torch.equal(back, chosen)
    assert int(back[-1]) < n


@pytest.mark.parametrize(("k", "n"), [(1000, 1_000_000), (10_000, 1_000_000), (50_000, 1_000_000), (800, 10**9)])
def test_indices_take_at_most_0_7_bits_more_than_the_least(k, n) -> None:
    least = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    assert 8 * indices.packed_bytes(k, n) <= least + 0.7 * k + 16


KINDS = {
    "normal": normal(100_003),
    "heavy-tailed": normal(100_003) / normal(100_003, 1),
    "constant": torch.full((100_003,), -0.25),
    "sparse": normal(100_003) * (torch.arange(100_003) % 5000 == 7),
    "zero": torch.zeros(100_003),
    "one large": torch.zeros(100_003).index_fill(0, torch.tensor([77]), 1e30),
    "periodic": normal(64).repeat(1563)[:100_003],
    "grows": torch.arange(100_003.0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_exactly_k_different_numbers_are_chosen_and_they_are_the_largest(kind, density) -> None:
    x = KINDS[kind]
    k = count(density, x.numel())
    chosen = largest(x, k)
    assert chosen.shape == (k,)
    assert bool((chosen.diff() > 0).all())
    taken, best = x[chosen].abs().sort().values, x.abs().topk(k).values.flip(0)
    assert torch.equal(taken, best)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_one_sample_finds_a_threshold_that_at_most_twice_as_many_pass(density, monkeypatch) -> None:
    passes: list[int] = []
    above = top_k._above

    def counted(x: torch.Tensor, threshold: float) -> torch.Tensor:
        found = above(x, threshold)
        passes.append(found.numel())
        return found

    monkeypatch.setattr(top_k, "_above", counted)
    for seed in range(20):
        for x in (normal(200_000, seed), normal(200_000, seed) / normal(200_000, seed + 100)):
            k = count(density, x.numel())
            largest(x, k)
            assert k <= passes[-1] <= 2 * k
    assert len(passes) <= 1.1 * 40


def test_numbers_that_are_not_finite_are_sent_first() -> None:
    x = normal(100_000)
    x[50_000:60_000] = math.nan
    assert bool(x[largest(x, 1000)].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_large_weights_of_every_dtype_are_encoded(dtype) -> None:
    x = normal(50_000).to(dtype)
    for compress in (TopK(0.01, values="fp32"), RandomK(0.01)):
        back = compress.decode(compress.encode(x, (), CompressorMemory()), (), 50_000, dtype)
        assert int((back != 0).sum()) == 500
        torch.testing.assert_close(back[back != 0], x[back != 0], rtol=1e-7, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_at_full_density_the_mean_is_that_of_cast(size) -> None:
    gradients = [[normal(1000, 10 * step + rank) for rank in range(size)] for step in range(3)]
    plain = simulate(size, steps, Cast(), gradients)[0]
    for rank in simulate(size, steps, TopK(1.0, values="fp32"), gradients):
        assert all(torch.equal(a, b) for a, b in zip(rank, plain))
    for rank in simulate(size, steps, RandomK(1.0), gradients):
        assert all(torch.equal(a, b) for a, b in zip(rank, plain))


def test_at_full_density_momentum_correction_is_momentum_sgd() -> None:
    gradients = [[normal(500, 10 * step + rank) for rank in range(2)] for step in range(6)]
    compress = TopK(1.0, momentum=0.9, masking=False, values="fp32")
    means = simulate(2, steps, compress, gradients)[0]
    ours, plain = torch.zeros(500), torch.nn.Parameter(torch.zeros(500))
    sgd = torch.optim.SGD([plain], lr=0.1, momentum=0.9)
    for mean, step in zip(means, gradients):
        ours -= 0.1 * mean
        plain.grad = (step[0] + step[1]) / 2
        sgd.step()
        torch.testing.assert_close(ours, plain.detach(), rtol=1e-5, atol=1e-6)


def test_momentum_correction_is_equation_4_and_algorithm_4() -> None:
    compress, memory = TopK(0.25, momentum=0.5, values="fp32"), CompressorMemory()
    u, v = torch.zeros(8), torch.zeros(8)
    for step in range(10):
        g = normal(8, step)
        u = 0.5 * u + g
        v = v + u
        top = v.abs().topk(2).indices
        expected = torch.zeros(8).index_copy(0, top, v[top])
        got = compress.decode(compress.encode_with_feedback(g.clone(), (), memory), (), 8, torch.float32)
        memory.commit()
        assert torch.equal(got, expected)
        u[top], v[top] = 0.0, 0.0


def test_sent_plus_residual_equal_the_accumulated_momentum() -> None:
    """With zero gradients at the end, the whole accumulated momentum is sent."""
    compress, memory = TopK(0.1, momentum=0.9, masking=False, values="bf16"), CompressorMemory()
    got, u, wanted = torch.zeros(200), torch.zeros(200), torch.zeros(200)
    for step in range(400):
        g = normal(200, step) if step < 20 else torch.zeros(200)
        u = 0.9 * u + g
        wanted += u
        got += compress.decode(compress.encode_with_feedback(g.clone(), (), memory), (), 200, torch.float32)
        memory.commit()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 4])
def test_a_local_gradient_is_clipped_by_its_share_of_the_norm(size) -> None:
    gradients = [[normal(100, rank) for rank in range(size)]]
    compress = TopK(1.0, clip=0.5, values="fp32")
    expected = torch.zeros(100)
    for g in gradients[0]:
        total = g / size
        expected += total * min(1.0, 0.5 / math.sqrt(size) / float(total.norm()))
    for (mean,) in simulate(size, steps, compress, gradients):
        torch.testing.assert_close(mean, expected)
        assert float(mean.norm()) <= 0.5 * math.sqrt(size) * 1.0001


def test_density_falls_exponentially_while_warming_up() -> None:
    compress = TopK(0.001, warm_up=4, values="fp32")
    gradients = [[normal(100_000, step)] * 2 for step in range(7)]
    counts = [int((mean != 0).sum()) for mean in simulate(2, steps, compress, gradients)[0]]
    assert counts == [25_000, 6287, 1581, 398, 100, 100, 100]
    memory = CompressorMemory()
    message = compress.encode_with_feedback(normal(1000), (), memory)
    assert message.shape == compress.blank((), 1000, torch.float32, torch.device("cpu")).shape


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_in_a_thousand_sends_less_than_a_300th_of_fp32(size) -> None:
    numel = 1_000_000
    ring = 2 * (size - 1) / size * 4 * numel
    for wire in simulate(size, sent, TopK(0.001), normal(numel), 1):
        assert 0 < wire <= ring / 300
    for wire in simulate(size, sent, RandomK(0.001), normal(numel), 1):
        assert 0 < wire <= ring / 999


@pytest.mark.parametrize(("values", "most"), [("fp8", 20.1), ("bf16", 28.1), ("fp32", 44.1)])
def test_bits_of_a_number_that_travels(values, most) -> None:
    assert bits(TopK(0.001, values=values), (), 1_000_000) <= most * 1000


@pytest.mark.parametrize("values", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1.0, 1e37])
def test_values_arrive_at_every_magnitude(values, magnitude) -> None:
    compress = TopK(0.5, values=values)
    x = normal(64) * magnitude
    back = compress.decode(compress.encode(x, (), CompressorMemory()), (), 64, torch.float32)
    chosen = largest(x, 32)
    relative = {"fp8": 2**-4, "bf16": 2**-8, "fp32": 0}[values]
    smallest = 2.0**-136 if values == "fp8" else 2.0**-134
    torch.testing.assert_close(back[chosen], x[chosen], rtol=relative, atol=smallest)


@pytest.mark.parametrize("compress", [TopK(0.05), TopK(0.05, momentum=0.9), RandomK(0.05)], ids=repr)
def test_residuals_stay_bounded(compress) -> None:
    memory, sizes = CompressorMemory(), []
    for step in range(400):
        compress.encode_with_feedback(normal(2000, step), (), memory)
        memory.commit()
        sizes.append(float(memory.get(RESIDUAL).norm()))
    assert max(sizes[200:]) <= 1.2 * max(sizes[:200])


def test_after_what_was_not_finite_has_been_sent_finite_numbers_come() -> None:
    compress, memory = TopK(0.1), CompressorMemory()
    bad = normal(100)
    bad[3], bad[4] = math.nan, -math.inf
    first = compress.decode(compress.encode_with_feedback(bad, (), memory), (), 100, torch.float32)
    memory.commit()
    assert not first[[3, 4]].isfinite().any()
    assert (
        compress.decode(compress.encode_with_feedback(normal(100), (), memory), (), 100, torch.float32).isfinite().all()
    )


@pytest.mark.parametrize(("density", "numel"), [(0.1, 1000), (0.03, 1001), (0.34, 50), (0.5, 7)])
def test_each_number_is_drawn_once_in_a_cycle_and_all_workers_draw_alike(density, numel) -> None:
    compress = RandomK(density, seed=3)
    k = count(density, numel)
    cycle = -(-numel // k)
    for first in (0, cycle):
        drawn = torch.zeros(numel)
        for draw in range(first, first + cycle):
            places = compress._indices(draw, numel, torch.device("cpu"))
            assert places.shape == (k,)
            assert bool((places.diff() > 0).all())
            drawn[places] += 1
        assert bool((drawn >= 1).all())


def test_another_seed_and_another_cycle_draw_others() -> None:
    draws = [RandomK(0.1, seed)._indices(draw, 1000, torch.device("cpu")) for seed in (0, 1) for draw in (0, 10)]
    assert not any(torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


def test_random_k_sends_the_sum_of_all_workers_at_the_places_of_the_draw() -> None:
    compress = RandomK(0.1)
    gradients = [[normal(300, 10 * step + rank) for rank in range(3)] for step in range(2)]
    for means in simulate(3, steps, compress, gradients):
        places = compress._indices(0, 300, torch.device("cpu"))
        expected = torch.zeros(300)
        expected[places] = (torch.stack(gradients[0]) / 3).sum(0)[places]
        torch.testing.assert_close(means[0], expected)


@pytest.mark.parametrize("compress", [TopK(0.1), TopK(0.1, values="bf16"), RandomK(0.1)], ids=repr)
def test_messages_that_encode_cannot_have_made_are_refused(compress) -> None:
    message = compress.encode(normal(1000), (), CompressorMemory())
    for wrong in (message[:-1], torch.cat([message, message[:1]]), message.view(torch.int8), message.new_empty(0)):
        with pytest.raises(ValueError):
            compress.decode(wrong, (), 1000, torch.float32)
    ones = torch.full_like(message, 255)
    with pytest.raises(ValueError):
        compress.decode(ones, (), 1000, torch.float32)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: TopK(0), "density"),
        (lambda: TopK(1.5), "density"),
        (lambda: TopK(math.nan), "density"),
        (lambda: TopK(momentum=1.0), "momentum"),
        (lambda: TopK(clip=0.0), "clip"),
        (lambda: TopK(clip=math.nan), "clip"),
        (lambda: TopK(warm_up=-1), "warm_up"),
        (lambda: TopK(values="fp4"), "values"),
        (lambda: RandomK(-0.1), "density"),
        (lambda: RandomK(seed=-1), "seed"),
    ],
)
def test_a_bad_value_is_named(make, named) -> None:
    with pytest.raises(ValueError, match=named):
        make()
