"""One of four workers slowed to 30 % of the others' CPU: the share of the workers' own speeds that each way reaches.

Each worker is a host (`benchmarks.netlab`) whose CPU time is limited by a control group: three to 50 % of a core, the
slow one to 15 %. The sum of 165 % of two cores leaves slack, so that no worker slows another. In every repeat each kind
of worker is also measured alone, with the same quota and a quarter of the global batch; their sum is the upper bound.
Links are not limited. The final loss is that on held-out text after the same number of samples; that of all-reduce does
not depend on the speed of workers and is measured without quotas.

Samples per second are the global batch over the mean step time, without the first steps. Ways that wait for the slow
worker have uniform steps and run few of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.harness import Claim, Spread, Verdict
from benchmarks.netlab.contestants import Measured, Run, Way, attempts, train
from benchmarks.netlab.errors import Unavailable
from benchmarks.netlab.network import netlab

SYNCHRONOUS = Way("all-reduce")
KEEPING = (  # what is claimed to keep up
    Way("asynchronous server", "--sync 'ParameterServer(staleness=inf, lease=1)'"),
    Way("bounded server", "--sync 'ParameterServer(staleness=2, lease=1)'"),
    Way("asynchronous gossip", "--sync 'Gossip(asynchronous=True)'"),
)
WAITING = (
    Way("DDP", "ddp", ours=False),
    SYNCHRONOUS,
    Way("synchronous server", "--sync 'ParameterServer(staleness=0)'"),
)
FAST, SLOW, UNLIMITED = "fast worker alone", "slow worker alone", "all-reduce without quotas"
KEPT, LOSS_WITHIN = 0.85, 1.02
WARM_STEPS, TIMED_STEPS = 2, 8


@dataclasses.dataclass(frozen=True)
class Figure:
    """Samples per second, and bits per byte at the end."""

    samples_per_second: float
    bits_per_byte: float

    @property
    def known(self) -> dict[str, float]:
        """What was measured; the loss only of runs to the end."""
        return {name: value for name, value in vars(self).items() if not math.isnan(value)}


def figure(measured: Measured, global_batch: int) -> Figure:
    """Of one run that went to its end."""
    bits = measured.trace.evaluations[-1].value if measured.trace.evaluations else float("nan")
    return Figure(global_batch / measured.trace.step_seconds(WARM_STEPS), bits)


def measure(way: Way, run: Run, quotas: Sequence[float | None], stop_after: int | None = None) -> Figure:
    """One worker per quota."""
    with netlab(len(quotas), quotas=quotas) as lab:
        return figure(train(lab, way, run, stop_after=stop_after, timeout_seconds=3600.0), run.global_batch)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=3)
    parser.add_argument("--only", nargs="+", metavar="WAY")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--context", type=int, default=128, help="bytes per window")
    parser.add_argument("--global-batch", type=int, default=256, help="windows per step")
    parser.add_argument("--micro-batch", type=int, default=8, help="windows that a worker computes at once")
    parser.add_argument("--cores", type=float, default=0.5, help="what a worker may use of a core")
    parser.add_argument("--slowed-to", type=float, default=0.3, help="the slow one's part of that")
    asked = parser.parse_args(arguments)
    run = Run(context=asked.context, global_batch=asked.global_batch, micro_batch=asked.micro_batch,
              steps=asked.steps, evaluate_every=asked.steps)  # fmt: skip
    timed = dataclasses.replace(run, evaluate_every=0)
    own = dataclasses.replace(timed, global_batch=run.global_batch // 4)
    fast, slow = asked.cores, asked.cores * asked.slowed_to
    quotas = [fast, fast, fast, slow]
    wanted = lambda way: asked.only is None or way.name in asked.only
    try:
        ways = {way.name: functools.partial(measure, way, run, quotas) for way in filter(wanted, KEEPING)}
        ways |= {
            way.name: functools.partial(measure, way, timed, quotas, stop_after=TIMED_STEPS)
            for way in filter(wanted, WAITING)
        }
        ways[UNLIMITED] = functools.partial(measure, SYNCHRONOUS, run, [None] * len(quotas))
        ways[FAST] = functools.partial(measure, SYNCHRONOUS, own, [fast], stop_after=TIMED_STEPS)
        ways[SLOW] = functools.partial(measure, SYNCHRONOUS, own, [slow], stop_after=TIMED_STEPS)
        figures, left_out = attempts(ways, asked.repeats)
    except Unavailable as reason:
        print(f"left out: {reason}")
        return 0
    if {FAST, SLOW, UNLIMITED} & set(left_out):
        raise SystemExit(f"nothing to compare with: {left_out}")
    speeds = {name: [f.samples_per_second for f in each] for name, each in figures.items()}
    total = [3 * f + s for f, s in zip(speeds[FAST], speeds[SLOW], strict=True)]
    print_figures(figures, total)
    kept = {way.name for way in KEEPING}
    judged = [
        Verdict(Claim(f"{name}: samples/s against the sum of the workers alone", KEPT), "the sum", "samples/s",
                speeds[name], total)
        for name in speeds if name in kept
    ]  # fmt: skip
    bits = {name: [f.bits_per_byte for f in each] for name, each in figures.items()}
    judged += [
        Verdict(Claim(f"{name}: bits per byte against {SYNCHRONOUS.name}", LOSS_WITHIN, at_least=False),
                SYNCHRONOUS.name, "bits", bits[name], bits[UNLIMITED])
        for name in bits if name in kept
    ]  # fmt: skip
    return harness.conclude(
        "straggler", judged, asked.json, run=vars(run), cores=quotas, left_out=left_out,
        figures={name: [f.known for f in each] for name, each in figures.items()})  # fmt: skip


def print_figures(figures: dict[str, list[Figure]], total: Sequence[float]) -> None:
    """All ways, the slowest last."""
    pairs = zip(figures[SLOW], figures[FAST], strict=True)
    slowed = Spread.of([slow.samples_per_second / fast.samples_per_second for slow, fast in pairs])
    print(f"\nsum of the workers' own speeds: {Spread.of(total)} samples/s; the slow one's is {slowed} of another's")
    for name in sorted(figures, key=lambda name: -Spread.of([f.samples_per_second for f in figures[name]]).median):
        speeds = [f.samples_per_second for f in figures[name]]
        share = Spread.of([speed / whole for speed, whole in zip(speeds, total, strict=True)])
        bits = Spread.of([f.bits_per_byte for f in figures[name]])
        loss = "" if math.isnan(bits.median) else f"  {bits} bits per byte"
        print(f"  {name:26}  {Spread.of(speeds)} samples/s  {share} of the sum{loss}")


if __name__ == "__main__":
    raise SystemExit(main())
