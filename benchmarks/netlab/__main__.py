"""Runs ``unisono`` on several simulated hosts: ``python -m benchmarks.netlab [options] -- train text …``.

One worker per host, started as torchrun starts it, connected by links of a given rate and delay. Needs root and the
commands ip, tc and mount; everything is removed at the end. Each worker has one compute thread by default, because
every host sees all cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.harness import BIN
from benchmarks.netlab.errors import Failed, Unavailable
from benchmarks.netlab.network import Rate, netlab
from benchmarks.netlab.workers import run_workers


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    if command[:1] == ["train"] and not any(word.startswith("--threads") for word in command):
        command += ["--threads", "1"]
    quotas: list[float | None] = [asked.cpu] * asked.hosts
    for host, cores in asked.cpu_of or []:
        quotas[int(host)] = cores
    try:
        with netlab(
            asked.hosts, asked.rate, delay_seconds=asked.delay_ms / 1e3, loss=asked.loss, quotas=quotas, at=asked.at
        ) as lab:
            done = run_workers(lab, [BIN / "unisono", *command], timeout_seconds=asked.timeout_seconds)
            sys.stdout.write((lab.hosts[0].home / "stdout").read_text())
    except (Unavailable, Failed) as error:
        print(error, file=sys.stderr)
        return 1
    sent = [round(count / 1e6, 3) for count in done.sent_bytes]
    print(json.dumps({"seconds": round(done.seconds, 2), "rate": str(asked.rate or "none"), "sent_MB": sent}))
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.netlab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--hosts", type=int, default=4)
    made.add_argument("--rate", type=Rate.of, help="of every link and direction: 25mbit, 100mbit, 1gbit")
    made.add_argument("--delay-ms", type=float, default=0.0, help="from one host to another, one way")
    made.add_argument("--loss", type=float, default=0.0, help="share of the frames that are lost")
    made.add_argument("--cpu", type=float, metavar="CORES", help="what each host may use of a core, as 0.5")
    made.add_argument("--cpu-of", type=_cpu_of, action="append", metavar="HOST:CORES", help="one host's share")
    made.add_argument("--at", type=Path, metavar="DIR", help="keep the hosts' directories in DIR")
    made.add_argument("--timeout-seconds", type=float, default=600.0)
    made.add_argument("command", nargs=argparse.REMAINDER, help="what follows `unisono`")
    return made


def _cpu_of(text: str) -> tuple[int, float]:
    host, _, cores = text.partition(":")
    return int(host), float(cores)


if __name__ == "__main__":
    raise SystemExit(main())
