"""One coordinator with thousands of workers: response time of heartbeats, time of a view change, memory.

The coordinator is one process; the workers' half of the protocol is another on the same machine. The CPU share of the
latter is recorded as `generator_cpu`, where 1 is a whole core; its delays count against the coordinator. A worker is
killed and its launcher reports that. Measured is the time until the last of the other workers has joined the new view.
The peer is the target itself: run this on an idle machine.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.harness import SCRIPTS, Claim, Ran, Spread, Verdict

ANSWER_MS, CHANGE_SECONDS, MEMORY_MIB = 50.0, 2.0, 300.0


def command(workers: int) -> list[str]:
    """A coordinator and so many workers."""
    return [sys.executable, str(SCRIPTS / "coordinator_load.py"), "--workers", str(workers)]


def verdicts(ran: Sequence[Ran]) -> list[Verdict]:
    """What is claimed of it."""
    reports = [each.report for each in ran]
    figures = (
        ("p99 of the response to a heartbeat: ms against the target", "ms", ANSWER_MS,
         [each["answer_ms"]["p99"] for each in reports]),
        ("a death until the last worker has joined the new view, the longest of each run: s against the target",
         "s", CHANGE_SECONDS, [max(change["seconds"] for change in each["changes"]) for each in reports]),
        ("memory of the coordinator's process, at most: MiB against the target", "MiB", MEMORY_MIB,
         [each["server_mib"] for each in reports]),
    )  # fmt: skip
    return [
        Verdict(Claim(text, 1.0, at_least=False), "the target", unit, found, [target] * len(found))
        for text, unit, target, found in figures
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=3)
    parser.add_argument("--workers", type=int, default=4096, help="that send heartbeats (4096)")
    asked = parser.parse_args(arguments)
    ran = harness.interleave({"heartbeats": functools.partial(harness.run, command(asked.workers))}, asked.repeats)[
        "heartbeats"
    ]
    reports = [each.report for each in ran]
    for figure in ("beats_per_second", "server_cpu", "generator_cpu"):
        print(f"{figure:24} {Spread.of([each['steady'][figure] for each in reports])}")
    print(f"{'late answers p99 ms':24} {Spread.of([each['overshoot_ms']['p99'] for each in reports])}")
    return harness.conclude("coordinator", verdicts(ran), asked.json, reports=reports)


if __name__ == "__main__":
    raise SystemExit(main())
