"""A row for every compressor, with the bounds that the laws check. A new compressor needs a row."""

from dataclasses import dataclass

from unisono.compress import (
    Auto,
    ByName,
    BySize,
    Cast,
    Compressor,
    Exact,
    OneBit,
    PowerSGD,
    Quantize,
    RandomK,
    TopK,
    TwoBit,
    WithErrorFeedback,
)


@dataclass(frozen=True)
class Row:
    """One compressor and its bounds.

    Args:
        compress: the value.
        relative: the largest error of one message, ``|x - decode(encode(x))| <= relative * |x| + absolute * sqrt(n)``
            in the 2-norm, for any x. 1 where a message may be all zeros.
        absolute: see `relative`; the error near zero.
        residual: the largest residual. After k messages of ``encode_with_feedback(x)``, for any k, the sum of what was
            decoded differs from ``k * x`` by at most ``residual * |x|``. None: no error feedback, errors add up.
    """

    compress: Compressor
    relative: float
    absolute: float = 0.0
    residual: float | None = None


TABLE = [
    Row(Cast(), 0.0, residual=0.0),
    Row(Cast("fp32"), 2**-24),
    Row(Cast("bf16"), 2**-8),
    Row(Cast("fp16"), 2**-10, 2**-24),
    Row(Exact(), 2**-23, 2**-40, residual=1e-6),
    Row(Exact(fraction_bits=30), 2**-23, 2**-30, residual=1e-6),
    Row(Quantize(), 0.01, residual=0.01),
    Row(Quantize(bits=4), 0.15, residual=0.15),
    Row(Quantize(bits=4, block=8), 0.11, residual=0.11),
    Row(Quantize(stochastic=True), 0.02),
    Row(Quantize(bits=4, stochastic=True, block=64), 0.3),
    Row(OneBit(), 1.0, residual=26.0),
    Row(OneBit(block=64), 1.0, residual=11.0),
    Row(TwoBit(4.5), 1.0, residual=4.5),
    Row(TopK(0.1), 1.0, residual=12.0),
    Row(TopK(1.0, values="fp32"), 2**-24, residual=1e-6),
    Row(TopK(0.05, values="bf16"), 1.0, residual=24.0),
    Row(RandomK(0.1), 1.0, residual=12.0),
    Row(RandomK(1.0), 2**-24, residual=1e-6),
    Row(PowerSGD(), 1.0, residual=3.0),
    Row(PowerSGD(rank=4), 1.0, residual=2.0),
    Row(WithErrorFeedback(Cast("bf16")), 2**-8, residual=2**-8),
    Row(WithErrorFeedback(Quantize(bits=4, stochastic=True)), 0.3, residual=0.3),
    Row(WithErrorFeedback(OneBit(block=64)), 1.0, residual=11.0),
    Row(BySize(), 0.01, residual=0.01),
    Row(
        BySize(below=100, small=Quantize(bits=4), large=WithErrorFeedback(Cast("fp16"))),
        2**-10,
        2**-24,
        residual=2**-10,
    ),
    Row(ByName(), 0.0, residual=0.0),
    Row(ByName((("a.*", Cast()), ("b?", BySize(5))), otherwise=Quantize(bits=4)), 0.15, residual=0.15),
    Row(Auto(), 1.0, residual=0.01),
    Row(Auto((Cast(), TopK(0.1)), fixed=OneBit(block=64), gain=0.5, again=0), 1.0, residual=11.0),
]
