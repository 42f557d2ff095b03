"""What a launcher sees of its workers' processes, told to the coordinator."""

from __future__ import annotations

from collections.abc import Set
from contextlib import ExitStack

from unisono.launch.cpu_liveness import CpuMonitor
from unisono.launch.exit_notifier import ExitNotifier
from unisono.launch.remaining import goes_on
from unisono.membership.protocol import CoordinatorAddress, StepCount


class ProcessMonitor:
    """A `Present` that tells it. A context.

    Raises:
        InvalidInput: as `HttpConnection`.
    """

    def __init__(self, contact: CoordinatorAddress) -> None:
        self._contact, self._stack = contact, ExitStack()
        self._gone = self._stack.enter_context(ExitNotifier(contact))
        self._vouching = self._stack.enter_context(CpuMonitor(contact))

    @property
    def count(self) -> StepCount:
        """See `Present`."""
        return self._vouching.count

    def latest(self) -> StepCount:
        """See `Present`."""
        return self._vouching.latest()

    def goes_on(self, without: Set[str]) -> bool:
        """See `Present`."""
        return goes_on(self._contact, without)

    def began(self, worker: str, pid: int) -> None:
        """See `Present`."""
        self._vouching.began(worker, pid)

    def ended(self, worker: str) -> None:
        """See `Present`."""
        self._vouching.ended(worker)
        self._gone.tell(worker)

    def __enter__(self) -> ProcessMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
