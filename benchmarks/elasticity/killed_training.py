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
WARM_STEPS = 20  # of every worker, before something is done to one
LOOK_SECONDS = 0.01  # between two looks at what was written
UNISONO, TORCHRUN, TORCHFT = "unisono", "torchrun", "torchft"


@dataclass(frozen=True)
class Step:
    """A process has a further step in its weights.

    Args:
        at: seconds on the machine's clock.
        number: steps that are in them.
        computed: micro-batches that it computed since its step before, those for nothing included.
        workers: that took part, where the process knows; else 0.
    """

    at: float
    number: int
    computed: int
    workers: int = 0


@dataclass
class Life:
    """A process: when it was started, when it was ready to write, and its steps."""

    pid: int
    born: float = 0.0
    ready: float = 0.0
    steps: list[Step] = field(default_factory=list)

    def read(self, line: str) -> None:
        """One more line that it wrote."""
        told = json.loads(line)
        if "born" in told:
            self.born, self.ready = told["born"], told["at"]
        else:
            self.steps.append(Step(told["at"], told["step"], told["computed"], told["workers"]))

    def resume(self) -> None:
        """It was frozen, and goes on."""
        os.kill(self.pid, signal.SIGCONT)

    @property
    def alive(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False


@dataclass(frozen=True)
class Recovery:
    """What one death cost; seconds since it.

    Args:
        next_seconds: until a step that the dead had no part in.
        steps_lost: that were in somebody's weights and had to be taken once more.
        born_seconds: until a process was there in its place.
        back_seconds: until that had its first step in the weights; `ready_seconds`: since it was started.
    """

    next_seconds: float
    steps_lost: int
    born_seconds: float
    back_seconds: float
    ready_seconds: float


def recovery(lives: Sequence[Life], dead: Life, at: float) -> Recovery:
    """What `lives` show of the death of `dead`, at that time; raises LookupError while they do not show all of it."""
    ours = dead.steps[-1].number
    steps = sorted(
        ((step, life) for life in lives if life is not dead for step in life.steps if step.at > at),
        key=lambda each: each[0].at,
    )
    without = next((s for s, life in steps if _without(s, life, ours, at)), None)
    another = next((life for life in sorted(lives, key=lambda life: life.born) if life.born > at), None)
    if without is None or another is None or not another.steps:
        raise LookupError("it is not over")
    before = max(s.number for life in lives for s in life.steps if s.at < without.at)
    back = another.steps[0].at
    return Recovery(without.at - at, max(0, before + 1 - without.number), another.born - at, back - at,
                    back - another.born)  # fmt: skip


def _without(step: Step, life: Life, last: int, at: float) -> bool:
    """Whether the worker that died at that time, whose own last step was `last`, had no part in `step` of `life`: the
    one that was under way it may have had."""
    fair = MICRO_BATCHES // WORKERS
    shared = step.workers == WORKERS if step.workers else step.computed == fair
    return life.born > at or step.number > last + 1 or not shared


def spoilt(tally: Sequence[float], steps: int) -> tuple[int, int]:
    """Samples that are missing in weights of so many steps, and that are in them once more than they should be."""
    plan = MicroBatchPlan(SAMPLES, MICRO_BATCHES * MICRO_BATCH, MICRO_BATCH)
    used = [plan.indices(step, m) for step in range(steps) for m in range(MICRO_BATCHES)]
    right = np.bincount(np.concatenate(used), minlength=SAMPLES)
    apart = np.rint(np.asarray(tally)) - right
    return int(-apart[apart < 0].sum()), int(apart[apart > 0].sum())


def usual_seconds(life: Life) -> float:
    """Of a step, by the median."""
    return statistics.median(b.at - a.at for a, b in pairwise(life.steps))


def command(way: str, folder: Path, *, workers: int = WORKERS, torchft: str = "") -> list[str]:
    """What a user would type, to train until told to stop."""
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
    """One that is under way, with its processes; `started` makes it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], workers: int) -> None:
        self.folder, self._process, self._workers = folder, process, workers
        self._read: dict[Path, tuple[int, Life]] = {}

    def lives(self) -> list[Life]:
        """All processes that there were, as far as they have written what they did."""
        for path in self.folder.glob("*.jsonl"):
            read, life = self._read.get(path, (0, Life(int(path.stem))))
            with path.open("rb") as file:
                file.seek(read)
                whole = file.read().rpartition(b"\n")[0]
            for line in whole.decode().splitlines():
                life.read(line)
            self._read[path] = read + len(whole) + bool(whole), life
        return [life for _, life in self._read.values()]

    def of(self, pid: int) -> Life:
        """The process of that number."""
        return next(life for life in self.lives() if life.pid == pid)

    def present(self, steps: int = 1) -> list[Life]:
        """Processes that are there, with so many steps, in the order in which they were started."""
        return sorted((o for o in self.lives() if len(o.steps) >= steps and o.alive), key=lambda o: (o.born, o.pid))

    def complete(self, steps: int = WARM_STEPS) -> list[Life] | None:
        """All workers, once each of them has so many steps."""
        found = self.present(steps)
        return found if len(found) == self._workers else None

    def until(self, look: Callable[[], Any], within_seconds: float) -> Any:
        """What `look` finds, once it finds something; it has no say while it raises LookupError.

        Raises:
            TimeoutError: it did not, or the command has ended.
        """
        end = time.monotonic() + within_seconds
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(LookupError):
                if found := look():
                    return found
            time.sleep(LOOK_SECONDS)
        raise TimeoutError(f"not within {within_seconds:g} s, exit code {self._process.poll()}")

    def do(self, number: signal.Signals, chance: random.Random, steps: int = 1) -> tuple[Life, float]:
        """Send one of the workers that are present, with so many steps, the signal; which, and when."""
        life = chance.choice(self.present(steps))
        at = time.monotonic()
        os.kill(life.pid, number)
        return life, at

    def tally(self, within_seconds: float = 60.0) -> tuple[int, int, int]:
        """Steps in the weights of one of the workers; samples that are missing in them, or too often."""
        (self.folder / "enough").touch()
        path = self.until(lambda: next(self.folder.glob("[0-9]*[0-9].npz"), None), within_seconds)
        with np.load(path) as found:
            steps = int(found["steps"])
            return steps, *spoilt(found["tally"], steps)

    def words(self) -> str:
        """The end of what the command has said."""
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
            raise TimeoutError(f"{way}: {error}\n{training.words()}") from error
        finally:
            harness.end(process)
