"""Laws of every compressor."""

import math
from collections.abc import Callable

import pytest
import torch

from tests.compress.laws import TABLE, Row
from unisono import notation
from unisono.comm import simulate
from unisono.compress import (
    COMPRESSORS,
    Auto,
    ByName,
    BySize,
    Cast,
    Compressor,
    CompressorMemory,
    Exact,
    Span,
    WithErrorFeedback,
    bits,
)
from unisono.sync.pending_mean import PendingMean

CPU = torch.device("cpu")
SIZES = [0, 1, 2, 17, 5003]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def law_for(applies: Callable[[Row], bool]) -> pytest.MarkDecorator:
    rows = [row for row in TABLE if applies(row)]
    return pytest.mark.parametrize("row", rows, ids=lambda row: notation.show(row.compress))


law = law_for(lambda row: True)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
sizes = pytest.mark.parametrize("numel", SIZES)


def gradient(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def total_of(compress: Compressor, x: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    total = torch.full(x.shape, 7).to(compress.total_dtype(x.dtype))
    compress.add(total, x, weight, True)
    return total


def layouts(numel: int) -> list[tuple[Span, ...]]:
    """No structure, and a matrix with a vector behind it where they fit."""
    rows, columns = numel // 16, 8
    if not rows:
        return [()]
    matrix = Span("a.weight", torch.Size((rows, columns)), (columns, 1), 0, rows * columns)
    vector = Span("a.bias", torch.Size((rows,)), (1,), rows * columns, rows * (columns + 1))
    return [(), (matrix, vector)]


def decoded(compress: Compressor, x: torch.Tensor, spans: tuple[Span, ...] = ()) -> torch.Tensor:
    total = total_of(compress, x)
    message = compress.encode(total, spans, CompressorMemory())
    return compress.value(compress.decode(message, spans, x.numel(), total.dtype), x.dtype)


def mean(comm, compress: Compressor, xs: list[torch.Tensor], spans: tuple[Span, ...] = ()) -> torch.Tensor:
    total = total_of(compress, xs[comm.rank], 1 / comm.size)
    return PendingMean(compress.mean(total, spans, comm, CompressorMemory(), torch.float32)).wait().clone()


def norm(x: torch.Tensor) -> float:
    return float(x.double().norm())


def allowed(row: Row, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> float:
    """The largest error of one message that carries `x`."""
    rounding = max(row.relative, torch.finfo(dtype).eps, 2**-23)
    return rounding * norm(x) + row.absolute * math.sqrt(x.numel())


def test_every_compressor_is_in_the_table() -> None:
    assert {type(row.compress) for row in TABLE} == set(COMPRESSORS.values())


@law
@sizes
@dtypes
def test_shape_and_dtype_return_and_the_error_is_bounded(row, numel, dtype) -> None:
    x = gradient(numel).to(dtype)
    for spans in layouts(numel):
        back = decoded(row.compress, x, spans)
        assert back.shape == x.shape
        assert back.dtype == dtype
        assert norm(back.double() - x.double()) <= allowed(row, x, dtype)


def holds(row: Row, magnitude: float) -> bool:
    """Whether it is in the range that the compressor documents."""
    return magnitude < 1 or not any(word in notation.show(row.compress) for word in ("fp16", "Exact"))


@pytest.mark.parametrize(
    ("row", "magnitude"),
    [(row, magnitude) for row in TABLE for magnitude in (1e-30, 1e-6, 1e30) if holds(row, magnitude)],
    ids=lambda v: notation.show(v.compress) if isinstance(v, Row) else str(v),
)
def test_the_error_is_bounded_at_every_magnitude(row, magnitude) -> None:
    x = gradient(300) * magnitude
    assert norm(decoded(row.compress, x).double() - x.double()) <= allowed(row, x)


@law
@dtypes
def test_encode_leaves_the_total_as_it_is(row, dtype) -> None:
    total = total_of(row.compress, gradient(1000).to(dtype))
    before = total.clone()
    row.compress.encode(total, (), CompressorMemory())
    assert torch.equal(total, before)


@law
def test_the_mean_over_one_peer_is_decode_of_encode(row) -> None:
    x = gradient(1000)
    for spans in layouts(1000):
        (single,) = simulate(1, mean, row.compress, [x], spans)
        used = row.compress.candidates[0] if isinstance(row.compress, Auto) else row.compress
        assert torch.equal(single, decoded(used, x, spans))


@law
@dtypes
def test_lossless_compressors_preserve_bits(row, dtype) -> None:
    x = gradient(1000).to(dtype)
    assert torch.equal(decoded(row.compress, x), x) or not row.compress.is_lossless(dtype)


@law
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_peers_get_the_same_mean_and_it_is_the_mean(row, size) -> None:
    xs = [gradient(1000, seed) for seed in range(size)]
    for spans in layouts(1000):
        means = simulate(size, mean, row.compress, xs, spans)
        assert all(torch.equal(m, means[0]) for m in means)
        once = sum(allowed(row, x) for x in xs) / size  # what the first hop loses; the second carries what decoded
        carried = sum(norm(x) for x in xs) / size + once
        twice = max(row.relative, 2**-22) * carried + row.absolute * math.sqrt(1000)
        assert norm(means[0].double() - torch.stack(xs).double().mean(0)) <= once + twice


@law
@pytest.mark.parametrize("numel", [0, 1, 2, 5])
def test_fewer_numbers_than_peers_have_a_mean(row, numel) -> None:
    means = simulate(4, mean, row.compress, [gradient(numel, seed) for seed in range(4)])
    assert all(m.shape == (numel,) and torch.equal(m, means[0]) for m in means)


@law
def test_zeros_stay_zeros(row) -> None:
    for numel in SIZES:
        for m in simulate(3, mean, row.compress, [torch.zeros(numel)] * 3):
            assert torch.equal(m, torch.zeros(numel))


@law
@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_the_message(row, numel, dtype) -> None:
    for spans in layouts(numel):
        blank = row.compress.blank(spans, numel, dtype, CPU)
        for x in (gradient(numel), torch.zeros(numel)):
            total = total_of(row.compress, x.to(dtype))
            for message in (
                row.compress.encode(total, spans, CompressorMemory()),
                row.compress.encode_with_feedback(total, spans, CompressorMemory()),
            ):
                assert (message.shape, message.dtype) == (blank.shape, blank.dtype)
                assert message.is_contiguous()
        assert bits(row.compress, spans, numel, dtype) == blank.numel() * blank.element_size() * 8


@law_for(lambda row: row.residual is not None)  # the others have no residual
def test_what_arrives_approaches_what_was_sent(row) -> None:
    """The residual is bounded, so the mean of decoded messages approaches what was sent (Karimireddy et al. 2019)."""
    x = gradient(1000)
    for spans in layouts(1000):
        memory, got = CompressorMemory(), torch.zeros(1000, dtype=torch.float64)
        for sends in range(1, 101):
            message = row.compress.encode_with_feedback(total_of(row.compress, x), spans, memory)
            there = row.compress.decode(message, spans, 1000, row.compress.total_dtype(x.dtype))
            got += row.compress.value(there, x.dtype)
            memory.commit()
            assert norm(sends * x.double() - got) <= row.residual * norm(x) + 1e-6 * sends * norm(x)


@law
def test_a_discarded_step_leaves_no_trace(row) -> None:
    def messages(dropped: int) -> list[torch.Tensor]:
        memory, out = CompressorMemory(), []
        for step in range(6):
            for attempt in range(1 + (step == 3) * dropped):
                if attempt:
                    memory.discard()
                total = total_of(row.compress, gradient(700, seed=step + 100 * (attempt < dropped and step == 3)))
                message = row.compress.encode_with_feedback(total, (), memory)
            out.append(message.clone())
            memory.commit()
        return out

    for once, again in zip(messages(0), messages(2)):
        assert torch.equal(once, again)


@law
def test_the_same_run_gives_the_same_bits_whatever_torch_has_drawn(row) -> None:
    def run(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        memory = CompressorMemory()
        out = []
        for step in range(3):
            out.append(
                row.compress.encode_with_feedback(total_of(row.compress, gradient(700, step)), (), memory).clone()
            )
            memory.commit()
        return out

    before = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(run(1), run(2)))
    torch.manual_seed(2)
    drawn = torch.get_rng_state()
    run(2)
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.set_rng_state(before)


@law
def test_adding_twice_adds(row) -> None:
    x, y = gradient(50, 1), gradient(50, 2)
    total = total_of(row.compress, x, 0.5)
    row.compress.add(total, y, 0.25, False)
    expected = 0.5 * x + 0.25 * y
    assert norm(row.compress.value(total, x.dtype) - expected) <= 1e-6 * norm(expected) + 2 * row.absolute * 50**0.5


@law_for(lambda row: row.compress.buffered is not None)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1, 1000, (1 << 19) + 1])  # the last one in two pieces
def test_what_is_folded_from_a_buffer_is_what_add_adds(row, dtype, numel) -> None:
    compress, buffered, xs = row.compress, row.compress.buffered, [gradient(numel, i).to(dtype) for i in range(3)]
    added, folded = (torch.full((numel,), 7.0, dtype=compress.total_dtype(dtype)) for _ in "12")
    buffer = torch.empty(numel, dtype=buffered.buffer_dtype(dtype))
    for i, x in enumerate(xs):
        compress.add(added, x, 0.125, i == 0)
        buffered.write(buffer, x, 0.125)
        buffered.fold(folded, buffer, i == 0)
    assert torch.equal(added, folded)
    assert buffered.writes(0.125)
    assert not buffered.writes(1 / 3)


@law
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_numbers_that_are_not_finite_are_never_hidden(row, bad, place) -> None:
    x = gradient(1000)
    x[place] = bad
    for spans in layouts(1000):
        for size in (1, 3):
            xs = [gradient(1000, seed) for seed in range(1, size)] + [x]
            if isinstance(row.compress, Exact):
                with pytest.raises(ValueError, match="range"):
                    simulate(size, mean, row.compress, xs, spans)
            else:
                assert all(not m.isfinite().all() for m in simulate(size, mean, row.compress, xs, spans))


@law_for(lambda row: not isinstance(row.compress, Exact))  # which refuses it
def test_numbers_that_are_not_finite_are_discarded_with_their_step(row) -> None:
    """A NaN of a discarded step is not in the residual."""
    memory, x = CompressorMemory(), gradient(300)
    row.compress.encode_with_feedback(total_of(row.compress, x * math.nan), (), memory)
    memory.discard()
    message = row.compress.encode_with_feedback(total_of(row.compress, x), (), memory)
    assert row.compress.decode(message, (), 300, x.dtype).isfinite().all()


@law
def test_values_are_written_as_they_are_read(row) -> None:
    assert notation.parse("compress", notation.show(row.compress), COMPRESSORS) == row.compress


@pytest.mark.parametrize("to", ["bf16", "fp16", "own"])
def test_a_cast_keeps_its_neighbours_from_what_is_not_finite(to) -> None:
    got = decoded(Cast(to), torch.tensor([1.0, math.nan, 2.0]))
    assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_exact_sums_have_the_same_bits_in_any_order_and_number(size) -> None:
    """The expected sum is one of integers, which no order can change. Numbers are as large as may be, and as small."""
    numel, exact = 200_000, Exact().for_sums_of(28)  # several chunks
    parts = [gradient(numel, seed) * 10.0 ** (seed % 13 - 9) for seed in range(28)]
    parts = [torch.cat([part, torch.tensor([28 * exact.bound, -28 * exact.bound])]) for part in parts]

    def summed(comm) -> torch.Tensor:
        total = torch.full((numel + 2,), 7.0, dtype=torch.float64)
        for i, part in enumerate(parts[comm.rank :: comm.size]):
            exact.add(total, part, 1 / 28, i == 0)
        return PendingMean(exact.mean(total, (), comm, CompressorMemory(), torch.float32)).wait().clone()

    expected = sum((p.double() * (1 / 28) * 2**40).round().long() for p in parts).double() * 2.0**-40
    for got in simulate(size, summed):
        assert torch.equal(got, expected.float())


def test_exact_sums_are_the_same_however_gradients_lie_in_memory() -> None:
    x, weight = gradient(48_000).view(300, 160), 0.3
    plain, turned = (torch.zeros(300, 160, dtype=torch.float64) for _ in "12")
    for i in range(2):
        Exact().add(plain, x, weight, i == 0)
        Exact().add(turned, x.t().contiguous().t(), weight, i == 0)
    assert torch.equal(plain, turned)


@pytest.mark.parametrize(("addends", "bound"), [(1, 8192), (4, 2048), (8, 1024), (1024, 8)])
def test_exact_refuses_what_it_cannot_hold_and_names_it(addends, bound) -> None:
    exact, total = Exact().for_sums_of(addends), torch.zeros(2, dtype=torch.float64)
    exact.add(total, torch.tensor([4.0 * bound, -4.0 * bound]), 0.25, True)
    assert total.tolist() == [bound, -bound]
    for bad in (4.004 * bound, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"magnitude {bad / 4:g} is outside the range ±{bound} of"):
            exact.add(total, torch.tensor([0.0, bad]), 0.25, True)


@pytest.mark.parametrize(
    "compress", [Exact(), BySize(100, small=Exact()), ByName((("a", Exact()),)), WithErrorFeedback(Exact())], ids=str
)
def test_the_number_of_addends_reaches_nested_compressors(compress) -> None:
    chosen = compress.for_sums_of(64).choose("a", torch.Size((9,)))
    inner = chosen.compress if isinstance(chosen, WithErrorFeedback) else chosen
    assert inner.bound == 2.0**13 / 64
