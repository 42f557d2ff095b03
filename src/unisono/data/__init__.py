from unisono.data.load import LOADERS as LOADERS
from unisono.data.load import Inline as Inline
from unisono.data.load import Load as Load
from unisono.data.load import Processes as Processes
from unisono.data.load import Threads as Threads
