"""Ways of training the task ``text`` on several hosts: ours by the words after ``unisono train``, peers by theirs."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import BIN, PEERS
from benchmarks.netlab.network import Host, Netlab
from benchmarks.netlab.trace import Trace, of_peer, of_run
from benchmarks.netlab.workers import Finished, run_workers

_numbers = itertools.count()


@dataclass(frozen=True)
class Way:
    """One line of a table.

    Args:
        name: as the table has it.
        words: of the command line.
        ours: for ``unisono train text``; else for ``peers/text.py``.
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
    """One run of one way."""

    trace: Trace
    finished: Finished

    @property
    def bytes_per_step(self) -> float:
        """That the busiest host sent, start-up and evaluations included."""
        return max(self.finished.sent_bytes) / max((mark.step for mark in self.trace.marks), default=1)


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
    if not way.ours:
        return _peer(lab, way, run, target, stop_after, timeout_seconds, torchft)
    at = f"run{next(_numbers)}"
    home = lab.hosts[0].home / at

    def enough(host: Host) -> bool:
        trace = of_run(home)
        done = trace.marks[-1].step if trace.marks else 0
        return trace.reached(target) is not None or done >= (stop_after or run.steps + 1)

    words = ["train", "text", *_options(run, "--model."), *shlex.split(way.words), "--threads", "1", "--run", at]
    finished = run_workers(lab, [BIN / "unisono", *words], timeout_seconds=timeout_seconds, until=enough)
    return Measured(of_run(home), finished)


def _peer(
    lab: Netlab, way: Way, run: Run, target: float, stop_after: int | None, timeout_seconds: float, torchft: str
) -> Measured:
    report = lab.hosts[0].home / f"report{next(_numbers)}.json"
    words = [*shlex.split(way.words), *_options(run, "--"), "--target", str(target), "--report", report]
    words += ["--stop-after", str(stop_after)] if stop_after else []
    words += ["--torchft", torchft] if torchft else []
    command: Sequence[str | Path] = [BIN / "python", PEERS / "text.py", *words]
    finished = run_workers(lab, command, timeout_seconds=timeout_seconds)
    return Measured(of_peer(json.loads(report.read_text())), finished)


def _options(run: Run, shape: str) -> list[str]:
    """`run` as options; those of the model begin with `shape`."""
    values = {f"{shape}layers": run.layers, f"{shape}width": run.width, f"{shape}context": run.context}
    values |= {"--global-batch": run.global_batch, "--micro-batch": run.micro_batch, "--steps": run.steps}
    values |= {"--evaluate-every": run.evaluate_every}
    return [word for name, value in values.items() for word in (name, str(value))]
