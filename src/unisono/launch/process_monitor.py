"""Reports to the coordinator which worker processes of a launcher run, compute or have exited."""

from __future__ import annotations

from collections.abc import Set
from contextlib import ExitStack

from unisono.launch.cpu_liveness import CpuMonitor
from unisono.launch.exit_notifier import ExitNotifier
from unisono.launch.remaining import others_continue
from unisono.membership.protocol import CoordinatorAddress, StepCount


class ProcessMonitor:
    """A `ProcessObserver` that reports to a coordinator; a context manager.

    Raises:
        InvalidInput: as for `HttpConnection`.
    """

    def __init__(self, contact: CoordinatorAddress) -> None:
        self._contact, self._stack = contact, ExitStack()
        self._exit_notifier = self._stack.enter_context(ExitNotifier(contact))
        self._cpu_monitor = self._stack.enter_context(CpuMonitor(contact))

    @property
    def step_count(self) -> StepCount:
        """See `ProcessObserver`."""
        return self._cpu_monitor.step_count

    def fetch_step_count(self) -> StepCount:
        """See `ProcessObserver`."""
        return self._cpu_monitor.fetch_step_count()

    def others_continue(self, without: Set[str]) -> bool:
        """See `ProcessObserver`."""
        return others_continue(self._contact, without)

    def process_started(self, worker: str, pid: int) -> None:
        """See `ProcessObserver`."""
        self._cpu_monitor.process_started(worker, pid)

    def process_exited(self, worker: str) -> None:
        """See `ProcessObserver`."""
        self._cpu_monitor.process_exited(worker)
        self._exit_notifier.notify(worker)

    def __enter__(self) -> ProcessMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
