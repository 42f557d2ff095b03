"""Block-wise compressors, beyond the laws."""

import math

import pytest
import torch

from unisono.compress import CompressorMemory, OneBit, Quantize, TwoBit, bits
from unisono.compress.bit_packing import pack, packed, unpack
from unisono.compress.block_codec import BlockCodec
from unisono.compress.memory import RESIDUAL

LARGE = 1_000_000
BLOCKS = [Quantize(), Quantize(bits=4), Quantize(block=64, stochastic=True), OneBit(), TwoBit(1.0)]


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def decoded(compress: BlockCodec, x: torch.Tensor, memory: CompressorMemory | None = None) -> torch.Tensor:
    return compress.decode(compress.encode(x, (), memory or CompressorMemory()), (), x.numel(), x.dtype)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_codes_are_packed_and_unpacked(width, rows) -> None:
    codes = torch.randint(1 << width, (rows * 8,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    out, back = torch.empty(packed(codes.numel(), width), dtype=torch.uint8), torch.empty_like(codes)
    pack(codes.clone(), width, out)
    assert out.numel() == rows * width
    unpack(out, width, back)
    assert torch.equal(back, codes)


@pytest.mark.parametrize(
    ("compress", "most"),
    # 1-bit at most 1/28 of fp32; 4-bit every 64 steps at most 1/450 of fp32 every step.
    [(OneBit(), 32 / 28), (Quantize(bits=4), 32 * 64 / 450), (Quantize(), 8.25), (TwoBit(1.0), 2.01)],
    ids=repr,
)
@pytest.mark.parametrize("numel", [10_001, LARGE])
def test_a_number_takes_no_more_bits_than_promised(compress, most, numel) -> None:
    assert bits(compress, (), numel) <= most * numel
    assert compress.encode(normal(numel), (), CompressorMemory()).numel() * 8 <= most * numel


@pytest.mark.parametrize("width", [8, 4])
def test_the_error_is_at_most_half_a_step(width) -> None:
    x = normal(4096)
    step = x.view(-1, 128).abs().amax(1, keepdim=True) / (2 ** (width - 1) - 1) * (1 + 2**-7)
    assert ((decoded(Quantize(bits=width), x) - x).view(-1, 128).abs() <= step / 2).all()


@pytest.mark.parametrize("width", [8, 4])
def test_stochastic_rounding_is_less_than_a_step_off_and_unbiased(width) -> None:
    compress, memory, x, sends = Quantize(bits=width, stochastic=True), CompressorMemory(), normal(4096), 400
    step = x.view(-1, 128).abs().amax(1, keepdim=True) / (2 ** (width - 1) - 1) * (1 + 2**-7)
    total = torch.zeros(4096, dtype=torch.float64)
    for _ in range(sends):
        error = decoded(compress, x, memory) - x
        assert (error.view(-1, 128).abs() < step).all()
        total += error
        memory.commit()
    bias = (total / sends).view(-1, 128) / step
    deviation = 0.5 / math.sqrt(sends)  # of a mean of errors that are at most one step apart
    assert bias.abs().max() < 5 * deviation
    assert abs(bias.mean()) < 5 * deviation / math.sqrt(4096)


def test_stochastic_rounding_differs_between_messages_and_between_workers() -> None:
    compress, memory, x = Quantize(bits=4, stochastic=True), CompressorMemory(), normal(5000)
    first = decoded(compress, x, memory)
    assert torch.equal(decoded(compress, x, memory), first)  # not committed: the same message again
    memory.commit()
    assert not torch.equal(decoded(compress, x, memory), first)
    other = x.clone()
    other[0] += 1e-3  # another worker's total
    assert (decoded(compress, other) != first)[128:].any()


def test_stochastic_rounding_is_unbiased_over_a_long_message() -> None:
    x = torch.full((LARGE,), 0.3)
    x[::64] = 1.0
    got = decoded(Quantize(bits=4, stochastic=True, block=64), x)
    assert abs(float((got - x)[x < 1].double().mean())) < 1e-3


def test_one_bit_sends_the_mean_magnitude_of_a_block() -> None:
    x = torch.tensor([1.0, -3.0] * 128 + [5.0, -7.0, 0.0])
    assert decoded(OneBit(), x).tolist() == [2.0, -2.0] * 128 + [4.0, -4.0, 4.0]


def test_two_bit_sends_what_exceeds_its_threshold_and_keeps_the_rest_as_residual() -> None:
    compress, memory, x = TwoBit(1.0), CompressorMemory(), torch.tensor([0.4, -0.7, 2.5, -1.5, 0.0])
    sent = []
    for _ in range(3):
        message = compress.encode_with_feedback(x.clone(), (), memory)
        sent.append(compress.decode(message, (), 5, x.dtype).tolist())
        memory.commit()
    assert sent == [[0, 0, 1, -1, 0], [0, -1, 1, -1, 0], [1, -1, 1, -1, 0]]


@pytest.mark.parametrize("threshold", [0.5, 0.1, 1e-30, 1e30])
def test_two_bit_sends_a_number_that_is_just_its_threshold(threshold) -> None:
    t = torch.tensor(threshold)
    below = torch.nextafter(t, torch.tensor(0.0))
    assert torch.equal(
        decoded(TwoBit(threshold), torch.stack([t, -t, below, -below])), torch.stack([t, -t, 0 * t, 0 * t])
    )


@pytest.mark.parametrize("compress", BLOCKS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_affects_only_its_block(compress, bad) -> None:
    x, block = normal(2000), compress.block
    x[block] = bad
    got = decoded(compress, x).isfinite()
    assert not got[block : 2 * block].all()
    assert got[:block].all()
    assert got[2 * block :].all()


@pytest.mark.parametrize("compress", BLOCKS, ids=repr)
def test_a_total_of_several_pieces_arrives_block_by_block(compress) -> None:
    x = normal(300_000)
    whole = decoded(compress, x)
    if not isinstance(compress, Quantize) or not compress.stochastic:
        middle = slice(512 * 300, 512 * 310)
        assert torch.equal(decoded(compress, x[middle].clone()), whole[middle])
    residuals, memory = x.clone(), CompressorMemory()
    message = compress.encode_with_feedback(residuals, (), memory)
    memory.commit()
    if compress.keeps_residual:
        assert torch.equal(compress.decode(message, (), x.numel(), x.dtype), whole)
        torch.testing.assert_close(memory.get(RESIDUAL), x - whole)


@pytest.mark.parametrize("compress", BLOCKS, ids=repr)
def test_every_second_number_of_a_tensor_is_a_total_too(compress) -> None:
    x = normal(2001)
    assert torch.equal(decoded(compress, x[::2]), decoded(compress, x[::2].clone()))


@pytest.mark.parametrize("compress", BLOCKS, ids=repr)
def test_a_message_may_lie_anywhere_in_memory(compress) -> None:
    x = normal(1000)
    message = compress.encode(x, (), CompressorMemory())
    shifted = torch.empty(message.numel() + 1, dtype=torch.uint8)[1:].copy_(message)
    assert torch.equal(compress.decode(shifted, (), 1000, x.dtype), decoded(compress, x))


@pytest.mark.parametrize("compress", BLOCKS, ids=repr)
@pytest.mark.parametrize("damage", [lambda m: m[:-1], lambda m: m.to(torch.int32), lambda m: torch.cat([m, m])])
def test_a_message_of_another_length_or_type_is_refused(compress, damage) -> None:
    with pytest.raises(ValueError, match="1000 numbers"):
        compress.decode(damage(compress.encode(normal(1000), (), CompressorMemory())), (), 1000, torch.float32)


@pytest.mark.parametrize("compress", BLOCKS, ids=repr)
def test_any_bytes_of_the_right_length_decode_to_something(compress) -> None:
    length = bits(compress, (), 1000) // 8
    noise = torch.randint(256, (length,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert compress.decode(noise, (), 1000, torch.float32).shape == (1000,)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Quantize(bits=5), "bits=5"),
        (lambda: Quantize(bits=True), "bits=True"),
        (lambda: Quantize(stochastic=1), "stochastic=1"),
        (lambda: Quantize(block=12), "block=12"),
        (lambda: Quantize(block=1 << 20), "block=1048576"),
        (lambda: OneBit(block=0), "block=0"),
        (lambda: OneBit(block=8.0), "block=8.0"),
        (lambda: TwoBit(0.0), "threshold=0.0"),
        (lambda: TwoBit(math.nan), "threshold=nan"),
        (lambda: TwoBit("1"), "threshold='1'"),
    ],
)
def test_invalid_arguments_are_refused_by_name(build, words) -> None:
    with pytest.raises(ValueError, match=words):
        build()
