"""Accuracy of ``unisono simulate``: step times of the task ``text`` under netlab and on the virtual clock.

For each variant and rate, four workers train on simulated hosts with shaped links. Their step time on unshaped links
stands for computing. With that and the rate, the same command is simulated. Needs what `benchmarks.netlab` needs.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import BIN, Spread, environment, parser
from benchmarks.netlab import Netlab, Rate, netlab
from benchmarks.netlab.contestants import Run, Way, train
from benchmarks.netlab.network import Unavailable
from benchmarks.netlab.run_trace import Trace

WITHIN = 0.15
HOSTS = 4
SKIP = 4  # steps at the beginning that do not count; a multiple of every period below
STEPS = 20
WAYS = (
    Way("AllReduce"),
    Way("AllReduce, 8 bit", "--compress Quantize(8)"),
    Way("LocalSGD, 4 steps", "--sync LocalSGD(every=4)"),
    Way("DiLoCo, 4 steps, 4 bit", "--sync DiLoCo(every=4) --compress Quantize(4)"),
)


@dataclass(frozen=True)
class Compared:
    """Seconds of a step, one figure per repeat: on links that are not shaped, on shaped ones, and simulated."""

    way: str
    rate: str
    unshaped_seconds: tuple[float, ...]
    measured_seconds: tuple[float, ...]
    simulated_seconds: tuple[float, ...]

    @property
    def ratio(self) -> Spread:
        """Simulated over measured, repeat by repeat."""
        return Spread.of([s / m for s, m in zip(self.simulated_seconds, self.measured_seconds, strict=True)])

    @property
    def holds(self) -> bool:
        """Whether the simulation comes near enough."""
        return abs(self.ratio.median - 1) <= WITHIN

    def __str__(self) -> str:
        parts = [f"{self.way:<24} {self.rate:>8}"]
        for name in ("unshaped", "measured", "simulated"):
            parts.append(f"{name} {Spread.of(getattr(self, f'{name}_seconds')).median:.3f} s")
        return "  ".join([*parts, f"ratio {self.ratio}", "PASS" if self.holds else "FAIL"])


def main(arguments: list[str] | None = None) -> int:
    """Compare; 1 where one ratio is too far from 1."""
    made = parser(__doc__, repeats=3)
    made.add_argument("--rates", type=Rate.of, nargs="+", default=[Rate.of("25mbit"), Rate.of("100mbit")])
    made.add_argument("--ways", nargs="+", default=[way.name for way in WAYS], choices=[way.name for way in WAYS])
    made.add_argument("--latency", default="200us", help="of a message between two hosts (200us)")
    asked = made.parse_args(arguments)
    found = []
    try:
        with netlab(HOSTS) as lab:
            for way in (way for way in WAYS if way.name in asked.ways):
                for rate in asked.rates:
                    found.append(_compare(lab, way, rate, asked.latency, asked.repeats))
                    print(found[-1], flush=True)
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    if asked.json:
        rows = [{**asdict(one), "ratio": vars(one.ratio), "holds": one.holds} for one in found]
        asked.json.write_text(json.dumps({"environment": environment(), "compared": rows}, indent=1) + "\n")
    return 0 if all(one.holds for one in found) else 1


def _compare(lab: Netlab, way: Way, rate: Rate, latency: str, repeats: int) -> Compared:
    """Each repeat measures what computing takes right beside what it is needed for: a machine's speed drifts."""
    rows = []
    for _ in range(repeats):
        unshaped = _measured(lab, way, None).step_seconds(SKIP)
        trace = _measured(lab, way, rate)
        known = [mark.step for mark in trace.marks if mark.step >= SKIP]
        points = _simulated(way, rate, unshaped, latency)
        simulated = (points[known[-1]] - points[known[0]]) / (known[-1] - known[0])
        rows.append((unshaped, trace.step_seconds(SKIP), simulated))
    return Compared(way.name, str(rate), *zip(*rows, strict=True))


def _measured(lab: Netlab, way: Way, rate: Rate | None) -> Trace:
    lab.shape(rate)
    try:
        return train(lab, way, Run(steps=STEPS), stop_after=STEPS, timeout_seconds=300).trace
    finally:
        lab.shape(None)


def _simulated(way: Way, rate: Rate, compute_seconds: float, latency: str) -> dict[int, float]:
    """Seconds on the clock after each step."""
    run = Run(steps=STEPS)
    words = [
        *("--model.layers", run.layers, "--model.width", run.width, "--model.context", run.context),
        *("--global-batch", run.global_batch, "--micro-batch", run.micro_batch, "--steps", run.steps),
        *("--workers", HOSTS, "--compute", f"{1e3 * compute_seconds:.3f}ms", "--latency", latency),
        *("--link", str(rate), *shlex.split(way.words)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "forecast.json")
        command = [str(BIN / "unisono"), "simulate", "text", *map(str, words), "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600)
        (way_found,) = json.loads(file.read_text())["ways"].values()
    return {step: seconds for step, seconds, *_ in way_found["points"]}


if __name__ == "__main__":
    raise SystemExit(main())
