"""Seconds from the death of one of three workers to the survivors' next step; repeated work; time to a replacement.

One of three workers, chosen at random, is killed by SIGKILL between step 20 and 40 of its training. Measured are: the
seconds until a further step is in the weights that the killed worker had no part in; steps that were in the weights and
had to be repeated; the seconds until its replacement has started, and from then until its first step is in the weights.
At the end, the weights themselves show which samples are missing or were used more than once
(`scripts/sample_counting_model.py`).

Peers in the same repeats: torchrun with restarts and a checkpoint every 20 steps, DDP on gloo; torchft.

In a separate run, a worker of ours is frozen by SIGSTOP: the seconds until another worker reports it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from benchmarks import harness
from benchmarks.elasticity.killed_training import (
    TORCHFT,
    TORCHRUN,
    UNISONO,
    WORKERS,
    Training,
    recovery,
    started,
    usual_seconds,
)
from benchmarks.harness import Claim, Spread, Verdict

FROZEN = "unisono, frozen"
NEXT_SECONDS, BORN_SECONDS, BACK_SECONDS = 0.5, 3.0, 1.0
PATIENCE_SECONDS = 120.0
FIRST, LAST = 20, 40  # steps, between which a worker is killed
Figures = Mapping[str, Any]


def killed(way: str, chances: random.Random, torchft: str) -> Figures:
    """One run in which a worker is killed."""
    after = chances.randint(FIRST, LAST)
    with started(way, torchft=torchft) as training:
        training.until(lambda: training.complete(after), PATIENCE_SECONDS)
        lost, at = training.signal_one(signal.SIGKILL, chances)
        found = training.until(lambda: recovery(training.traces(), lost, at), PATIENCE_SECONDS)
        training.until(lambda: training.complete(5), PATIENCE_SECONDS)
        steps, missing, repeated = training.tally()
        usual = statistics.median(usual_seconds(trace) for trace in training.traces() if len(trace.steps) > FIRST // 2)
    return {**vars(found), "after": after, "step_seconds": usual, "steps": steps, "missing": missing,
            "repeated": repeated}  # fmt: skip


def frozen(chances: random.Random) -> Figures:
    """One run of ours in which a worker is frozen, and later resumed."""
    with started(UNISONO) as training:
        training.until(lambda: training.complete(chances.randint(FIRST, LAST)), PATIENCE_SECONDS)
        usual = statistics.median(usual_seconds(trace) for trace in training.present())
        today = time.time()
        trace, at = training.signal_one(signal.SIGSTOP, chances)
        noticed = training.until(lambda: _first_report(training, today), PATIENCE_SECONDS) - today
        others = [each for each in training.present() if each is not trace]
        again = training.until(
            lambda: [s.at - at for other in others for s in training.of(other.pid).steps if s.at - at > noticed],
            PATIENCE_SECONDS,
        )
        trace.resume()
        training.until(lambda: training.of(trace.pid).steps[-1].at > at + min(again), PATIENCE_SECONDS)
        steps, missing, repeated = training.tally()
    return {"noticed_seconds": noticed, "target_seconds": 3 * usual + 1, "next_seconds": min(again),
            "step_seconds": usual, "steps": steps, "missing": missing, "repeated": repeated}  # fmt: skip


def _first_report(training: Training, since: float) -> float | None:
    """When the first worker logged that its view has ended, after time of day `since`."""
    pattern = re.compile(r"^(\S+ \S+),(\d+) \w+ view \d+ is over", re.M)
    found = (
        match for log in training.folder.glob("run/logs/worker-*.log") for match in pattern.finditer(log.read_text())
    )
    times = (datetime.fromisoformat(match[1]).timestamp() + int(match[2]) / 1000 for match in found)
    return min((each for each in times if each >= since), default=None)


def ways(asked: argparse.Namespace) -> dict[str, Callable[[], Figures]]:
    """The runs of one repeat."""
    dice = functools.partial(random.Random, asked.seed)  # the same for each
    peers = (TORCHRUN, TORCHFT) if asked.torchft else (TORCHRUN,)
    found = {way: functools.partial(killed, way, dice(), asked.torchft) for way in (UNISONO, *peers)}
    return {**found, FROZEN: functools.partial(frozen, dice())}


def judged(found: Mapping[str, Sequence[Figures]]) -> list[Verdict]:
    """The claims: against the targets, and against the peers."""
    of = lambda way, name: [each[name] for each in found[way]]
    targets = (
        ("a death to the survivors' next step: s", of(UNISONO, "next_seconds"), NEXT_SECONDS),
        ("a death to another process: s", of(UNISONO, "born_seconds"), BORN_SECONDS),
        ("that process to its first step in the group: s", of(UNISONO, "ready_seconds"), BACK_SECONDS),
    )
    made = [
        Verdict(Claim(text, 1.0, at_least=False), "the target", "s", ours, [target] * len(ours))
        for text, ours, target in targets
    ]
    noticed, limit = of(FROZEN, "noticed_seconds"), of(FROZEN, "target_seconds")
    made.append(Verdict(Claim("a freeze to the first report: s against 3 steps + 1 s", 1.0, at_least=False),
                        "the target", "s", noticed, limit))  # fmt: skip
    for peer in (TORCHRUN, TORCHFT):
        if peer in found:
            claim = Claim(f"a death to the next step: s against {peer}", 1.0, at_least=False)
            made.append(Verdict(claim, peer, "s", of(UNISONO, "next_seconds"), of(peer, "next_seconds")))
    return made


def print_figures(found: Mapping[str, Sequence[Figures]]) -> None:
    """Prints all figures of each way."""
    for way, each in found.items():
        print(f"\n{way}")
        for name in each[0]:
            print(f"  {name:16} {Spread.of([figures[name] for figures in each])}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=5)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of the worker that is killed, and when")
    parser.add_argument("--torchft", default="", metavar="DIR", help="where torchft is installed; else it is left out")
    asked = parser.parse_args(arguments)
    found = harness.interleave(ways(asked), asked.repeats)
    print_figures(found)
    lost = [figures["missing"] + figures["repeated"] for way in (UNISONO, FROZEN) for figures in found[way]]
    lost += [figures["steps_lost"] for figures in found[UNISONO]]
    code = harness.conclude("recovery", judged(found), asked.json, seed=asked.seed, workers=WORKERS, figures=found)
    print(f"no step, no sample lost or repeated: {'FAIL' if any(lost) else 'PASS'}")
    return code or int(any(lost))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
