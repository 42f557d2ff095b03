"""Workers that could not reach each other, and for how long they are kept out of one view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_REMEMBERED = 4  # reports of each worker


@dataclass
class _Report:
    """One worker's report that it could not reach the workers `unreachable`; it counts for `seconds`, until `until`."""

    unreachable: frozenset[str]
    until: float
    seconds: float


@dataclass
class UnreachablePairs:
    """Reports of workers about peers that they could not reach.

    When a network splits, thousands of workers report the same thousands of others: equal sets are stored once.

    Args:
        first_seconds: how long the first report of a pair counts; each further report counts twice as long as before.
    """

    first_seconds: float
    _reports: dict[str, list[_Report]] = field(default_factory=dict)
    _sets: dict[frozenset[str], frozenset[str]] = field(default_factory=dict)

    def report(self, worker: str, unreachable: Iterable[str], now: float) -> None:
        """Process the report of `worker` that it could not reach the workers `unreachable`."""
        peers = frozenset(unreachable) - {worker}
        peers = self._sets.setdefault(peers, peers)
        known = self._reports.setdefault(worker, [])
        overlapping = [report for report in known if not peers.isdisjoint(report.unreachable)]
        if any(now < report.until and peers <= report.unreachable for report in overlapping):
            return
        seconds = max((2 * report.seconds for report in overlapping), default=self.first_seconds)
        kept = [report for report in known if not report.unreachable <= peers]
        self._reports[worker] = [*kept, _Report(peers, now + seconds, seconds)][-_REMEMBERED:]

    def active_reports(self, now: float) -> list[tuple[str, frozenset[str]]]:
        """Pairs of a worker and the peers that it could not reach, of all reports that still count."""
        return [
            (worker, report.unreachable)
            for worker, reports in self._reports.items()
            for report in reports
            if now < report.until
        ]

    def forget(self, workers: Iterable[str]) -> None:
        """Forget workers that have exited; their names are never used again."""
        for worker in workers:
            self._reports.pop(worker, None)
        in_use = (report.unreachable for reports in self._reports.values() for report in reports)
        self._sets = {peers: peers for peers in in_use}
