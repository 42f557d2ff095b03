from unisono.compress.cast import Cast as Cast
from unisono.compress.compressor import Codec as Codec
from unisono.compress.compressor import Compressor as Compressor
from unisono.compress.compressor import Mean as Mean
from unisono.compress.compressor import Wire as Wire
from unisono.compress.compressor import bits as bits
from unisono.compress.exact import Exact as Exact
from unisono.compress.memory import Memory as Memory
from unisono.compress.span import Span as Span
from unisono.compress.span import views as views

COMPRESSORS: dict[str, type] = {cls.__name__: cls for cls in (Cast, Exact)}
