"""Observers of a launcher's processes."""

from __future__ import annotations

from collections.abc import Set

from unisono.membership.protocol import StepCount


class NoObserver:
    """An observer that ignores all processes."""

    step_count = StepCount()

    def fetch_step_count(self) -> StepCount:
        return self.step_count

    def others_continue(self, without: Set[str]) -> bool:
        return False

    def process_started(self, worker: str, pid: int) -> None:
        pass

    def process_exited(self, worker: str) -> None:
        pass
