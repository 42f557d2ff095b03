"""Quality of the choice of ``Auto()``: seconds per step against every fixed compressor, at every link rate.

Four hosts (`benchmarks.netlab`) train the task ``text`` by all-reduce; all compressors alternate within every repeat.
The first steps, in which ``Auto()`` measures, are left out. The fixed compressors are its candidates. Compressors that
send less may need more steps than they save, which `benchmarks.slow_networks.time_to_loss` measures.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping, Sequence

from benchmarks import harness
from benchmarks.harness import Claim, Spread, Verdict
from benchmarks.netlab.contestants import Measured, Run, Way, attempts, train
from benchmarks.netlab.errors import Unavailable
from benchmarks.netlab.network import Rate, netlab

AUTO = "Auto()"
FIXED = ("Cast()", "Cast('bf16')", "Quantize(8)", "Quantize(4)", "PowerSGD(4)")  # what it chooses from
RATES = ("25mbit", "100mbit", "1gbit")
RUN = Run(context=32, steps=300)
WITHIN = 1.1


def measure(compressor: str, rate: Rate | None, warm: int, timed: int, hosts: int) -> Measured:
    """`timed` steps after `warm` ones."""
    way = Way(compressor, f"--compress {shlex.quote(compressor)}")
    with netlab(hosts, rate) as lab:
        return train(lab, way, RUN, stop_after=warm + timed, timeout_seconds=900.0)


def print_table(rate: str, measured: Mapping[str, Sequence[Measured]], seconds: Mapping[str, Sequence[float]]) -> None:
    """Prints the table of one rate, and the log of `Auto` about its choice."""
    print(f"\n{rate}:")
    for name in sorted(seconds, key=lambda name: Spread.of(seconds[name]).median):
        sent = Spread.of([m.bytes_per_step / 1e6 for m in measured[name]]).median
        print(
            f"  {name:14}  {Spread.of([1e3 * s for s in seconds[name]])} ms per step  {sent:.3f} MB per step and host"
        )
    logs = [m.log for m in measured.get(AUTO, [])[:1]]
    chosen = [line for log in logs for line in log.splitlines() if " numbers: " in line]
    print("\n".join(f"    {line}" for line in chosen), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=3)
    parser.add_argument("--rates", nargs="+", default=RATES, help=f"of the links ({' '.join(RATES)})")
    parser.add_argument("--only", nargs="+", default=[AUTO, *FIXED], metavar="COMPRESSOR")
    parser.add_argument("--warm-steps", type=int, default=48)
    parser.add_argument("--timed-steps", type=int, default=24)
    parser.add_argument("--hosts", type=int, default=4)
    asked = parser.parse_args(arguments)
    figures: dict[str, dict[str, list[float]]] = {}
    left_out: dict[str, str] = {}
    judged = []
    try:
        for rate in asked.rates:
            ways = {
                name: functools.partial(measure, name, Rate.of(rate), asked.warm_steps, asked.timed_steps, asked.hosts)
                for name in asked.only
                if name not in left_out
            }
            measured, failed = attempts(ways, asked.repeats)
            left_out |= failed
            seconds = {n: [m.trace.step_seconds(asked.warm_steps) for m in each] for n, each in measured.items()}
            print_table(rate, measured, seconds)
            figures[rate] = seconds
            fixed = sorted((n for n in seconds if n != AUTO), key=lambda n: Spread.of(seconds[n]).median)
            if AUTO in seconds and fixed:
                claim = Claim(f"{rate}: seconds per step, {AUTO} against the best fixed", WITHIN, at_least=False)
                judged.append(Verdict(claim, fixed[0], "s", seconds[AUTO], seconds[fixed[0]]))
    except Unavailable as reason:
        print(f"left out: {reason}")
        return 0
    return harness.conclude(
        "compressors", judged, asked.json, run=vars(RUN), seconds_per_step=figures, left_out=left_out
    )


if __name__ == "__main__":
    raise SystemExit(main())
