"""How replicas agree: one algorithm per file, beside its paper."""

from unisono.sync.all_reduce import AllReduce as AllReduce
from unisono.sync.block_momentum import BlockMomentum as BlockMomentum
from unisono.sync.diloco import DiLoCo as DiLoCo
from unisono.sync.gossip import Gossip as Gossip
from unisono.sync.local_gradients import LocalGradients as LocalGradients
from unisono.sync.local_sgd import LocalSGD as LocalSGD
from unisono.sync.outer_optimizer import OUTER as OUTER
from unisono.sync.outer_optimizer import Average as Average
from unisono.sync.outer_optimizer import Momentum as Momentum
from unisono.sync.outer_optimizer import Nesterov as Nesterov
from unisono.sync.parameter_server import ParameterServer as ParameterServer
from unisono.sync.periodic import Periodic as Periodic
from unisono.sync.server import COMPENSATIONS as COMPENSATIONS
from unisono.sync.server import ELEMENTWISE as ELEMENTWISE
from unisono.sync.server import DelayCompensation as DelayCompensation
from unisono.sync.server import ScaledByStaleness as ScaledByStaleness
from unisono.sync.synchronizer import BoundSynchronizer as BoundSynchronizer
from unisono.sync.synchronizer import Loop as Loop
from unisono.sync.synchronizer import PendingUpdate as PendingUpdate
from unisono.sync.synchronizer import Synchronizer as Synchronizer
from unisono.sync.synchronizer import WorkItem as WorkItem
from unisono.sync.topology import TOPOLOGIES as TOPOLOGIES
from unisono.sync.topology import Complete as Complete
from unisono.sync.topology import OnePeerExponential as OnePeerExponential
from unisono.sync.topology import RandomPairs as RandomPairs
from unisono.sync.topology import Ring as Ring
from unisono.sync.topology import Topology as Topology
from unisono.sync.topology import Torus as Torus

SYNCHRONIZERS: dict[str, type] = {
    cls.__name__: cls for cls in (AllReduce, LocalSGD, BlockMomentum, DiLoCo, Gossip, ParameterServer)
}
PARTS: dict[str, type] = {**OUTER, **TOPOLOGIES, **COMPENSATIONS}  # written inside values of SYNCHRONIZERS
