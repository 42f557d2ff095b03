"""An actor behind sockets on this machine: round trips of 4 KB, and 40 MB sent and returned by two workers at once.

Connections are authenticated as in any run. Two actors are measured: one answers with the tensor that it holds, the
other adds the message to it first. The peer is the target itself, a figure that does not depend on the machine: run
this on an idle machine.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.harness import SCRIPTS, Claim, Ran, Spread, Verdict

ROUND_TRIP_MICROSECONDS = 100.0
GIGABYTES_PER_SECOND = 3.0


def command(adds: bool) -> list[str]:
    """One group of two workers and a server."""
    return [sys.executable, str(SCRIPTS / "actor_exchange.py"), *(["--adds"] if adds else [])]


def verdicts(ran: Sequence[Ran]) -> list[Verdict]:
    """What is claimed of a server that only answers."""
    trips = [each.report["round_trip_microseconds"] for each in ran]
    rates = [each.report["gigabytes_per_second"] for each in ran]
    quick = Claim("4 KB there and back: median us against the target", 1.0, at_least=False)
    much = Claim("40 MB pushed and pulled by 2 workers: GB/s in total against the target", 1.0)
    return [
        Verdict(quick, "the target", "us", trips, [ROUND_TRIP_MICROSECONDS] * len(ran)),
        Verdict(much, "the target", "GB/s", rates, [GIGABYTES_PER_SECOND] * len(ran)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    asked = harness.parser(__doc__, repeats=5).parse_args(arguments)
    ways = {name: functools.partial(harness.run, command(adds)) for name, adds in (("holds", False), ("adds", True))}
    ran = harness.interleave(ways, asked.repeats)
    reports = {way: [each.report for each in ran[way]] for way in ways}
    for way, found in reports.items():
        for figure in found[0]:
            print(f"{way:6} {figure:28} {Spread.of([each[figure] for each in found])}")
    return harness.conclude("actor_round_trip", verdicts(ran["holds"]), asked.json, reports=reports)


if __name__ == "__main__":
    raise SystemExit(main())
