"""Useful steps per second while a worker is killed every ten seconds.

Three workers train for `--seconds`. Every `--every` seconds one of them, chosen at random, is killed by SIGKILL.
Measured is how many steps are in the weights at the end. The reference is what the workers present would have done:
steps per second of three workers, and of two while one is missing (from its death until its replacement has started),
as runs without failures show them in the same repeat. The peer is torchrun under the same schedule: restarts, a
checkpoint every 20 steps, DDP on gloo (`scripts/torchrun_torchft.py`).

At the end, the weights themselves show which samples are missing or were used more than once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.elasticity.killed_training import TORCHFT, TORCHRUN, UNISONO, WORKERS, ProcessTrace, Training, started
from benchmarks.harness import Claim, Spread, Verdict

BASELINE, BASELINE_FEWER = "unisono without faults", "unisono without faults, one worker less"
KEPT = 0.9
PATIENCE_SECONDS = 120.0
Figures = Mapping[str, Any]


def furthest(traces: Sequence[ProcessTrace], at: float) -> int:
    """The largest number of steps in the weights of any worker by then."""
    return max((step.number for trace in traces for step in trace.steps if step.at <= at), default=0)


def missing_seconds(traces: Sequence[ProcessTrace], deaths: Sequence[float], end: float) -> float:
    """The total time until `end` in which a process was missing: from each death until the next start."""
    births = sorted(trace.born for trace in traces)
    return sum(min([end, *(born for born in births if born > death)]) - death for death in deaths)


def baseline(workers: int, seconds: float) -> Figures:
    """Steps per second without failures."""
    with started(UNISONO, workers=workers) as training:
        training.until(training.complete, PATIENCE_SECONDS)
        began = time.monotonic()
        time.sleep(seconds)
        traces = training.traces()
    return {"steps_per_second": (furthest(traces, began + seconds) - furthest(traces, began)) / seconds}


def with_failures(way: str, asked: argparse.Namespace) -> Figures:
    """One run under the schedule, which is the same for all."""
    chances = random.Random(asked.seed)
    with started(way, torchft=asked.torchft) as training:
        training.until(training.complete, PATIENCE_SECONDS)
        began = time.monotonic()
        deaths = _kill(training, began, asked, chances)
        end = began + asked.seconds
        time.sleep(max(0.0, end - time.monotonic()))
        traces = training.traces()
        steps, lacking, repeated = training.tally(PATIENCE_SECONDS)
    useful = furthest(traces, end) - furthest(traces, began)
    return {
        "useful_steps": useful,
        "steps_per_second": useful / asked.seconds,
        "failures": len(deaths),
        "missing_seconds": missing_seconds(traces, deaths, end),
        "steps": steps,
        "missing": lacking,
        "repeated": repeated,
    }


def _kill(training: Training, began: float, asked: argparse.Namespace, chances: random.Random) -> list[float]:
    """Kills a worker at each due time at which one is present; the times."""
    deaths = []
    for due in range(1, int(asked.seconds / asked.every)):
        time.sleep(max(0.0, began + due * asked.every - time.monotonic()))
        if training.present(steps=0):
            deaths.append(training.signal_one(signal.SIGKILL, chances, steps=0)[1])
    return deaths


def expected(found: Mapping[str, Sequence[Figures]], seconds: float) -> list[float]:
    """Steps per second of the workers that were present, repeat by repeat."""
    rates = zip(*([each["steps_per_second"] for each in found[way]] for way in (BASELINE, BASELINE_FEWER)), strict=True)
    shares = (each["missing_seconds"] / seconds for each in found[UNISONO])
    return [three * (1 - share) + two * share for (three, two), share in zip(rates, shares, strict=True)]


def judged(found: Mapping[str, Sequence[Figures]], seconds: float) -> list[Verdict]:
    """The claims."""
    of = lambda way: [each["steps_per_second"] for each in found[way]]
    present = Claim("useful steps/s under failures against those of the workers present", KEPT)
    made = [Verdict(present, "without faults", "steps/s", of(UNISONO), expected(found, seconds))]
    for peer in (TORCHRUN, TORCHFT):
        if peer in found:
            claim = Claim(f"useful steps/s under failures against {peer}", 1.0)
            made.append(Verdict(claim, peer, "steps/s", of(UNISONO), of(peer)))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=1)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run with failures (300)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two failures (10)")
    parser.add_argument("--baseline", type=float, default=40.0, help="seconds of each run without faults (40)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of workers that are killed")
    parser.add_argument("--torchft", default="", metavar="DIR", help="where torchft is installed; else it is left out")
    asked = parser.parse_args(arguments)
    ways: dict[str, Callable[[], Figures]] = {
        BASELINE: functools.partial(baseline, WORKERS, asked.baseline),
        BASELINE_FEWER: functools.partial(baseline, WORKERS - 1, asked.baseline),
        **{
            way: functools.partial(with_failures, way, asked)
            for way in (UNISONO, TORCHRUN, *([TORCHFT] if asked.torchft else []))
        },
    }
    found = harness.interleave(ways, asked.repeats)
    for way, each in found.items():
        print(f"\n{way}")
        for name in each[0]:
            print(f"  {name:16} {Spread.of([figures[name] for figures in each])}")
    spoilt = any(figures["missing"] or figures["repeated"] for figures in found[UNISONO])
    sizes = {k: v for k, v in vars(asked).items() if k not in ("json", "torchft")}
    code = harness.conclude("failures", judged(found, asked.seconds), asked.json, sizes=sizes, figures=found)
    print(f"no sample lost or repeated: {'FAIL' if spoilt else 'PASS'}")
    return code or int(spoilt)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
