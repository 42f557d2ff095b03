"""Start worker processes and supervise them; find out which rank this process is on a cluster."""

from unisono.launch.claim import claim, identity_here
from unisono.launch.cluster_environment import WorkerIdentity, identify
from unisono.launch.coordinator_process import CoordinatorProcess
from unisono.launch.failure import ScriptExited
from unisono.launch.forkserver import Forkserver
from unisono.launch.launcher import PRELOAD, ElasticOptions, ask, launch, prepare
from unisono.launch.script import launch_script
from unisono.launch.stop_request import Interrupted, StopRequest
from unisono.launch.worker_main import ReportChannel, WorkerContext

__all__ = [
    "PRELOAD",
    "CoordinatorProcess",
    "ElasticOptions",
    "Forkserver",
    "Interrupted",
    "ReportChannel",
    "ScriptExited",
    "StopRequest",
    "WorkerContext",
    "WorkerIdentity",
    "ask",
    "claim",
    "identify",
    "identity_here",
    "launch",
    "launch_script",
    "prepare",
]
