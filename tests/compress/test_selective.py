"""Compressors that are composed of others."""

import pytest
import torch

from unisono import notation
from unisono.comm import simulate
from unisono.compress import (
    COMPRESSORS,
    Auto,
    ByName,
    BySize,
    Cast,
    CompressorMemory,
    OneBit,
    Quantize,
    TopK,
    WithErrorFeedback,
)
from unisono.sync.pending_mean import PendingMean

BY_NAME = ByName((("embed*", TopK(0.1)), ("*.bias", Cast()), ("*", BySize(below=10))), otherwise=OneBit())


@pytest.mark.parametrize(
    ("compress", "name", "shape", "chosen"),
    [
        (BySize(), "w", (64, 64), Quantize(8)),
        (BySize(), "w", (63, 65), Cast()),
        (BySize(), "w", (), Cast()),
        (BY_NAME, "embed.weight", (9,), TopK(0.1)),
        (BY_NAME, "embed.bias", (9,), TopK(0.1)),
        (BY_NAME, "head.bias", (9,), Cast()),
        (BY_NAME, "Embed.bias", (9,), Cast()),
        (BY_NAME, "head.weight", (3, 3), Cast()),
        (BY_NAME, "head.weight", (3, 4), Quantize(8)),
        (ByName((("a", Cast("bf16")),), OneBit()), "b", (3,), OneBit()),
        (WithErrorFeedback(BY_NAME), "head.bias", (9,), WithErrorFeedback(Cast())),
        (WithErrorFeedback(BY_NAME), "head.weight", (3, 4), Quantize(8)),
        (Auto(), "w", (3, 4), Auto()),
    ],
)
def test_a_parameter_is_given_its_compressor(compress, name, shape, chosen) -> None:
    assert compress.choose(name, torch.Size(shape)) == chosen


@pytest.mark.parametrize(
    "compress",
    [BY_NAME, BySize(3, WithErrorFeedback(), BY_NAME), Auto((Cast(),)), Auto((Cast("fp16"), BY_NAME), fixed=OneBit())],
)
def test_nested_values_are_written_as_they_are_read(compress) -> None:
    assert notation.parse("compress", notation.show(compress), COMPRESSORS) == compress
    assert hash(compress) == hash(notation.parse("compress", notation.show(compress), COMPRESSORS))


def test_residuals_of_additive_messages_are_sent_later() -> None:
    x = 1 + 2.0**-10 * torch.arange(1, 65)  # no number of which bf16 has

    def run(comm, compress) -> torch.Tensor:
        memory, got = CompressorMemory(), torch.zeros(64, dtype=torch.float64)
        for _ in range(256):
            got += PendingMean(compress.mean(x / comm.size, (), comm, memory, torch.float32)).wait()
            memory.commit()
        return got / 256

    for compress, most in ((Cast("bf16"), None), (WithErrorFeedback(Cast("bf16")), 1e-4)):
        assert compress.is_additive
        off = [float((mean - x).abs().max()) for mean in simulate(2, run, compress)]
        assert max(off) > 1e-3 if most is None else max(off) < most


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: BySize(below=0), "below=0"),
        (lambda: BySize(small=3), "small=3 is not a compressor"),
        (lambda: BySize(large=Cast), "large=.*Cast.* is not a compressor"),
        (lambda: ByName([("a", Cast())]), "rules="),
        (lambda: ByName((("a",),)), r"\('a',\) is not a pair"),
        (lambda: ByName((("a", "bf16"),)), "rules: a='bf16' is not a compressor"),
        (lambda: ByName(otherwise=None), "otherwise=None"),
        (lambda: WithErrorFeedback("bf16"), "compress='bf16'"),
    ],
)
def test_invalid_arguments_are_refused_by_name(build, words) -> None:
    with pytest.raises(ValueError, match=words):
        build()
