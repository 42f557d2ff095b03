"""Every compressor, with what the laws need to know of it. Whoever adds one adds a row."""

from dataclasses import dataclass

from unisono.compress import Cast, Compressor, Exact


@dataclass(frozen=True)
class Row:
    """One compressor under law.

    Args:
        compress: the value.
        relative: the largest error of one message, ``|x - decode(encode(x))| <= relative * |x| + absolute * sqrt(n)``
            in the 2-norm, for any x. 1 where a message may be all zeros.
        absolute: see `relative`; what is lost near zero.
        debt: the largest debt, ``|k * x - what arrived in k messages of owe(x)| <= debt * |x|`` however large k is;
            None where nothing is owed, so that errors may add up.
    """

    compress: Compressor
    relative: float
    absolute: float = 0.0
    debt: float | None = None


TABLE = [
    Row(Cast(), 0.0, debt=0.0),
    Row(Cast("fp32"), 2**-24),
    Row(Cast("bf16"), 2**-8),
    Row(Cast("fp16"), 2**-10, 2**-24),
    Row(Exact(), 2**-23, 2**-40, debt=1e-6),
    Row(Exact(fraction_bits=30), 2**-23, 2**-30, debt=1e-6),
]
