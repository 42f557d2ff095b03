"""Seconds from the command to the end of the first step: ``unisono launch`` against ``torchrun``.

Both run the same script on the same number of workers (`scripts/ddp_loop.py`), with a cold start every time. The clock
runs from the spawn of the command to the end of rank 0's first step, which needs the gradients of all workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import harness
from benchmarks.harness import BIN, SCRIPTS, Claim, Ran, Verdict

TARGET = 0.4


def command(way: str, workers: int) -> list[str]:
    """What a user would type."""
    start = {
        "ddp": [str(BIN / "torchrun"), f"--nproc-per-node={workers}", f"--master-port={harness.free_port()}"],
        "unisono": [str(BIN / "unisono"), "launch", f"--workers={workers}"],
    }[way]
    return [*start, str(SCRIPTS / "ddp_loop.py"), way]


def first_step_seconds(ran: Ran) -> float:
    """From the spawn to the end of the first step."""
    return float(ran.report["first_step_at_seconds"]) - ran.spawned_seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=5)
    parser.add_argument("--workers", type=int, default=4)
    asked = parser.parse_args(arguments)
    ways = ("unisono", "ddp")
    ran = harness.interleave(
        {way: lambda way=way: harness.run(command(way, asked.workers)) for way in ways}, asked.repeats
    )
    claim = Claim(f"{asked.workers} workers: time from command to first step", TARGET, at_least=False)
    times = [[first_step_seconds(r) for r in ran[way]] for way in ways]
    whole = {way: [r.whole_seconds for r in ran[way]] for way in ways}
    verdict = Verdict(claim, "torchrun DDP on gloo", "s", *times)
    return harness.conclude("startup", [verdict], asked.json, whole_seconds=whole)


if __name__ == "__main__":
    raise SystemExit(main())
