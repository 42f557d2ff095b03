"""Kills runs at random moments: each must leave nothing behind, and resume to the same result.

    python -m tests.campaigns.kills --moments 50

One run without a kill gives the expected duration and result. Then, for each moment, the launcher, a worker or the fork
server of another run is killed by SIGKILL, in turn during start-up and after the first step. Afterwards none of its
processes, shared memory or temporary files may exist, and resuming it (or starting it, if it had not begun) must give
the expected result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.leftovers import session, shared_bytes, shared_memory, within

GONE_SECONDS = 5.0
END_SECONDS = 120.0
LEAK_BYTES = 16 << 20  # less than one run with three workers shares
_CACHE = "torchinductor_"  # torch keeps one for all processes of a user, so it is no leftover of a run
_ROLES = ("launcher", "worker 0", "launcher", "worker 1", "forkserver", "worker 2", "launcher")


@dataclass(frozen=True)
class Subject:
    """What is hit. In its commands ``{directory}`` stands for a fresh directory.

    Args:
        start: begins the run.
        resume: goes on with it.
        begun: whether the run in a directory can be resumed.
        outcome: what came of the run in a directory: the same, whether it was hit or not.
        seconds: how long the run in a directory took to start, and from its first step on.
        stepping: whether the run in a directory has come to its first step.
        state: what the run in a directory was doing when it was hit, in words.
    """

    start: Sequence[str]
    resume: Sequence[str]
    begun: Callable[[Path], bool]
    outcome: Callable[[Path], object]
    seconds: Callable[[Path], tuple[float, float]]
    stepping: Callable[[Path], bool] = lambda _: True
    state: Callable[[Path], str] = lambda _: "hit"


@dataclass(frozen=True)
class Moment:
    """When a run is hit, in seconds after its start or after its first step, and who of it is."""

    after_seconds: float
    stepping: bool
    role: str


def draw(seed: int, moments: int, seconds: tuple[float, float]) -> list[Moment]:
    """`moments` moments, by turns within the two `seconds`: of the start, and of what follows the first step."""
    stream = random.Random(seed)
    return [Moment(stream.uniform(0, seconds[i % 2]), i % 2 == 1, _ROLES[i % len(_ROLES)]) for i in range(moments)]


class Campaign:
    """Runs of `subject`, each with its own files below `directory`."""

    def __init__(self, subject: Subject, directory: Path) -> None:
        self._subject, self._directory = subject, directory
        self._memory, self._bytes = shared_memory(), shared_bytes()

    def fresh(self, name: str) -> Path:
        """A directory for one run."""
        at = self._directory / name
        (at / "temporary").mkdir(parents=True)
        return at

    def hit(self, at: Path, moment: Moment) -> tuple[str, str]:
        """Start a run and hit it: what it was doing, and what was wrong after that, empty if nothing was."""
        with self.launched(self._subject.start, at) as run:
            if moment.stepping:
                within(END_SECONDS, lambda: self._subject.stepping(at) or run.poll() is not None)
            try:
                run.wait(moment.after_seconds)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):  # it came to its end just now
                    os.kill(_victim(run.pid, moment.role), signal.SIGKILL)
            hangs = _hangs(run)
        return self._subject.state(at), hangs or self.left_over(run.pid, at)

    def complete(self, at: Path) -> str:
        """Bring a run to its end, hit or not; what was wrong, empty if nothing was."""
        command = self._subject.resume if self._subject.begun(at) else self._subject.start
        with self.launched(command, at) as run:
            hangs = _hangs(run)
        if run.returncode and not hangs:
            return f"{shlex.join(command)} ended with {run.returncode}:\n{(at / 'said').read_text()}"
        return hangs or self.left_over(run.pid, at)

    def left_over(self, leader: int, at: Path) -> str:
        """What outlived the command that ran as process `leader`."""
        if not within(GONE_SECONDS, lambda: not session(leader)):
            return f"processes stay: {_kill_all(leader)}"
        if named := shared_memory() - self._memory:
            return f"shared memory stays: {named}"
        files = [path.name for path in (at / "temporary").iterdir()]
        if files := [name for name in files if not name.startswith(_CACHE)]:
            return f"temporary files stay: {files}"
        return ""

    def leaked_bytes(self) -> int:
        """By how much shared memory without a name has grown, on the whole machine."""
        return max(0, shared_bytes() - self._bytes)

    def launched(self, command: Sequence[str], at: Path) -> subprocess.Popen[bytes]:
        """`command` as leader of a session: whoever belongs to it can be told from all others."""
        words = [word.replace("{directory}", str(at)) for word in command]
        environ = os.environ | {"TMPDIR": str(at / "temporary")}
        with (at / "said").open("wb") as said:  # no pipe, which a process that stays would keep open
            return subprocess.Popen(words, env=environ, stdout=said, stderr=said, start_new_session=True)


def _hangs(run: subprocess.Popen[bytes]) -> str:
    """Wait for its end; what was wrong, empty if nothing was."""
    try:
        run.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not ended after {END_SECONDS} s: {_kill_all(run.pid)}"
    return ""


def _kill_all(leader: int) -> dict[int, str]:
    """End a session; who was in it."""
    left = session(leader)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _victim(leader: int, role: str) -> int:
    """The process of that role; before it is there, the one that will bring it about."""
    named = {name: pid for pid, name in session(leader).items()}
    found = (named.get(f"unisono {other}") for other in (role, "forkserver"))
    return next((pid for pid in found if pid), leader) if role != "launcher" else leader


def conduct(subject: Subject, directory: Path, moments: int, seed: int = 0) -> list[str]:
    """Hit `moments` runs, each in a directory of its own below `directory`; all that went wrong."""
    campaign = Campaign(subject, directory)
    whole = campaign.fresh("undisturbed")
    if wrong := campaign.complete(whole):
        return [wrong]
    expected, seconds = subject.outcome(whole), subject.seconds(whole)
    found: list[str] = []
    states: Counter[str] = Counter()
    for number, moment in enumerate(draw(seed, moments, seconds), 1):
        at = campaign.fresh(str(number))
        state, wrong = campaign.hit(at, moment)
        wrong = wrong or campaign.complete(at)
        if not wrong and subject.outcome(at) != expected:
            wrong = f"came to {subject.outcome(at)} and not to {expected}"
        states[state] += 1
        since = "the first step" if moment.stepping else "the start"
        told = f"{moment.role}, {moment.after_seconds:.2f} s after {since} ({state})"
        print(f"{number}/{moments} {told}: {wrong or 'nothing left, same end'}", flush=True)
        found += [f"{number}: {told}: {wrong}"] if wrong else []
        if not wrong:
            shutil.rmtree(at)
    print(", ".join(f"{count} while {state}" for state, count in states.most_common()))
    if not within(GONE_SECONDS, lambda: campaign.leaked_bytes() < LEAK_BYTES):
        found.append(f"shared memory has grown by {campaign.leaked_bytes()} bytes")
    return found


def training(workers: int, steps: int, task: str = "digits") -> Subject:
    """A run that writes a checkpoint every 5 steps."""
    command = (sys.executable, "-m", "unisono", "train", task, "--run-dir", "{directory}/run")
    options = f"--workers {workers} --steps {steps} --checkpoint-every 5 --compress Exact()".split()

    def summary(at: Path) -> Any:
        return json.loads((at / "run" / "summary.json").read_text())

    return Subject(
        start=[*command, *options],
        resume=[*command, "--resume"],
        begun=lambda at: (at / "run" / "config.toml").exists(),
        outcome=lambda at: summary(at)["weights_sha256"],
        seconds=lambda at: (
            summary(at)["startup_seconds"],
            summary(at)["wall_seconds"] - summary(at)["startup_seconds"],
        ),
        stepping=lambda at: _mentions(at / "run" / "events.jsonl", '"event": "step"'),
        state=lambda at: _state(at / "run"),
    )


def _mentions(file: Path, text: str) -> bool:
    return file.exists() and text in file.read_text()


def _state(run: Path) -> str:
    if not (run / "config.toml").exists():
        return "the run had not begun"
    if (run / "summary.json").exists():
        return "it was over"
    checkpoints = [path.name for path in (run / "checkpoints").glob("*")]
    if any(name.startswith(".") for name in checkpoints):
        return "a checkpoint was written"
    return "it trained" if _mentions(run / "events.jsonl", '"event": "step"') else "the workers started"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="campaign-"))
    wrong = conduct(training(given.workers, given.steps), directory, given.moments, given.seed)
    print(*wrong, sep="\n")
    print(f"{len(wrong)} of {given.moments} went wrong, {time.monotonic() - began:.0f} s")
    if wrong:
        print(f"what is left of them lies in {directory}")
    else:
        shutil.rmtree(directory)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
