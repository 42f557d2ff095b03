"""Cost of messages: every verb of gloo under netlab, against the closed forms of `unisono.comm.link_model`.

``unisono simulate`` uses these closed forms. Needs what `benchmarks.netlab` needs; prints ratios and judges nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.harness import BIN, SCRIPTS, environment
from benchmarks.netlab import Rate, netlab, run_workers
from benchmarks.netlab.network import Unavailable
from unisono.comm import Link
from unisono.comm.link_model import exchange_seconds, gather_seconds, sum_seconds

HOSTS = 4
NETWORKS = ((Rate.of("25mbit"), 0.0), (Rate.of("100mbit"), 0.0), (Rate.of("100mbit"), 0.02))
_PAYLOAD = 1448 / 1514  # of a frame


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeats", type=int, default=1, help="of everything (1)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every figure and the machine to FILE")
    asked = made.parse_args(arguments)
    rows = []
    try:
        for rate, delay in NETWORKS * asked.repeats:
            rows += _compare(rate, delay)
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    if asked.json:
        asked.json.write_text(json.dumps({"environment": environment(), "verbs": rows}, indent=1) + "\n")
    return 0


def _compare(rate: Rate, delay_seconds: float) -> list[dict[str, object]]:
    with netlab(HOSTS, rate, delay_seconds=delay_seconds) as lab:
        run_workers(lab, [BIN / "python", SCRIPTS / "verb_timing.py"], timeout_seconds=300)
        measured = json.loads((lab.hosts[0].home / "stdout").read_text().splitlines()[-1])
    link = Link(rate.bits_per_second / 8 * _PAYLOAD, delay_seconds)
    rows = []
    for named, seconds in measured.items():
        verb, size = named.split()
        modelled = _modelled(link, verb, int(size))
        rows.append({"rate": str(rate), "delay_seconds": delay_seconds, "verb": named, "seconds": seconds,
                     "modelled_seconds": modelled})  # fmt: skip
        ratio = f"modelled/measured {modelled / seconds:.2f}"
        print(f"{rate!s:>8} {1e3 * delay_seconds:3.0f} ms  {named:<18} {1e3 * seconds:9.2f} ms  {ratio}", flush=True)
    return rows


def _modelled(link: Link, verb: str, size_bytes: int) -> float:
    links = [link] * HOSTS
    if verb == "sum":
        return sum_seconds(links, size_bytes)
    if verb == "gather":
        return gather_seconds(links, size_bytes)
    pairs = {(a, b): float(size_bytes) for a in range(HOSTS) for b in range(HOSTS)}
    return exchange_seconds(dict(enumerate(links)), pairs)


if __name__ == "__main__":
    raise SystemExit(main())
