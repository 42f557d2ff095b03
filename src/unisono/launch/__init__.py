"""Who am I among the workers, and how do I start the others?"""

from unisono.launch.claim import claim, identity_here
from unisono.launch.coordination import Coordination
from unisono.launch.failure import ScriptExited
from unisono.launch.forkserver import Forkserver
from unisono.launch.identity import Identity, identify
from unisono.launch.local import PRELOAD, Elastic, ask, launch, prepare
from unisono.launch.script import launch_script
from unisono.launch.stopping import Interrupted, StopRequest
from unisono.launch.worker import Report, Worker

__all__ = [
    "PRELOAD",
    "Coordination",
    "Elastic",
    "Forkserver",
    "Identity",
    "Interrupted",
    "Report",
    "ScriptExited",
    "StopRequest",
    "Worker",
    "ask",
    "claim",
    "identify",
    "identity_here",
    "launch",
    "launch_script",
    "prepare",
]
