"""Laws that every compressor keeps. Whoever adds one adds a row."""

import math

import pytest
import torch

from unisono import notation
from unisono.comm import simulate
from unisono.compress import COMPRESSORS, Cast, Compressor, Exact
from unisono.sync.flow import Flow

TABLE: list[Compressor] = [Cast(), Cast("fp32"), Cast("bf16"), Cast("fp16"), Exact(), Exact(fraction_bits=30)]
SHAPES = [(), (1,), (0,), (17,), (3, 5), (1000,)]
# Relative error of one rounding, and absolute error near zero.
ERROR = {Cast(): (0, 0), Cast("fp32"): (2**-24, 0), Cast("bf16"): (2**-8, 0), Cast("fp16"): (2**-10, 2**-24),
         Exact(): (2**-23, 2**-40), Exact(30): (2**-23, 2**-30)}  # fmt: skip
law = pytest.mark.parametrize("compress", TABLE, ids=notation.show)


def gradient(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def total_of(compress: Compressor, x: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    total = torch.full(x.shape, 7).to(compress.total_dtype(x.dtype))
    compress.add(total, x, weight, True)
    return total


def mean(comm, compress: Compressor, xs: list[torch.Tensor]) -> torch.Tensor:
    total = total_of(compress, xs[comm.rank], 1 / comm.size)
    return Flow(compress.mean(total, comm, {}, torch.float32)).wait().clone()


def test_every_compressor_is_in_the_table() -> None:
    assert {type(c) for c in TABLE} == set(COMPRESSORS.values())


@law
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_shape_and_dtype_return_and_the_error_is_bounded(compress, shape, dtype) -> None:
    x = gradient(shape).to(dtype)
    back = compress.decode(compress.encode(total_of(compress, x)), dtype)
    assert back.shape == x.shape
    assert back.dtype == dtype
    relative, absolute = ERROR[compress]
    relative = max(relative, 2**-23 if dtype == torch.float64 else 0)  # what travels is never wider than fp32
    torch.testing.assert_close(back.double(), x.double(), rtol=relative + torch.finfo(dtype).eps, atol=absolute)


@law
def test_the_mean_over_one_peer_is_decode_of_encode(compress) -> None:
    x = gradient((100,))
    (alone,) = simulate(1, mean, compress, [x])
    assert torch.equal(alone, compress.decode(compress.encode(total_of(compress, x)), torch.float32))


@law
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_keeps_says_whether_bits_survive(compress, dtype) -> None:
    x = gradient((1000,)).to(dtype)
    survived = torch.equal(compress.decode(compress.encode(total_of(compress, x)), dtype), x)
    assert survived or not compress.keeps(dtype)


@law
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_peers_get_the_same_mean_and_it_is_the_mean(compress, size) -> None:
    xs = [gradient((1000,), seed) for seed in range(size)]
    means = simulate(size, mean, compress, xs)
    assert all(torch.equal(m, means[0]) for m in means)
    relative, absolute = ERROR[compress]
    expected = torch.stack(xs).double().mean(0)
    largest = float(torch.stack(xs).abs().max())
    error = float((means[0].double() - expected).abs().max())
    assert error <= size * (relative + 2**-22) * largest + size * absolute


@law
def test_zeros_stay_zeros(compress) -> None:
    for m in simulate(3, mean, compress, [torch.zeros(33)] * 3):
        assert torch.equal(m, torch.zeros(33))


@law
def test_bits_are_what_the_wire_weighs(compress) -> None:
    for shape in SHAPES:
        x = gradient(shape)
        wire = compress.encode(total_of(compress, x))
        assert compress.bits(x) == wire.numel() * wire.element_size() * 8
        assert wire.dtype == compress.wire_dtype(x.dtype)


@law
def test_adding_twice_adds(compress) -> None:
    x, y = gradient((50,), 1), gradient((50,), 2)
    total = total_of(compress, x, 0.5)
    compress.add(total, y, 0.25, False)
    relative, absolute = ERROR[compress]
    expected = 0.5 * x + 0.25 * y
    torch.testing.assert_close(compress.decode(compress.encode(total), torch.float32), expected,
                               rtol=relative + 2**-22, atol=2 * absolute + 2**-23)  # fmt: skip


@law
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_hidden(compress, bad) -> None:
    x = torch.tensor([1.0, bad, 2.0])
    if isinstance(compress, Exact):
        with pytest.raises(ValueError, match="range"):
            simulate(1, mean, compress, [x])
    else:
        (got,) = simulate(1, mean, compress, [x])
        assert not torch.isfinite(got[1])
        assert torch.isfinite(got[[0, 2]]).all()


@law
def test_values_are_written_as_they_are_read(compress) -> None:
    assert notation.parse("compress", notation.show(compress), COMPRESSORS) == compress


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_exact_sums_have_the_same_bits_in_any_order_and_number(size) -> None:
    parts = [gradient((500,), seed) * 10.0 ** (seed % 7 - 3) for seed in range(28)]

    def summed(comm) -> torch.Tensor:
        total = torch.zeros(500, dtype=torch.int64)
        for i, part in enumerate(parts[comm.rank :: comm.size]):
            Exact().add(total, part, 1 / 28, i == 0)
        return Flow(Exact().mean(total, comm, {}, torch.float32)).wait().clone()

    expected = sum((p.double() / 28 * 2**40).round().long() for p in parts).double() * 2.0**-40
    for got in simulate(size, summed):
        assert torch.equal(got, expected.float())


def test_exact_refuses_what_it_cannot_hold_and_names_it() -> None:
    total = torch.zeros(2, dtype=torch.int64)
    Exact().add(total, torch.tensor([4096.0, -4096.0]), 1.0, True)
    with pytest.raises(ValueError, match="4097 is outside the fixed-point range ±4096"):
        Exact().add(total, torch.tensor([0.0, 4097.0]), 1.0, True)
