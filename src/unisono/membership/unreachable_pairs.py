"""Workers that could not reach each other, and how long they are kept apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_REMEMBERED = 4  # reports of each worker


@dataclass
class _Report:
    """Of one worker, about the `missed`."""

    missed: frozenset[str]
    until: float
    seconds: float


@dataclass
class UnreachablePairs:
    """Reports of who was missed.

    Where a network falls apart, thousands report the same thousands: a set that many report is held once.

    Args:
        first_seconds: how long the first report of a pair counts; each further one counts twice as long.
    """

    first_seconds: float
    _reports: dict[str, list[_Report]] = field(default_factory=dict)
    _sets: dict[frozenset[str], frozenset[str]] = field(default_factory=dict)

    def note(self, worker: str, missed: Iterable[str], now: float) -> None:
        """`worker` could not reach the `missed`."""
        told = frozenset(missed) - {worker}
        told = self._sets.setdefault(told, told)
        known = self._reports.setdefault(worker, [])
        about_them = [report for report in known if not told.isdisjoint(report.missed)]
        if any(now < report.until and told <= report.missed for report in about_them):
            return
        seconds = max((2 * report.seconds for report in about_them), default=self.first_seconds)
        kept = [report for report in known if not report.missed <= told]
        self._reports[worker] = [*kept, _Report(told, now + seconds, seconds)][-_REMEMBERED:]

    def missing(self, now: float) -> list[tuple[str, frozenset[str]]]:
        """Who still counts as having missed whom."""
        return [
            (worker, report.missed)
            for worker, reports in self._reports.items()
            for report in reports
            if now < report.until
        ]

    def forget(self, workers: Iterable[str]) -> None:
        """They have ended; nobody comes back under their names."""
        for worker in workers:
            self._reports.pop(worker, None)
        in_use = (report.missed for reports in self._reports.values() for report in reports)
        self._sets = {told: told for told in in_use}
