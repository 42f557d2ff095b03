"""Ways of training the task ``text`` on several hosts: ours by options of ``unisono train``, peers by their own."""

from __future__ import annotations

import functools
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import harness
from benchmarks.harness import BIN, SCRIPTS
from benchmarks.netlab.errors import Failed
from benchmarks.netlab.network import Host, Netlab
from benchmarks.netlab.run_trace import Mark, Trace, of_peer, of_run
from benchmarks.netlab.workers import run_workers

_numbers = itertools.count()
T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """One line of a table.

    Args:
        name: as the table has it.
        words: of the command line.
        ours: for ``unisono train text``; else for ``scripts/text_contestants.py``.
        composed: its steps cost alike, whatever the loss: seconds may be steps to the target, counted on unshaped
            links, times seconds per step.
    """

    name: str
    words: str = ""
    ours: bool = True
    composed: bool = False


@dataclass(frozen=True)
class Run:
    """What was trained, for all ways alike.

    Args:
        steps: that the schedule of the learning rate follows.
        evaluate_every: steps between evaluations; 0 for none.
    """

    layers: int = 5
    width: int = 128
    context: int = 128
    global_batch: int = 32
    micro_batch: int = 8
    steps: int = 300
    evaluate_every: int = 0


@dataclass(frozen=True)
class Measured:
    """One run of one way.

    Args:
        bytes_per_step: that the busiest host sent by its cable, headers included, start-up left out.
        summary: what our run came to (``summary.json``); empty for a peer, and where it was stopped.
        log: worker 0's log.
    """

    trace: Trace
    bytes_per_step: float
    summary: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""


@dataclass
class Watch:
    """What host 0 has written so far decides when enough is trained, and from where on bytes are counted.

    Args:
        progress: what is known of the run; a trace without marks before training has begun.
    """

    lab: Netlab
    progress: Callable[[], Trace]
    target: float
    last_step: float
    first: tuple[int, list[int]] | None = None

    def enough(self, host: Host) -> bool:
        """For `run_workers`."""
        trace = self.progress()
        if trace.marks and self.first is None:
            self.first = trace.marks[-1].step, self.lab.sent_bytes
        done = trace.marks[-1].step if trace.marks else 0
        return trace.reached(self.target) is not None or done >= self.last_step

    def bytes_per_step(self, steps: int) -> float:
        """On the mean of the steps since the first look."""
        step, before = self.first or (0, [0] * len(self.lab.hosts))
        return max(now - then for now, then in zip(self.lab.sent_bytes, before)) / max(1, steps - step)


def train(
    lab: Netlab,
    way: Way,
    run: Run,
    *,
    target: float = 0.0,
    stop_after: int | None = None,
    timeout_seconds: float,
    torchft: str = "",
) -> Measured:
    """Train one way on all hosts until `target` bits per byte, `stop_after` steps or the end.

    Raises:
        Failed: a worker ended badly.
    """
    at = lab.hosts[0].home / f"run{next(_numbers)}"
    words: list[str | Path]
    if way.ours:
        words = [
            "train",
            "text",
            *_options(run, "--model."),
            *shlex.split(way.words),
            "--threads",
            "1",
            "--run-dir",
            at,
        ]
        watch = Watch(lab, lambda: of_run(at), target, stop_after or float("inf"))
        run_workers(lab, [BIN / "unisono", *words], timeout_seconds=timeout_seconds, until=watch.enough)
        summary, trace = at / "summary.json", of_run(at)
        result = json.loads(summary.read_text()) if summary.exists() else {}
    else:
        words = [*shlex.split(way.words), *_options(run, "--"), "--target", str(target), "--report", at]
        words += ["--stop-after", str(stop_after)] if stop_after else []
        words += ["--torchft", torchft] if torchft else []
        watch = Watch(lab, lambda: _begun(at), -1.0, float("inf"))
        words = [BIN / "python", SCRIPTS / "text_contestants.py", *words]
        run_workers(lab, words, timeout_seconds=timeout_seconds, until=watch.enough)
        trace, result = of_peer(json.loads(at.read_text())), {}
    steps = trace.marks[-1].step if trace.marks else 0
    log = (lab.hosts[0].home / "stderr").read_text(errors="replace")
    return Measured(trace, watch.bytes_per_step(steps), result, log)


def attempts(ways: Mapping[str, Callable[[], T]], repeats: int) -> tuple[dict[str, list[T]], dict[str, str]]:
    """`harness.interleave`, but a way that fails is left out from then on; and why it failed."""
    reasons: dict[str, str] = {}

    def attempt(name: str) -> list[T]:
        if name in reasons:
            return []
        try:
            return [ways[name]()]
        except Failed as error:
            reasons[name] = str(error).strip().splitlines()[-1]
            print(f"\n  {name} is left out: {error}", file=sys.stderr)
            return []

    tried = harness.interleave({name: functools.partial(attempt, name) for name in ways}, repeats)
    return {name: [one for got in each for one in got] for name, each in tried.items() if name not in reasons}, reasons


def _begun(report: Path) -> Trace:
    """A peer reports its start by an empty file, and all figures at its end."""
    return Trace((Mark(0, 0.0, 0.0),) if report.exists() else (), ())


def _options(run: Run, shape: str) -> list[str]:
    """`run` as options; those of the model begin with `shape`."""
    values = {f"{shape}layers": run.layers, f"{shape}width": run.width, f"{shape}context": run.context}
    values |= {"--global-batch": run.global_batch, "--micro-batch": run.micro_batch, "--steps": run.steps}
    values |= {"--evaluate-every": run.evaluate_every}
    return [word for name, value in values.items() for word in (name, str(value))]
