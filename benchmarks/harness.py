"""Common parts of all benchmarks: interleaved repeats, paired ratios, verdicts, the table and the record.

A benchmark compares ways of doing the same thing. Every repeat runs all ways one after another, in an order that
alternates between repeats, so that drift of the machine favors none of them. A claim is judged by the median of the
ratios within the repeats, never by figures from different times.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """A sentence with a number in it: ours over the peer's, `at_least` or (False) at most `target`."""

    text: str
    target: float
    at_least: bool = True

    def holds(self, ratio: float) -> bool:
        """Whether the measured `ratio` keeps the claim."""
        return ratio >= self.target if self.at_least else ratio <= self.target


@dataclass(frozen=True)
class Spread:
    """A median between its quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of one value or more."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(middle, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}..{self.high:.3g})"


@dataclass(frozen=True)
class Verdict:
    """What was measured for a claim: one figure per repeat of ours and of the peer, in `unit`."""

    claim: Claim
    peer: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def ratio(self) -> Spread:
        """Ours over theirs, repeat by repeat."""
        return Spread.of([a / b for a, b in zip(self.ours, self.theirs, strict=True)])

    @property
    def holds(self) -> bool:
        return self.claim.holds(self.ratio.median)

    def record(self) -> dict[str, Any]:
        """As JSON can hold it, every single figure included."""
        return {
            "claim": self.claim.text,
            "target": f"{'>=' if self.claim.at_least else '<='} {self.claim.target:g}",
            "ratio": vars(self.ratio),
            "verdict": "PASS" if self.holds else "FAIL",
            "unit": self.unit,
            "ours": list(self.ours),
            "peer": self.peer,
            "peer_figures": list(self.theirs),
        }


@dataclass(frozen=True)
class Ran:
    """One run of a command: what its rank 0 reported, when it was spawned and how long it took in all.

    `spawned_seconds` is on the machine's monotonic clock, which all its processes share.
    """

    report: dict[str, Any]
    spawned_seconds: float
    whole_seconds: float


def interleave(ways: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """What every way returned, one entry per repeat."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that `run` ends what it started
    results: dict[str, list[T]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for way in list(ways) if repeat % 2 == 0 else reversed(list(ways)):
            results[way].append(ways[way]())
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def run(command: Sequence[str], timeout_seconds: float = 120.0) -> Ran:
    """Run `command` with ``--report FILE`` added, into which its rank 0 writes a JSON object.

    Raises:
        SystemExit: the command failed, hung or reported nothing; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log"), "w+b") as log:
        report = Path(folder, "report.json")
        spawned = time.monotonic()
        process = subprocess.Popen(
            [*command, "--report", str(report)],
            cwd=folder,  # all files of the command are removed with the folder
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            code = f"still running after {timeout_seconds:g} s"
        finally:
            end(process)
        whole = time.monotonic() - spawned
        if code != 0 or not report.exists():
            log.seek(0)
            tail = log.read().decode(errors="replace")[-4000:]
            raise SystemExit(f"{' '.join(command)}\nended with {code}:\n{tail}")
        return Ran(json.loads(report.read_text()), spawned, whole)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process group of a run: SIGTERM, so that its workers end in order, then SIGKILL."""
    for signum, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, signum)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def free_port() -> int:
    """A free loopback port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environment() -> dict[str, Any]:
    """The machine and the versions, without its names and paths."""
    packages = ("unisono", "torch", "numpy")
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "load_average": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def print_verdict(verdict: Verdict) -> Verdict:
    """Prints the short form of a verdict at once, in case a long benchmark is interrupted; returns the verdict."""
    record = verdict.record()
    print(f"  {verdict.ratio}  {record['target']}  {record['verdict']}", flush=True)
    return verdict


def table(verdicts: Iterable[Verdict]) -> str:
    """The verdicts as lines of text; medians with their quartiles."""
    head = ("claim", "ours", "peer", "ratio", "target", "")
    rows = [head]
    for v in verdicts:
        r = v.record()
        rows.append(
            (
                v.claim.text,
                f"{Spread.of(v.ours)} {v.unit}",
                f"{Spread.of(v.theirs)} {v.unit}, {v.peer}",
                str(v.ratio),
                r["target"],
                r["verdict"],
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


def parser(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeats", type=int, default=repeats, help=f"interleaved repeats ({repeats})")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every figure and the machine to FILE")
    return made


def conclude(name: str, verdicts: Sequence[Verdict], json_file: Path | None, **details: Any) -> int:
    """Print the table, write the record; the exit code is 1 where a claim does not hold."""
    print("\n" + table(verdicts))
    if json_file:
        record = {
            "benchmark": name,
            "environment": environment(),
            "claims": [v.record() for v in verdicts],
            **details,
        }
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(v.holds for v in verdicts) else 1
