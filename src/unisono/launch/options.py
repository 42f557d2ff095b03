"""Options of a launcher, as values: how workers run, and whether they may join and leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from unisono.launch.coordinator_process import CoordinatorProcess
from unisono.launch.restart_policy import (
    IndependentExit,
    JoinedLauncher,
    ProcessObserver,
    RestartFailed,
    RestartPolicy,
)
from unisono.membership.protocol import CoordinatorAddress

# The first optimizer that a process builds imports torch._dynamo, which takes a second: the fork server does it once.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "numpy", "cloudpickle")


@dataclass(frozen=True)
class LaunchOptions:
    """How the workers of one host run.

    Args:
        logs: directory for ``worker-<rank>.log``.
        workers: number of processes.
        threads: compute threads of a worker.
        preload: modules that the fork server imports before it forks, unless it was started before.
        name: first word of the processes' names in ``ps``.
        echo: receives a copy of worker 0's log while it grows. When another worker reports that it ``speaks``, its log
            follows instead, from the byte that it names.
        stop_seconds: time that workers have to reach a step boundary after Ctrl-C, SIGTERM or SIGHUP, before they are
            killed. A second SIGINT or SIGTERM kills them at once.
        debug_rank: the worker that reads from the launcher's standard input, and whose ``breakpoint()`` has its
            terminal. Default: 0 if it is the only worker.
    """

    logs: Path
    workers: int = 1
    threads: int = 1
    preload: Sequence[str] = PRELOAD
    name: str = "unisono"
    echo: BinaryIO | None = None
    stop_seconds: float = 30.0
    debug_rank: int | None = None


@dataclass(frozen=True)
class ElasticOptions:
    """Options of a launcher that replaces failed workers, and whose workers may leave before the end of the run.

    Args:
        contact: address of the coordinator, which the launcher notifies of processes that have exited.
        coordinator: the coordinator's process, if this launcher supervises it. If it does not, the run may continue
            elsewhere without this launcher's workers.
        launcher: prefix of the names of this launcher's workers, which no other launcher has; empty for the first
            launcher.
        independent_exit: whether each worker continues after the training loop, and exits by itself. If not, the first
            result is the result of the run.
    """

    contact: CoordinatorAddress
    coordinator: CoordinatorProcess | None = None
    launcher: str = ""
    independent_exit: bool = False

    def restart_policy(self, workers: int, observer: ProcessObserver) -> RestartPolicy:
        """The policy that decides about workers that have exited."""
        kind = RestartFailed if self.coordinator else JoinedLauncher
        policy = kind(workers, observer, f"{self.launcher}:" if self.launcher else "")
        # When workers of a launcher that has joined begin, the other workers are in their loop already.
        return IndependentExit(policy, () if self.launcher else range(workers)) if self.independent_exit else policy
