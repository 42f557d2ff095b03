"""What travels in place of a tensor: compressors, as frozen values."""

from unisono.compress.auto import Auto as Auto
from unisono.compress.cast import Cast as Cast
from unisono.compress.compressor import Buffered as Buffered
from unisono.compress.compressor import Codec as Codec
from unisono.compress.compressor import CollectiveVerbs as CollectiveVerbs
from unisono.compress.compressor import Compressor as Compressor
from unisono.compress.compressor import Mean as Mean
from unisono.compress.compressor import bits as bits
from unisono.compress.error_feedback import WithErrorFeedback as WithErrorFeedback
from unisono.compress.exact import Exact as Exact
from unisono.compress.exact import ExactSums as ExactSums
from unisono.compress.memory import CompressorMemory as CompressorMemory
from unisono.compress.one_bit import OneBit as OneBit
from unisono.compress.power_sgd import PowerSGD as PowerSGD
from unisono.compress.quantize import Quantize as Quantize
from unisono.compress.random_k import RandomK as RandomK
from unisono.compress.selective import ByName as ByName
from unisono.compress.selective import BySize as BySize
from unisono.compress.span import Span as Span
from unisono.compress.span import views as views
from unisono.compress.top_k import TopK as TopK
from unisono.compress.two_bit import TwoBit as TwoBit

COMPRESSORS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *(Cast, Exact, Quantize, OneBit, TwoBit, TopK, RandomK, PowerSGD),
        *(WithErrorFeedback, BySize, ByName, Auto),
    )
}
BOUND_COMPRESSORS: dict[str, type] = {**COMPRESSORS, "ExactSums": ExactSums}  # also what `for_sums_of` returns
