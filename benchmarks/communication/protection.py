"""Cost of authenticating and encrypting the frames between a client and an actor, over loopback TCP.

A client sends 40 MB to an actor, which adds them and answers with the sum. Each process has its own core, or both share
one. The peer is the same code without protection, in the same run. A network of 10 Gbit/s carries 1.25 GB/s.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.harness import SCRIPTS, Claim, Spread, Verdict

WAYS = ("none", "authenticated", "encrypted")


def command(way: str, shared: bool) -> list[str]:
    """One client and one actor."""
    return [sys.executable, str(SCRIPTS / "protected_exchange.py"), "--way", way, *(["--shared"] if shared else [])]


def main(arguments: Sequence[str] | None = None) -> int:
    asked = harness.parser(__doc__, repeats=5).parse_args(arguments)
    ways = {
        f"{way}, {'one core for both' if shared else 'one core each'}": functools.partial(
            harness.run, command(way, shared)
        )
        for shared in (False, True)
        for way in WAYS
    }
    ran = harness.interleave(ways, asked.repeats)
    reports = {way: [each.report for each in found] for way, found in ran.items()}
    for way, found in reports.items():
        for figure in found[0]:
            print(f"{way:34} {figure:24} {Spread.of([each[figure] for each in found])}")
    rates = {way: [each["gigabytes_per_second"] for each in found] for way, found in reports.items()}
    claim = Claim("40 MB pushed and pulled, authenticated: GB/s against bare frames", 0.85)
    verdict = Verdict(claim, "bare frames", "GB/s", rates["authenticated, one core each"], rates["none, one core each"])
    return harness.conclude("protection", [verdict], asked.json, reports=reports)


if __name__ == "__main__":
    raise SystemExit(main())
