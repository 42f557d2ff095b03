"""Starts worker processes and supervises them; finds out which rank this process has on a cluster."""

from unisono.launch.claim import claim_identity, current_identity
from unisono.launch.cluster_environment import WorkerIdentity, identify
from unisono.launch.coordinator_process import CoordinatorProcess
from unisono.launch.failure import ScriptExited
from unisono.launch.forkserver import ForkServer
from unisono.launch.launcher import call_in_worker, launch, start_fork_server
from unisono.launch.options import PRELOAD, ElasticOptions, LaunchOptions
from unisono.launch.script import launch_script
from unisono.launch.stop_request import Interrupted, StopRequest
from unisono.launch.worker_main import ReportChannel, WorkerContext

__all__ = [
    "PRELOAD",
    "CoordinatorProcess",
    "ElasticOptions",
    "ForkServer",
    "Interrupted",
    "LaunchOptions",
    "ReportChannel",
    "ScriptExited",
    "StopRequest",
    "WorkerContext",
    "WorkerIdentity",
    "call_in_worker",
    "claim_identity",
    "current_identity",
    "identify",
    "launch",
    "launch_script",
    "start_fork_server",
]
