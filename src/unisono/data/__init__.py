"""Which sample is on which rank, in which order, and how it is loaded."""

from unisono.data.assignment import assign as assign
from unisono.data.assignment import check_enough as check_enough
from unisono.data.load_modes import LOADERS as LOADERS
from unisono.data.load_modes import Inline as Inline
from unisono.data.load_modes import Load as Load
from unisono.data.load_modes import Processes as Processes
from unisono.data.load_modes import Threads as Threads
from unisono.data.loader import Loader as Loader
from unisono.data.loader import WorkItem as WorkItem
from unisono.data.micro_batch_plan import MicroBatchPlan as MicroBatchPlan
from unisono.data.micro_batch_plan import default_micro_batch as default_micro_batch
from unisono.data.permutation import Permutation as Permutation
from unisono.data.random_streams import seed_compute as seed_compute
from unisono.data.random_streams import seed_load as seed_load
from unisono.data.random_streams import stream as stream
from unisono.data.work_shares import MicroBatchAllocation as MicroBatchAllocation
from unisono.data.work_shares import PaceHistory as PaceHistory
from unisono.data.work_shares import most_ahead as most_ahead
from unisono.data.work_shares import slowness as slowness
