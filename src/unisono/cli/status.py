"""``unisono status``: who takes part in a run, how far each is, and what happened lately."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli.argument_words import read
from unisono.cli.join import REACHING, reached
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

Say who takes part in a run, how far each is, what it does on which line of your code, where its time went, and what
happened lately. URL is that of the run's coordinator, whose token {VARIABLE} holds; a run that lies in DIR says both
itself, and, once it is over, where the time went.

  --token-file FILE  holds the token, in place of {VARIABLE}
  --authority FILE   certificate by which an https:// coordinator is known
  --json             as the coordinator says it
"""
_LATELY = 12  # of what happened


def status(words: list[str]) -> int:
    """Run the words after ``unisono status``; 0 when everything is said.

    Raises:
        UnisonoError: what was written cannot work, or nobody answers.
    """
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    options, rest = read(words, dict.fromkeys(REACHING, True) | {"--json": False})
    if "--run-dir" in options and not rest and (over := _summary(Path(options["--run-dir"]))):
        print(json.dumps(over, indent=2) if "--json" in options else "\n".join(_ended(over)))
        return 0
    where = reached(options, rest, "status")
    told = fetch(where, "/v1/status", StatusMessage)
    if told is None:
        raise InvalidInput("coordinator", where.url, "it is none, or of another version", "check the address")
    if "--json" in options:
        print(told.json_text(indent=2))
    else:
        _print(told)
    return 0


def _summary(run: Path) -> Mapping[str, Any] | None:
    """Of a run that has come to its end."""
    if (run / DIRECTORY / CONTACT).exists():
        return None
    try:
        found: Mapping[str, Any] = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _ended(summary: Mapping[str, Any]) -> list[str]:
    spent = {str(rank): seconds for rank, seconds in enumerate(summary.get("ledger", []))}
    over = f"the run has ended after {duration(summary['wall_seconds'])}, {printable(str(summary['ending']))}"
    return [over, "", *time_report(spent)]


def _print(told: StatusMessage) -> None:
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    console.print(heading(told.view, told.status, len(told.workers)), style="bold", markup=False)
    if told.workers:
        console.print()
        console.print(_table(told))
    spent = {worker: {phase.value: s for phase, s in seconds.items()} for worker, seconds in told.spent.items()}
    parts = {"seconds of each worker's life": time_report({worker: each for worker, each in spent.items() if each}),
             "what held it up": told.findings[-_LATELY:], "lately": list(_lately(told))}  # fmt: skip
    for title, lines in parts.items():
        if lines:
            console.print(f"\n{title}", style="bold")
        for line in lines:
            console.print(f"  {line}", markup=False, soft_wrap=True)


_GOES_ON = {
    ViewStatus.ACTIVE: "it goes on",
    ViewStatus.ENDING_AT_BOUNDARY: "it ends after the step in hand",
    ViewStatus.ABORTED: "it is over, and the next one is awaited",
    ViewStatus.BELOW_MINIMUM: "it is over, and more workers are awaited",
    ViewStatus.FINISHED: "all is trained",
}


def heading(view: View, over: ViewStatus, here: int = 0) -> str:
    """The view at hand in one sentence; of a run that has none yet, how many workers are `here`."""
    if not view.number:
        return f"no view yet: {here} workers are here"
    begun = f"from step {view.start.step:,}" if view.sources else "from what was kept"
    count = f"{len(view.members)} worker" + ("s" if len(view.members) != 1 else "")
    return f"view {view.number}: {count} {begun}; {_GOES_ON[over]}"


def _table(told: StatusMessage) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    titles = ["worker", "is", "step", "heard"] + (["does"] if _knows_doings(told) else [])
    for title in titles:
        table.add_column(title, justify="right" if title in ("step", "heard") else "left")
    for worker in told.workers:
        cells = _row(told.view, worker)
        table.add_row(*map(escape, cells[: len(titles)]))
    return table


def _knows_doings(told: StatusMessage) -> bool:
    return any(worker.activity for worker in told.workers)


def _row(view: View, worker: WorkerMessage) -> list[str]:
    does = _does(worker.activity) if worker.activity else ""
    silent = f"{worker.age_seconds:.1f} s ago"
    return [worker.worker, _is(view, worker), f"{worker.step:,}", silent, does]


def _does(activity: Activity) -> str:
    return f"{activity.description} for {duration(activity.since_seconds)}{activity.location}"


def _is(view: View, worker: WorkerMessage) -> str:
    if worker.leaving:
        return "leaving"
    if worker.worker not in view.members:
        return "standing by"
    return f"in view {worker.active_view}" if worker.active_view else "between views"


def _lately(told: StatusMessage) -> Iterator[str]:
    for each in told.decisions[-_LATELY:]:
        yield f"{time.strftime('%H:%M:%S', time.localtime(each.at_seconds))}  {each.text}"
