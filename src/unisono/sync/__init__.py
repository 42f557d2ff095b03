from unisono.sync.all_reduce import AllReduce as AllReduce
from unisono.sync.local import LocalGradients as LocalGradients
from unisono.sync.synchronizer import BoundSynchronizer as BoundSynchronizer
from unisono.sync.synchronizer import Change as Change
from unisono.sync.synchronizer import Share as Share
from unisono.sync.synchronizer import Synchronizer as Synchronizer

SYNCHRONIZERS: dict[str, type] = {cls.__name__: cls for cls in (AllReduce,)}
