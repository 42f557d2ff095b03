"""PowerSGD: matrices are sent as low-rank factors."""

import math

import pytest
import torch

from unisono.comm import simulate
from unisono.compress import Cast, CompressorMemory, PowerSGD, RandomK, Span, bits
from unisono.compress.memory import RESIDUAL
from unisono.sync.pending_mean import PendingMean


@pytest.fixture(autouse=True)
def one_thread():
    """One thread: starting a second one takes longer than products as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def span(shape: tuple[int, ...], start: int, stride: tuple[int, ...] | None = None) -> Span:
    strides = stride or torch.empty(shape, device="meta").stride()
    return Span(f"at {start}", torch.Size(shape), strides, start, start + math.prod(shape))


def low_rank(rows: int, columns: int, rank: int, seed: int = 0) -> torch.Tensor:
    return normal(rows, rank, seed=seed) @ normal(rank, columns, seed=seed + 1)


def run(comm, compress, steps: list[list[torch.Tensor]], spans: tuple[Span, ...]) -> list[torch.Tensor]:
    """The mean of each step's totals, ``steps[step][rank]``, with one memory."""
    memory, means = CompressorMemory(), []
    for step in steps:
        total = step[comm.rank] / comm.size
        means.append(PendingMean(compress.mean(total, spans, comm, memory, torch.float32)).wait().clone())
        memory.commit()
    return means


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).norm()) <= 1e-5 * float(b.norm())


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_matrix_of_that_rank_arrives_as_it_is(rank, size) -> None:
    spans = (span((40, 30), 0), span((40, 50), 1200), span((20, 64), 3200))
    whole = torch.cat([low_rank(s.shape[0], s.shape[1], rank, s.start).flatten() for s in spans])
    for means in simulate(size, run, PowerSGD(rank), [[whole * (1 + r) for r in range(size)]] * 2, spans):
        for mean in means:
            assert close(mean, whole * (1 + size) / 2)


@pytest.mark.parametrize("rank", [2, 4])
def test_a_matrix_of_lower_rank_arrives_as_it_is(rank) -> None:
    for lower in range(rank):
        x = low_rank(40, 30, lower).flatten() if lower else torch.zeros(1200)
        message = PowerSGD(rank).encode(x, (span((40, 30), 0),), CompressorMemory())
        assert float((PowerSGD(rank).decode(message, (span((40, 30), 0),), 1200, x.dtype) - x).norm()) <= 1e-4


def test_warm_starts_find_the_best_factors() -> None:
    """On a fixed matrix, what one message gets comes near the truncated singular value decomposition (theorem I)."""
    u, s, v = torch.linalg.svd(normal(60, 40), full_matrices=False)
    s = 0.8 ** torch.arange(40.0)
    x, spans, memory = (u * s @ v).flatten(), (span((60, 40), 0),), CompressorMemory()
    best = float(s[4:].norm())
    errors = []
    for _ in range(30):
        message = PowerSGD(4).encode(x, spans, memory)
        memory.commit()
        errors.append(float((PowerSGD(4).decode(message, spans, 2400, x.dtype) - x).norm()))
    assert errors[0] > 1.1 * best
    assert errors[-1] <= 1.0001 * best


@pytest.mark.parametrize("size", [2, 3])
def test_received_plus_residuals_equal_what_was_sent(size) -> None:
    spans = (span((40, 30), 0), span((30,), 1200), span((16, 8, 3, 3), 1230))
    numel = 1230 + 16 * 72
    steps = [[normal(numel, seed=10 * step + rank) for rank in range(size)] for step in range(5)]

    def residuals(comm) -> tuple[torch.Tensor, torch.Tensor]:
        memory, got = CompressorMemory(), torch.zeros(numel)
        for step in steps:
            got += PendingMean(PowerSGD().mean(step[comm.rank] / size, spans, comm, memory, torch.float32)).wait()
            memory.commit()
        return got, memory.get(RESIDUAL)

    results = simulate(size, residuals)
    given = torch.stack([torch.stack(step).mean(0) for step in steps]).sum(0)
    torch.testing.assert_close(results[0][0] + sum(residual for _, residual in results), given, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(got, results[0][0]) for got, _ in results)
    assert not any(residual[1200:1230].any() for _, residual in results)
    torch.testing.assert_close(results[0][0][1200:1230], given[1200:1230])


def test_a_residual_is_that_of_the_workers_own_matrix() -> None:
    """Otherwise, residuals of workers with different data would grow without bound."""
    spans, numel = (span((40, 30), 0),), 1200
    own = [low_rank(40, 30, 1, seed=7), low_rank(40, 30, 1, seed=11)]

    def residual(comm) -> list[float]:
        memory, sizes = CompressorMemory(), []
        for _ in range(60):
            PendingMean(PowerSGD(2).mean(own[comm.rank].flatten().clone(), spans, comm, memory, torch.float32)).wait()
            memory.commit()
            sizes.append(float(memory.get(RESIDUAL).norm()))
        return sizes

    for sizes in simulate(2, residual):
        assert sizes[-1] <= 1e-3 * float(own[0].norm())
    assert numel == own[0].numel()


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_residuals_stay_bounded(rank) -> None:
    spans, memory, sizes = (span((50, 40), 0),), CompressorMemory(), []
    for step in range(400):
        PowerSGD(rank).encode_with_feedback(normal(2000, seed=step), spans, memory)
        memory.commit()
        sizes.append(float(memory.get(RESIDUAL).norm()))
    assert max(sizes[200:]) <= 1.2 * max(sizes[:200])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_in_any_memory_format(memory_format) -> None:
    weight = low_rank(16, 8 * 9, 2).view(16, 8, 3, 3).to(memory_format=memory_format)
    s = span((16, 8, 3, 3), 5, weight.stride())
    flat = torch.zeros(weight.numel() + 9)
    flat[s.start : s.stop].as_strided(s.shape, s.stride).copy_(weight)
    flat[:5] = 1.0
    ((mean,),) = simulate(1, run, PowerSGD(2), [[flat]], (s,))
    assert close(mean[s.start : s.stop].as_strided(s.shape, s.stride), weight)
    assert torch.equal(mean[:5], torch.ones(5))
    assert bits(PowerSGD(2), (s,), flat.numel()) == 32 * (2 * (16 + 72) + 9)


def test_a_transposed_matrix() -> None:
    s = Span("w", torch.Size((30, 40)), (1, 30), 0, 1200)
    ((mean,),) = simulate(1, run, PowerSGD(2), [[low_rank(40, 30, 2).flatten()]], (s,))
    assert close(mean, low_rank(40, 30, 2).flatten())


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_on_the_wire_are_two_sums_of_factors(size) -> None:
    spans, numel = (span((512, 512), 0), span((512,), 512 * 512)), 512 * 513

    def sent(comm) -> int:
        before = comm.bytes_sent
        PendingMean(PowerSGD(4).mean(normal(numel), spans, comm, CompressorMemory(), torch.float32)).wait()
        return comm.bytes_sent - before

    ring = 2 * (size - 1) / size * 4
    for wire in simulate(size, sent):
        assert abs(wire - ring * (4 * 1024 + 512)) <= 64
        assert wire <= ring * numel / 50


def test_several_buckets_travel_at_once() -> None:
    spans = [(span((40, 30), 0),), (span((20, 64), 0), span((7,), 1280))]
    numels = [1200, 1287]

    def means(comm, together: bool) -> list[torch.Tensor]:
        memories, got = [CompressorMemory(), CompressorMemory()], []
        for step in range(3):
            flows = []
            for i in range(2):
                total = normal(numels[i], seed=10 * step + comm.rank)
                flows.append(PendingMean(PowerSGD().mean(total, spans[i], comm, memories[i], torch.float32)))
                if not together:
                    flows[-1].wait()
            got += [flow.wait().clone() for flow in flows]
            for memory in memories:
                memory.commit()
        return got

    apart, together = simulate(3, means, False), simulate(3, means, True)
    for rank in range(3):
        assert all(torch.equal(a, b) for a, b in zip(together[rank], apart[0]))


def test_it_is_chosen_for_matrices_that_become_smaller() -> None:
    compress = PowerSGD(4)
    for shape in [(100, 100), (64, 3, 7, 7), (9, 9)]:
        assert compress.choose("w", torch.Size(shape)) == compress
    for shape in [(), (0,), (1000,), (8, 8), (4, 10_000), (10_000, 1), (0, 5), (1, 64, 64)]:
        assert compress.choose("w", torch.Size(shape)) == Cast()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_factors_are_computed_in_fp32_or_more(dtype) -> None:
    compress, spans = PowerSGD(2), (span((40, 30), 0),)
    x = low_rank(40, 30, 2).flatten().to(dtype)
    wide = compress.total_dtype(dtype)
    message = compress.encode(x, spans, CompressorMemory())
    assert message.dtype == wide
    error = (compress.decode(message, spans, 1200, wide) - x).norm() / x.norm()
    # A matrix of rank 2 that has been rounded is of full rank; what has been lost is a few times this rounding.
    assert float(error) <= max(8 * torch.finfo(dtype).eps, 1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_and_a_dropped_step_leaves_no_trace(bad) -> None:
    spans, memory = (span((40, 30), 0),), CompressorMemory()
    x = normal(1200)
    x[617] = bad
    for _ in range(2):
        message = PowerSGD().encode_with_feedback(x.clone(), spans, memory)
        assert not PowerSGD().decode(message, spans, 1200, torch.float32).isfinite().all()
        memory.discard()
    assert (
        PowerSGD()
        .decode(PowerSGD().encode_with_feedback(normal(1200), spans, memory), spans, 1200, x.dtype)
        .isfinite()
        .all()
    )


def test_a_matrix_that_was_zero_or_not_finite_starts_again() -> None:
    spans = (span((40, 30), 0),)
    for before in (torch.zeros(1200), torch.full((1200,), math.nan)):
        memory = CompressorMemory()
        PowerSGD().encode(before, spans, memory)
        memory.commit()
        x = low_rank(40, 30, 2).flatten()
        message = PowerSGD().encode(x, spans, memory)
        assert close(PowerSGD().decode(message, spans, 1200, x.dtype), x)


def test_messages_that_encode_cannot_have_made_are_refused() -> None:
    spans = (span((40, 30), 0),)
    message = PowerSGD().encode(normal(1200), spans, CompressorMemory())
    for wrong in (
        message[:-1],
        message.double(),
        message.view(torch.uint8),
        RandomK().encode(normal(9), (), CompressorMemory()),
    ):
        with pytest.raises(ValueError, match="message"):
            PowerSGD().decode(wrong, spans, 1200, torch.float32)


@pytest.mark.parametrize("make", [lambda: PowerSGD(0), lambda: PowerSGD(1.5), lambda: PowerSGD(seed=-1)])
def test_a_bad_value_is_named(make) -> None:
    with pytest.raises(ValueError, match=r"rank|seed"):
        make()
