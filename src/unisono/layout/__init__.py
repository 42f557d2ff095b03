"""How one replica is laid out over ranks."""

from unisono.layout.compile_cache import compiled as compiled
from unisono.layout.layout import AXES as AXES
from unisono.layout.layout import DATA_AXES as DATA_AXES
from unisono.layout.layout import LAYOUTS as LAYOUTS
from unisono.layout.layout import SHARDING_AXES as SHARDING_AXES
from unisono.layout.layout import Layout as Layout
from unisono.layout.local_model import LocalModel as LocalModel
from unisono.layout.local_model import MicroBatchContext as MicroBatchContext
from unisono.layout.local_model import Stepping as Stepping
from unisono.layout.local_model import WholeTensors as WholeTensors
from unisono.layout.rank_mesh import MeshCoordinate as MeshCoordinate
from unisono.layout.rank_mesh import RankMesh as RankMesh
from unisono.layout.repeated_blocks import BlockOptions as BlockOptions
from unisono.layout.repeated_blocks import as_it_is as as_it_is
from unisono.layout.repeated_blocks import blocks as blocks
from unisono.layout.sample_batch import Sample as Sample
