"""Protocols of what a worker process receives from its launcher, as far as this folder uses that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from unisono.membership import CoordinatorAddress


class Identity(Protocol):
    """The rank of this process among those of its run, and where they rendezvous."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def rendezvous(self) -> str: ...


class StopFlags(Protocol):
    """Requests to this worker.

    Attributes:
        requested: all workers are to stop after the current step.
        leaving: only this worker is to leave.
    """

    @property
    def requested(self) -> bool: ...
    @property
    def leaving(self) -> bool: ...


class Worker(Protocol):
    """The part of `unisono.launch.WorkerContext` that this folder uses.

    Attributes:
        report: sends a message to the launcher.
        name: unique among all processes of the run, including former ones.
    """

    @property
    def identity(self) -> Identity: ...
    @property
    def report(self) -> Callable[[Mapping[str, Any]], None]: ...
    @property
    def stop(self) -> StopFlags: ...
    @property
    def name(self) -> str: ...


class ElasticWorker(Protocol):
    """A worker of an elastic script.

    Attributes:
        contact: the address of the coordinator.
        first: whether this is one of the processes with which the run started.
    """

    @property
    def worker(self) -> Worker: ...
    @property
    def contact(self) -> CoordinatorAddress: ...
    @property
    def first(self) -> bool: ...

    def leave_when_asked(self) -> None:
        """From now on, SIGTERM asks this worker to leave the group."""

    def interrupt_again(self) -> None:
        """From now on, SIGTERM interrupts the script."""
