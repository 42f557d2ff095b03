"""Seconds to a fixed evaluation loss on slow networks: ours against DDP, DDP with short floats, local SGD, torchft.

Four hosts (`benchmarks.netlab`) with one worker each train the task ``text`` until bits per byte on held-out text reach
the target. Seed, global batch, optimizer, schedule and order of samples are the same. The clock leaves out start-up and
evaluations. All ways alternate within every repeat.

Figures marked * are composed: DDP and its variants compute the same at any rate, so their steps to the target are
counted once, without limits on the links, and multiplied by seconds per step, measured at the rate in every repeat.
Losses are compared to check that both runs compute the same. --direct runs everything to the target instead.

The hosts share this machine's cores; a step's computation takes as long for every way.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import harness
from benchmarks.harness import Claim, Spread, Verdict
from benchmarks.netlab.contestants import Measured, Run, Way, attempts, train
from benchmarks.netlab.errors import Failed, Unavailable
from benchmarks.netlab.network import Rate, netlab
from benchmarks.netlab.run_trace import Trace

OURS = (
    Way("all-reduce"),
    Way("4 bits", "--compress 'Quantize(4)'"),
    Way("PowerSGD(4)", "--compress 'PowerSGD(4)'"),
    Way("Auto", "--compress 'Auto()'"),
    Way("LocalSGD(4), 4 bits", "--sync 'LocalSGD(every=4)' --compress 'Quantize(4)'"),
    Way("LocalSGD(8), 4 bits", "--sync 'LocalSGD(every=8)' --compress 'Quantize(4)'"),
    Way("streaming average(8), 4 bits",
        "--sync 'DiLoCo(every=8, outer=Average(), fragments=2, delay=2)' --compress 'Quantize(4)'"),
    Way("DiLoCo(16), 4 bits", "--sync 'DiLoCo(every=16)' --compress 'Quantize(4)'"),
)  # fmt: skip
PEERS = (
    Way("DDP", "ddp", ours=False, composed=True),
    Way("DDP bf16", "ddp-bf16", ours=False, composed=True),
    Way("DDP fp16", "ddp-fp16", ours=False, composed=True),
    Way("local SGD(4)", "post-local-sgd --every 4", ours=False),
    Way("local SGD(8)", "post-local-sgd --every 8", ours=False),
    Way("local SGD(16)", "post-local-sgd --every 16", ours=False),
    Way("torchft LocalSGD(8)", "torchft-local-sgd --every 8", ours=False),
    Way("torchft DiLoCo(16)", "torchft-diloco --every 16 --outer-lr 0.4", ours=False),
)
RUN = Run(context=32, global_batch=16, micro_batch=4, steps=300, evaluate_every=16)
TARGET = 3.8  # bits per byte; DDP takes 128 steps to it
RATES = ("25mbit", "100mbit", "1gbit")
TIMES_FASTER = {"25mbit": (15.0, 1.5), "100mbit": (5.0, 1.2), "1gbit": (1.3, None)}  # than DDP, than the best peer
SAME_LOSS = 2e-3  # between two runs of the same arithmetic
WARM_STEPS = 4  # first steps are not like the others: buckets are rebuilt, links measured


@dataclass(frozen=True)
class Figure:
    """One way in one repeat at one rate; no seconds and 0 steps where the target was not reached."""

    seconds: float | None
    steps: int
    bytes_sent: float
    step_seconds: float


@dataclass(frozen=True)
class Campaign:
    """What is the same for all figures."""

    run: Run
    target: float
    hosts: int
    timed_steps: int
    timeout_seconds: float
    torchft: str

    def measure(self, way: Way, rate: Rate | None, target: float = 0.0, stop_after: int | None = None) -> Measured:
        """One run, on new hosts."""
        with netlab(self.hosts, rate) as lab:
            return train(
                lab, way, self.run, target=target, stop_after=stop_after, timeout_seconds=self.timeout_seconds,
                torchft=self.torchft)  # fmt: skip

    def curve(self, way: Way) -> Measured:
        """To the target, as fast as the machine can."""
        return self.measure(way, None, target=self.target)

    def figure(self, way: Way, rate: Rate, curve: Measured | None) -> Figure:
        """To the target at `rate`, or composed with the steps of `curve`."""
        if curve is None:
            return _direct(self.measure(way, rate, target=self.target), self.target)
        shaped = dataclasses.replace(self, run=dataclasses.replace(self.run, evaluate_every=0))
        steps = shaped.measure(way, rate, stop_after=WARM_STEPS + self.timed_steps)
        _check_same(way, steps.trace, curve.trace)
        reached, each = curve.trace.reached(self.target), steps.trace.step_seconds(WARM_STEPS)
        if reached is None:
            return Figure(None, 0, 0.0, each)
        return Figure(each * reached.step, reached.step, steps.bytes_per_step * reached.step, each)


def _direct(measured: Measured, target: float) -> Figure:
    reached = measured.trace.reached(target)
    each = measured.trace.step_seconds(WARM_STEPS)
    if reached is None:
        return Figure(None, 0, 0.0, each)
    return Figure(reached.seconds, reached.step, measured.bytes_per_step * reached.step, each)


def _check_same(way: Way, shaped: Trace, free: Trace) -> None:
    apart = shaped.farthest(free)
    print(f"  {way.name}: losses of {len(shaped.marks)} steps differ by {apart:.1e} at most", file=sys.stderr)
    if apart > SAME_LOSS:
        raise Failed(f"{way.name} does not compute the same at both rates: losses differ by {apart:.1e}")


def seconds_of(figures: Sequence[Figure]) -> list[float] | None:
    """Of every repeat; None where one did not reach the target."""
    known = [figure.seconds for figure in figures if figure.seconds is not None]
    return known if len(known) == len(figures) else None


def verdicts(rate: str, ways: Sequence[Way], figures: Mapping[str, list[Figure]]) -> list[Verdict]:
    """Our quickest way against DDP and against the quickest peer, by their medians."""
    seconds = {way.name: known for way in ways if (known := seconds_of(figures[way.name])) is not None}
    quickest = sorted(seconds, key=lambda name: Spread.of(seconds[name]).median)
    ours = next((name for name in quickest if name in {way.name for way in ways if way.ours}), None)
    peer = next((name for name in quickest if name in {way.name for way in ways if not way.ours}), None)
    than_ddp, than_best = TIMES_FASTER.get(rate, (1.0, 1.0))
    made = []
    for against, factor in (("DDP", than_ddp), (peer, than_best)):
        if ours is not None and against in seconds and factor is not None:
            text = f"{rate}: seconds to the target, {ours} against {against} ({factor:g} times faster)"
            claim = Claim(text, 1 / factor, at_least=False)
            made.append(Verdict(claim, against, "s", seconds[ours], seconds[against]))
    return made


def lines(ways: Sequence[Way], figures: Mapping[str, list[Figure]], composed: Container[str]) -> str:
    """One line per way, the quickest first."""
    head = ("way", "seconds", "steps", "MB per host", "ms per step", "DDP takes")
    seconds = {way.name: seconds_of(figures[way.name]) for way in ways}
    order = sorted(ways, key=lambda way: Spread.of(seconds[way.name] or [float("inf")]).median)
    rows = [head, *(_row(way, figures[way.name], seconds.get("DDP"), way.name in composed) for way in order)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


def _row(way: Way, figures: Sequence[Figure], ddp: Sequence[float] | None, composed: bool) -> tuple[str, ...]:
    seconds = seconds_of(figures)
    megabytes = Spread.of([figure.bytes_sent / 1e6 for figure in figures]).median
    ratio = Spread.of([d / s for d, s in zip(ddp, seconds, strict=True)]) if ddp and seconds else None
    return (
        way.name + " (ours)" * way.ours,
        str(Spread.of(seconds)) + "*" * composed if seconds else "-",
        str(figures[0].steps) if seconds else "not reached",
        f"{megabytes:.2f}" if seconds else "",
        f"{1e3 * Spread.of([figure.step_seconds for figure in figures]).median:.0f}",
        f"{ratio} times" if ratio else "",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=3)
    parser.add_argument("--rates", nargs="+", default=RATES, help=f"of the links ({' '.join(RATES)})")
    parser.add_argument("--only", nargs="+", metavar="WAY", help="of: " + ", ".join(w.name for w in (*OURS, *PEERS)))
    parser.add_argument("--ours", action="append", default=[], metavar="WORDS",
                        help="one more of ours, as words of unisono train: --ours='--sync ...'")  # fmt: skip
    parser.add_argument("--target", type=float, default=TARGET, help=f"bits per byte ({TARGET})")
    parser.add_argument("--steps", type=int, default=RUN.steps, help=f"at most ({RUN.steps})")
    parser.add_argument("--timed-steps", type=int, default=12, help="of a composed figure")
    parser.add_argument("--direct", action="store_true", help="compose nothing")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--timeout-seconds", type=float, default=1800.0, help="for one run")
    parser.add_argument("--torchft", default="", metavar="DIR", help="where torchft is installed")
    asked = parser.parse_args(arguments)
    campaign = Campaign(
        dataclasses.replace(RUN, steps=asked.steps), asked.target, asked.hosts, asked.timed_steps,
        asked.timeout_seconds, asked.torchft)  # fmt: skip
    every = [*OURS, *(Way(words, words) for words in asked.ours), *PEERS]
    chosen = [way for way in every if asked.only is None or way.name in asked.only or way.words in asked.ours]
    found, judged, composed = {}, [], [] if asked.direct else [way for way in chosen if way.composed]
    try:
        curves, left_out = attempts({w.name: functools.partial(campaign.curve, w) for w in composed}, 1)
        free = {name: each[0] for name, each in curves.items()}
        for rate in asked.rates:
            able = {way.name: way for way in chosen if way.name not in left_out}
            figures = {
                name: functools.partial(campaign.figure, way, Rate.of(rate), free.get(name))
                for name, way in able.items()
            }
            found[rate], failed = attempts(figures, asked.repeats)
            left_out |= failed
            ways = [able[name] for name in found[rate]]
            print(f"\n{rate}, seconds to {asked.target} bits per byte:\n{lines(ways, found[rate], curves)}", flush=True)
            judged += verdicts(rate, ways, found[rate])
    except Unavailable as reason:
        print(f"left out: {reason}")
        return 0
    record = {rate: {n: [vars(f) for f in figures] for n, figures in by.items()} for rate, by in found.items()}
    return harness.conclude(
        "time_to_loss", judged, asked.json, run=vars(campaign.run), target=asked.target, figures=record,
        composed=sorted(curves), left_out=left_out)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
