"""A coordinator and thousands of workers that beat at it: what an answer takes, a change of view, and its memory.

The coordinator is a process of its own, the workers' halves of the protocol are another; both are on this machine, and
what the second one costs is in the record (`generator_cpu`, where 1 is a core that it has for itself; what it is late
counts against the coordinator). A worker is killed, and its launcher says so: until the last of the others has met the
new view. The peer is the target itself: run this where nothing else runs.
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
        ("p99 of the answer to a beat: ms against the target", "ms", ANSWER_MS,
         [each["answer_ms"]["p99"] for each in reports]),
        ("a death until the last of the others has met the new view, the longest of each run: s against the target",
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
    parser.add_argument("--workers", type=int, default=4096, help="that beat (4096)")
    asked = parser.parse_args(arguments)
    ran = harness.interleave({"beats": functools.partial(harness.run, command(asked.workers))}, asked.repeats)["beats"]
    reports = [each.report for each in ran]
    for figure in ("beats_per_second", "server_cpu", "generator_cpu"):
        print(f"{figure:24} {Spread.of([each['steady'][figure] for each in reports])}")
    print(f"{'late answers p99 ms':24} {Spread.of([each['overshoot_ms']['p99'] for each in reports])}")
    return harness.conclude("coordinator", verdicts(ran), asked.json, reports=reports)


if __name__ == "__main__":
    raise SystemExit(main())
