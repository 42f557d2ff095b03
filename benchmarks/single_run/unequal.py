"""Two workers, one limited to 40 % of a core: the share of the sum of their own speeds that training reaches.

A control group limits each worker's CPU time (Linux, version 1, controller ``cpu``; root). In every repeat each worker
is also measured alone, in a plain loop under the same limit; the sum of both is the upper bound. The last steps count,
when allocations have adapted. All micro-batches of a step count, on either worker.

In exact mode the weights after the last step must have the same bits, with allocation by speed and without.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.harness import BIN, SCRIPTS, Claim, Spread, Verdict
from benchmarks.netlab.errors import Unavailable
from benchmarks.single_run.layout_memory import groups

KEPT, AGAINST_DDP = 0.92, 1.6  # DDP can reach twice the slower one: 0.8 of 1.4 at 40 %
FAST, SLOW, DDP = "fast worker alone", "slow worker alone", "DDP"
BALANCED, ALIKE = "shares by speed", "equal shares"
EXACT, EXACT_ALIKE = "shares by speed, exact", "equal shares, exact"
TIMED = 10  # steps
Report = Mapping[str, Any]


def run(command: Sequence[str], quotas: Sequence[float], asked: argparse.Namespace, steps: int) -> Report:
    """What `scripts/unequal_cores.py` reports, of one worker per quota."""
    with groups("cpu") as group:
        options = [
            f"--groups={group}", f"--quotas={','.join(map(str, quotas))}", f"--steps={steps}", f"--timed={TIMED}",
            f"--micro-batches={asked.micro_batches}", f"--micro-batch={asked.micro_batch}",
        ]  # fmt: skip
        return harness.run([*command, *options], timeout_seconds=600.0).report


def ways(asked: argparse.Namespace) -> dict[str, Callable[[], Report]]:
    """All that is measured in a repeat."""
    script, fast, slow = str(SCRIPTS / "unequal_cores.py"), asked.cores, asked.cores * asked.slowed_to
    here, both, few = [str(BIN / "python"), script], [fast, slow], TIMED + 2
    ours = lambda steps, *options: functools.partial(run, [*here, "unisono", *options], both, asked, steps)
    together = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", script, "ddp"]
    return {
        FAST: functools.partial(run, [*here, "alone"], [fast], asked, few),
        SLOW: functools.partial(run, [*here, "alone"], [slow], asked, few),
        BALANCED: ours(asked.steps, "--balance=on"),
        ALIKE: ours(few, "--balance=off"),
        DDP: functools.partial(run, together, both, asked, few),
        EXACT: ours(asked.steps, "--compress=Exact()"),
        EXACT_ALIKE: ours(asked.steps, "--compress=Exact()", "--balance=off"),
    }


def judged(speeds: Mapping[str, Sequence[float]]) -> list[Verdict]:
    """The claims, from samples per second."""
    total = [f + s for f, s in zip(speeds[FAST], speeds[SLOW], strict=True)]
    against_sum = Claim("two workers, one at 40 % of its CPU: samples/s against the sum of their own speeds", KEPT)
    against_ddp = Claim("the same against DDP", AGAINST_DDP)
    return [
        Verdict(against_sum, "the sum of plain loops", "samples/s", speeds[BALANCED], total),
        Verdict(against_ddp, "DDP on gloo", "samples/s", speeds[BALANCED], speeds[DDP]),
    ]


def print_speeds(speeds: Mapping[str, Sequence[float]]) -> None:
    """All ways, against the sum."""
    total = [f + s for f, s in zip(speeds[FAST], speeds[SLOW], strict=True)]
    print(f"\nsum of the workers' own speeds: {Spread.of(total)} samples/s")
    for name, each in speeds.items():
        share = Spread.of([speed / whole for speed, whole in zip(each, total, strict=True)])
        print(f"  {name:24}  {Spread.of(each)} samples/s  {share} of the sum")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=5)
    parser.add_argument("--steps", type=int, default=40, help="of runs whose shares follow")
    parser.add_argument("--micro-batches", type=int, default=28, help="of a step, over both workers")
    parser.add_argument("--micro-batch", type=int, default=2, help="windows that a worker computes at once")
    parser.add_argument("--cores", type=float, default=1.0, help="what a worker may use of a core")
    parser.add_argument("--slowed-to", type=float, default=0.4, help="the slow one's part of that")
    asked = parser.parse_args(arguments)
    try:
        reports = harness.interleave(ways(asked), asked.repeats)
    except Unavailable as reason:
        print(f"not measured: {reason}")
        return 0
    speeds = {name: [each["samples_per_second"] for each in found] for name, found in reports.items()}
    print_speeds(speeds)
    hashes = {each["weights_sha256"] for name in (EXACT, EXACT_ALIKE) for each in reports[name]}
    code = harness.conclude(
        "unequal", judged(speeds), asked.json, sizes={k: v for k, v in vars(asked).items() if k != "json"},
        figures=speeds, shares={name: [each["shares"] for each in reports[name]] for name in (BALANCED, EXACT)},
        exact_weights_sha256=sorted(hashes))  # fmt: skip
    print(f"the same weights in exact mode: {'PASS' if len(hashes) == 1 else 'FAIL'}")
    return code or (0 if len(hashes) == 1 else 1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main())
