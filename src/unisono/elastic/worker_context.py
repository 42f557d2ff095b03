"""What a worker process is given by its launcher, as far as this folder uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from unisono.membership import CoordinatorAddress


class Identity(Protocol):
    """Which of the processes of a run this is."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def rendezvous(self) -> str: ...


class StopFlags(Protocol):
    """What was asked of this worker.

    Attributes:
        requested: all are to stop after the step in hand.
        leaving: this worker alone is to leave.
    """

    @property
    def requested(self) -> bool: ...
    @property
    def leaving(self) -> bool: ...


class Worker(Protocol):
    """As `unisono.launch.WorkerContext`.

    Attributes:
        report: sends a message to the launcher.
        name: that no other process of the run ever has.
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
    """The same for a script whose workers may come and go.

    Attributes:
        contact: of the coordinator.
        first: whether this is one of the processes with which the run began.
    """

    @property
    def worker(self) -> Worker: ...
    @property
    def contact(self) -> CoordinatorAddress: ...
    @property
    def first(self) -> bool: ...

    def leave_when_asked(self) -> None:
        """From now on, SIGTERM asks this worker to leave the others."""

    def interrupt_again(self) -> None:
        """From now on, SIGTERM interrupts the script."""
