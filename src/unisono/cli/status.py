"""``unisono status``: shows the workers of a run, their progress, and recent events."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli.argument_words import option_table, read_options
from unisono.cli.join import address_from
from unisono.cli.token import VARIABLE
from unisono.errors import InvalidInput, printable
from unisono.membership.contact_file import CONTACT, DIRECTORY
from unisono.membership.http_client import fetch
from unisono.membership.messages import StatusMessage, WorkerMessage
from unisono.membership.protocol import View, ViewStatus
from unisono.observe.activity import Activity
from unisono.observe.formatting import duration
from unisono.observe.goodput import time_report
from unisono.observe.record_files import SUMMARY

if TYPE_CHECKING:
    from rich.table import Table

USAGE = f"""\
usage: unisono status URL [options]
       unisono status --run-dir DIR

Show the workers of a run: the step of each, the line of your code where it is, and how it has spent its time. Also show
recent events. URL is that of the run's coordinator, whose token is in {VARIABLE}; a run directory DIR contains both.
For a run that has ended, show how its time was spent.

  --run-dir DIR      the directory of a run on this host
  --token-file FILE  file with the token, instead of {VARIABLE}
  --authority FILE   the authority's certificate that has signed the coordinator's certificate, or the fingerprint that
                     the coordinator has printed (sha256:...); none: plain http:// to another host, not encrypted
  --json             print the coordinator's answer as JSON
"""
_RECENT = 12  # events that are shown


def status(words: list[str]) -> int:
    """Run ``unisono status`` with the arguments `words`; 0 when the status is printed.

    Raises:
        UnisonoError: the arguments are invalid, or the coordinator does not answer.
    """
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    options, rest = read_options(words, option_table(USAGE))
    if "--run-dir" in options and not rest and (summary := _summary(Path(options["--run-dir"]))):
        print(json.dumps(summary, indent=2) if "--json" in options else "\n".join(_ended(summary)))
        return 0
    address = address_from(options, rest, "status")
    status = fetch(address, "/v1/status", StatusMessage)
    if status is None:
        raise InvalidInput(
            "coordinator", address.url, "what responds there is not a coordinator of this version", "check the address"
        )
    if "--json" in options:
        print(status.json_text(indent=2))
    else:
        _print(status)
    return 0


def _summary(run: Path) -> Mapping[str, Any] | None:
    """The summary of the run in directory `run`, if it has ended; else None."""
    if (run / DIRECTORY / CONTACT).exists():
        return None
    try:
        summary: Mapping[str, Any] = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary


def _ended(summary: Mapping[str, Any]) -> list[str]:
    spent = {str(rank): seconds for rank, seconds in enumerate(summary.get("ledger", []))}
    heading = f"the run has ended after {duration(summary['wall_seconds'])}, {printable(str(summary['ending']))}"
    return [heading, "", *time_report(spent)]


def _print(status: StatusMessage) -> None:
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    console.print(heading(status.view, status.status, len(status.workers)), style="bold", markup=False)
    if status.workers:
        console.print()
        console.print(_table(status))
    spent = {worker: {phase.value: s for phase, s in seconds.items()} for worker, seconds in status.spent.items()}
    parts = {"seconds of each worker": time_report({worker: each for worker, each in spent.items() if each}),
             "stalls": status.findings[-_RECENT:], "recent events": list(_recent_events(status))}  # fmt: skip
    for title, lines in parts.items():
        if lines:
            console.print(f"\n{title}", style="bold")
        for line in lines:
            console.print(f"  {line}", markup=False, soft_wrap=True)


_STATUS_TEXT = {
    ViewStatus.ACTIVE: "active",
    ViewStatus.ENDING_AT_BOUNDARY: "ends after the current step",
    ViewStatus.ABORTED: "ended, the next one is being formed",
    ViewStatus.BELOW_MINIMUM: "ended, waiting for more workers",
    ViewStatus.FINISHED: "training is complete",
}


def heading(view: View, status: ViewStatus, workers: int = 0) -> str:
    """The current view in one sentence; before the first view, the number of `workers` that have registered."""
    if not view.number:
        return f"no view yet; workers: {workers}"
    start = f"from step {view.start.step:,}" if view.sources else "from the last checkpoint"
    count = f"{len(view.members)} worker" + ("s" if len(view.members) != 1 else "")
    return f"view {view.number}: {count} {start}; {_STATUS_TEXT[status]}"


def _table(status: StatusMessage) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    titles = ["worker", "state", "step", "heartbeat"] + (["activity"] if _has_activities(status) else [])
    for title in titles:
        table.add_column(title, justify="right" if title in ("step", "heartbeat") else "left")
    for worker in status.workers:
        cells = _row(status.view, worker)
        table.add_row(*map(escape, cells[: len(titles)]))
    return table


def _has_activities(status: StatusMessage) -> bool:
    return any(worker.activity for worker in status.workers)


def _row(view: View, worker: WorkerMessage) -> list[str]:
    activity = _activity(worker.activity) if worker.activity else ""
    heartbeat = f"{worker.age_seconds:.1f} s ago"
    return [worker.worker, _state(view, worker), f"{worker.step:,}", heartbeat, activity]


def _activity(activity: Activity) -> str:
    return f"{activity.description} for {duration(activity.since_seconds)}{activity.location}"


def _state(view: View, worker: WorkerMessage) -> str:
    if worker.leaving:
        return "leaving"
    if worker.worker not in view.members:
        return "spare"
    return f"in view {worker.active_view}" if worker.active_view else "between views"


def _recent_events(status: StatusMessage) -> Iterator[str]:
    for event in status.decisions[-_RECENT:]:
        yield f"{time.strftime('%H:%M:%S', time.localtime(event.at_seconds))}  {event.text}"
