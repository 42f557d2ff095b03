from unisono.compress.cast import Cast as Cast
from unisono.compress.compressor import Compressor as Compressor
from unisono.compress.compressor import Mean as Mean
from unisono.compress.compressor import Memory as Memory
from unisono.compress.exact import Exact as Exact

COMPRESSORS: dict[str, type] = {cls.__name__: cls for cls in (Cast, Exact)}
