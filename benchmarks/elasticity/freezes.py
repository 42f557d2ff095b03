"""One of three workers freezes ten times: how soon the others continue, and how many steps they take.

The worker, chosen at random, is stopped by SIGSTOP for `--away` seconds. That is repeated at least `--every` seconds
later, once the worker has taken part in twenty further steps, so that every freeze hits a member of the view. For each
freeze, the longest time without a new step of the others is measured. The number of steps in the weights is compared
with what the workers present would have done: steps per second of three workers, and of two while one is stopped, as
runs without freezes show them in the same repeat. A worker that runs, but may not join again yet, counts as present.

At the end, the weights themselves show which samples are missing or were used more than once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks import harness
from benchmarks.elasticity.failures import BASELINE, BASELINE_FEWER, KEPT, PATIENCE_SECONDS, baseline, furthest
from benchmarks.elasticity.killed_training import UNISONO, WARM_STEPS, WORKERS, ProcessTrace, Training, started
from benchmarks.harness import Claim, Spread, Verdict

LATER = 1.5  # times what the first half of the freezes cost
Figures = Mapping[str, Any]


def held_seconds(others: Sequence[ProcessTrace], at: float, until: float) -> float:
    """The longest time without a new step of `others` that has a part between `at` and `until`.

    Raises:
        LookupError: there is no step after `until` yet.
    """
    steps = sorted(step.at for trace in others for step in trace.steps)
    if not steps or steps[-1] < until:
        raise LookupError("it is not over")
    return max(after - max(before, at) for before, after in pairwise(steps) if after > at and before < until)


def frozen(asked: argparse.Namespace) -> Figures:
    """One run in which one worker freezes repeatedly."""
    with started(UNISONO) as training:
        training.until(training.complete, PATIENCE_SECONDS)
        began = time.monotonic()
        pid = random.Random(asked.seed).choice(training.present()).pid
        held = [_freeze(training, pid, asked) for _ in range(asked.times)]
        end = time.monotonic()
        traces = training.traces()
        steps, lacking, repeated = training.tally(PATIENCE_SECONDS)
    useful = furthest(traces, end) - furthest(traces, began)
    return {
        "held_seconds": held,
        "first_seconds": statistics.median(held[: len(held) // 2]),
        "last_seconds": statistics.median(held[len(held) // 2 :]),
        "useful_steps": useful,
        "steps_per_second": useful / (end - began),
        "stopped_share": asked.times * asked.away / (end - began),
        "steps": steps,
        "missing": lacking,
        "repeated": repeated,
    }


def _freeze(training: Training, pid: int, asked: argparse.Namespace) -> float:
    """Stops that worker once, and waits until it has joined again; the longest time without a step of the others."""
    at = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(asked.away)
    until = time.monotonic()
    training.of(pid).resume()
    others = [trace.pid for trace in training.present() if trace.pid != pid]
    held = training.until(lambda: held_seconds([training.of(o) for o in others], at, until), PATIENCE_SECONDS)
    training.until(lambda: _steps_since(training.of(pid), until) >= WARM_STEPS, PATIENCE_SECONDS)
    time.sleep(max(0.0, at + asked.every - time.monotonic()))
    return float(held)


def _steps_since(trace: ProcessTrace, at: float) -> int:
    return sum(step.at > at for step in trace.steps)


def expected(found: Mapping[str, Sequence[Figures]]) -> list[float]:
    """Steps per second of the workers that were present, repeat by repeat."""
    rates = zip(*([each["steps_per_second"] for each in found[way]] for way in (BASELINE, BASELINE_FEWER)), strict=True)
    shares = (each["stopped_share"] for each in found[UNISONO])
    return [three * (1 - share) + two * share for (three, two), share in zip(rates, shares, strict=True)]


def judged(found: Mapping[str, Sequence[Figures]]) -> list[Verdict]:
    """The claims."""
    of = lambda name: [each[name] for each in found[UNISONO]]
    present = Claim("useful steps/s under freezes against those of the workers present", KEPT)
    later = Claim("a freeze of the last half to the others' next step: s against the first half", LATER, at_least=False)
    return [
        Verdict(present, "without faults", "steps/s", of("steps_per_second"), expected(found)),
        Verdict(later, "the first half", "s", of("last_seconds"), of("first_seconds")),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=1)
    parser.add_argument("--times", type=int, default=10, help="that the worker freezes (10)")
    parser.add_argument("--every", type=float, default=12.0, help="seconds between two freezes, or more (12)")
    parser.add_argument("--away", type=float, default=4.0, help="seconds of each freeze (4)")
    parser.add_argument("--baseline", type=float, default=40.0, help="seconds of each run without faults (40)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of the worker that freezes")
    asked = parser.parse_args(arguments)
    ways: dict[str, Callable[[], Figures]] = {
        BASELINE: functools.partial(baseline, WORKERS, asked.baseline),
        BASELINE_FEWER: functools.partial(baseline, WORKERS - 1, asked.baseline),
        UNISONO: functools.partial(frozen, asked),
    }
    found = harness.interleave(ways, asked.repeats)
    for way, each in found.items():
        print(f"\n{way}")
        for name, one in each[0].items():
            if not isinstance(one, list):
                print(f"  {name:16} {Spread.of([figures[name] for figures in each])}")
    for each in found[UNISONO]:
        print("  each freeze:", " ".join(f"{seconds:.2f}" for seconds in each["held_seconds"]))
    spoilt = any(figures["missing"] or figures["repeated"] for figures in found[UNISONO])
    sizes = {k: v for k, v in vars(asked).items() if k != "json"}
    code = harness.conclude("freezes", judged(found), asked.json, sizes=sizes, figures=found)
    print(f"no sample lost or repeated: {'FAIL' if spoilt else 'PASS'}")
    return code or int(spoilt)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
