"""A training run whose workers are killed or frozen, and the figures from what its processes wrote.

Every process of `scripts/sample_counting_model.py` writes a line, with the monotonic clock, for each step that is in
its weights. A parameter counts in how many steps each sample was. All figures follow from these and from the times of
the faults: the `Recovery` from one death, `spoilt` samples, steps per second.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import BIN, SCRIPTS
from unisono.data import MicroBatchPlan

WORKERS, MICRO_BATCHES, MICRO_BATCH, SAMPLES = 3, 12, 2, 1 << 14  # as in scripts/sample_counting_model.py
WARM_STEPS = 20  # of every worker, before a fault
LOOK_SECONDS = 0.01  # between two reads of the traces
UNISONO, TORCHRUN, TORCHFT = "unisono", "torchrun", "torchft"


@dataclass(frozen=True)
class Step:
    """A further step in the weights of a process.

    Args:
        at: seconds on the machine's clock.
        number: steps that are in them.
        computed: micro-batches that it computed since its step before, discarded ones included.
        workers: that took part, if the process knows; else 0.
    """

    at: float
    number: int
    computed: int
    workers: int = 0


@dataclass
class ProcessTrace:
    """What one process wrote: when it was started, when it was ready, and its steps."""

    pid: int
    born: float = 0.0
    ready: float = 0.0
    steps: list[Step] = field(default_factory=list)

    def read(self, line: str) -> None:
        """Adds one line that the process wrote."""
        record = json.loads(line)
        if "born" in record:
            self.born, self.ready = record["born"], record["at"]
        else:
            self.steps.append(Step(record["at"], record["step"], record["computed"], record["workers"]))

    def resume(self) -> None:
        """Ends a freeze by SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    @property
    def alive(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False


@dataclass(frozen=True)
class Recovery:
    """The cost of one death, in seconds since it.

    Args:
        next_seconds: until a step that the killed worker had no part in.
        steps_lost: that were in the weights of a worker and had to be repeated.
        born_seconds: until its replacement was started.
        back_seconds: until the first step of the replacement was in the weights; `ready_seconds`: from its start.
    """

    next_seconds: float
    steps_lost: int
    born_seconds: float
    back_seconds: float
    ready_seconds: float


def recovery(traces: Sequence[ProcessTrace], lost: ProcessTrace, at: float) -> Recovery:
    """The cost of the death of `lost` at time `at`; raises LookupError while `traces` do not show all of it."""
    ours = lost.steps[-1].number
    steps = sorted(
        ((step, trace) for trace in traces if trace is not lost for step in trace.steps if step.at > at),
        key=lambda each: each[0].at,
    )
    without = next((s for s, trace in steps if _without(s, trace, ours, at)), None)
    another = next((trace for trace in sorted(traces, key=lambda trace: trace.born) if trace.born > at), None)
    if without is None or another is None or not another.steps:
        raise LookupError("it is not over")
    before = max(s.number for trace in traces for s in trace.steps if s.at < without.at)
    back = another.steps[0].at
    return Recovery(without.at - at, max(0, before + 1 - without.number), another.born - at, back - at,
                    back - another.born)  # fmt: skip


def _without(step: Step, trace: ProcessTrace, last: int, at: float) -> bool:
    """Whether the worker that was killed at time `at`, after its step `last`, had no part in `step` of `trace`.

    It may have had a part in the step in progress."""
    fair = MICRO_BATCHES // WORKERS
    shared = step.workers == WORKERS if step.workers else step.computed == fair
    return trace.born > at or step.number > last + 1 or not shared


def spoilt(tally: Sequence[float], steps: int) -> tuple[int, int]:
    """How many uses of samples are missing in the weights after `steps` steps, and how many are too many."""
    plan = MicroBatchPlan(SAMPLES, MICRO_BATCHES * MICRO_BATCH, MICRO_BATCH)
    used = [plan.indices(step, m) for step in range(steps) for m in range(MICRO_BATCHES)]
    right = np.bincount(np.concatenate(used), minlength=SAMPLES)
    apart = np.rint(np.asarray(tally)) - right
    return int(-apart[apart < 0].sum()), int(apart[apart > 0].sum())


def usual_seconds(trace: ProcessTrace) -> float:
    """The median step time."""
    return statistics.median(b.at - a.at for a, b in pairwise(trace.steps))


def command(way: str, folder: Path, *, workers: int = WORKERS, torchft: str = "") -> list[str]:
    """What a user would type, to train until it is stopped."""
    if way == UNISONO:
        task = f"{SCRIPTS / 'sample_counting_model.py'}:task"
        return [str(BIN / "unisono"), "train", task, f"--folder={folder}", f"--workers={workers}",
                f"--run-dir={folder / 'run'}", "--steps=1000000", "--threads=1"]  # fmt: skip
    script = [str(SCRIPTS / "torchrun_torchft.py"), way, f"--folder={folder}"]
    if way == TORCHFT:
        return [sys.executable, *script, f"--workers={workers}", f"--torchft={torchft}"]
    port = harness.free_port()
    return [str(BIN / "torchrun"), f"--nproc-per-node={workers}", f"--master-port={port}", "--max-restarts=1000",
            "--monitor-interval=0.1", *script]  # fmt: skip


class Training:
    """A training run in progress, with its processes; made by `started`."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], workers: int) -> None:
        self.folder, self._process, self._workers = folder, process, workers
        self._read: dict[Path, tuple[int, ProcessTrace]] = {}

    def traces(self) -> list[ProcessTrace]:
        """All processes so far, with what they have written."""
        for path in self.folder.glob("*.jsonl"):
            read, trace = self._read.get(path, (0, ProcessTrace(int(path.stem))))
            with path.open("rb") as file:
                file.seek(read)
                whole = file.read().rpartition(b"\n")[0]
            for line in whole.decode().splitlines():
                trace.read(line)
            self._read[path] = read + len(whole) + bool(whole), trace
        return [trace for _, trace in self._read.values()]

    def of(self, pid: int) -> ProcessTrace:
        """The process with that id."""
        return next(trace for trace in self.traces() if trace.pid == pid)

    def present(self, steps: int = 1) -> list[ProcessTrace]:
        """Running processes with at least `steps` steps, in the order of their start."""
        return sorted((o for o in self.traces() if len(o.steps) >= steps and o.alive), key=lambda o: (o.born, o.pid))

    def complete(self, steps: int = WARM_STEPS) -> list[ProcessTrace] | None:
        """All workers, once each has at least `steps` steps; else None."""
        found = self.present(steps)
        return found if len(found) == self._workers else None

    def until(self, look: Callable[[], Any], within_seconds: float) -> Any:
        """The first true result of `look`, which may raise LookupError before.

        Raises:
            TimeoutError: there was none in time, or the command has ended.
        """
        end = time.monotonic() + within_seconds
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(LookupError):
                if found := look():
                    return found
            time.sleep(LOOK_SECONDS)
        raise TimeoutError(f"not within {within_seconds:g} s, exit code {self._process.poll()}")

    def signal_one(self, number: signal.Signals, chance: random.Random, steps: int = 1) -> tuple[ProcessTrace, float]:
        """Sends the signal to a random running worker with at least `steps` steps; the worker, and when."""
        trace = chance.choice(self.present(steps))
        at = time.monotonic()
        os.kill(trace.pid, number)
        return trace, at

    def tally(self, within_seconds: float = 60.0) -> tuple[int, int, int]:
        """Steps in the weights of one worker; uses of samples that are missing, and that are too many."""
        (self.folder / "enough").touch()
        path = self.until(lambda: next(self.folder.glob("[0-9]*[0-9].npz"), None), within_seconds)
        with np.load(path) as found:
            steps = int(found["steps"])
            return steps, *spoilt(found["tally"], steps)

    def log_tail(self) -> str:
        """The end of the command's output."""
        return (self.folder / "log").read_text(errors="replace")[-3000:]


@contextlib.contextmanager
def started(way: str, *, workers: int = WORKERS, torchft: str = "") -> Iterator[Training]:
    """A training that ends with the context."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command(way, folder, workers=workers, torchft=torchft), cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        training = Training(folder, process, workers)
        try:
            yield training
        except TimeoutError as error:
            raise TimeoutError(f"{way}: {error}\n{training.log_tail()}") from error
        finally:
            harness.end(process)
