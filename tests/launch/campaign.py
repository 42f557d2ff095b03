"""Kill runs at random moments of their lives: nothing of them may stay, and all must come to the same end.

    python -m tests.launch.campaign --moments 50

One run is left in peace: how long it takes, and what comes of it, is the measure. Then each moment has a run of its
own: its launcher, a worker or the forkserver is killed (SIGKILL), in turn while it starts and while it trains. After
that no process of it may exist, no shared memory and no temporary file; and the command that goes on with it (the
one that starts it, where it had not yet begun) must bring it to what came of the run that was left in peace.
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

from tests.launch.observation import session, shared_bytes, shared_memory, within

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
        phases: when, in seconds, each phase of the run in a directory ended.
        state: what the run in a directory was doing when it was hit, in words.
    """

    start: Sequence[str]
    resume: Sequence[str]
    begun: Callable[[Path], bool]
    outcome: Callable[[Path], object]
    phases: Callable[[Path], Sequence[float]]
    state: Callable[[Path], str] = lambda _: "hit"


@dataclass(frozen=True)
class Moment:
    """When a run is hit, in seconds after its start, and who of it is."""

    after_seconds: float
    role: str


def draw(seed: int, moments: int, phases: Sequence[float]) -> list[Moment]:
    """`moments` moments between 0 and the last of `phases`, which are seconds; by turns in each phase."""
    stream = random.Random(seed)
    spans = list(zip((0.0, *phases), phases))
    return [Moment(stream.uniform(*spans[i % len(spans)]), _ROLES[i % len(_ROLES)]) for i in range(moments)]


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
    expected, phases = subject.outcome(whole), subject.phases(whole)
    found: list[str] = []
    states: Counter[str] = Counter()
    for number, moment in enumerate(draw(seed, moments, phases), 1):
        at = campaign.fresh(str(number))
        state, wrong = campaign.hit(at, moment)
        wrong = wrong or campaign.complete(at)
        if not wrong and subject.outcome(at) != expected:
            wrong = f"came to {subject.outcome(at)} and not to {expected}"
        states[state] += 1
        told = f"{moment.role} at {moment.after_seconds:.2f} s ({state})"
        print(f"{number}/{moments} {told}: {wrong or 'nothing left, same end'}", flush=True)
        found += [f"{number}: {told}: {wrong}"] if wrong else []
        if not wrong:
            shutil.rmtree(at)
    print(", ".join(f"{count} while {state}" for state, count in states.most_common()))
    if not within(GONE_SECONDS, lambda: campaign.leaked_bytes() < LEAK_BYTES):
        found.append(f"shared memory has grown by {campaign.leaked_bytes()} bytes")
    return found


def training(workers: int, steps: int) -> Subject:
    """A run of the built-in digits that writes a checkpoint every 5 steps."""
    command = (sys.executable, "-m", "unisono", "train", "digits", "--run", "{directory}/run")
    options = f"--workers {workers} --steps {steps} --checkpoint-every 5 --compress Exact()".split()

    def summary(at: Path) -> Any:
        return json.loads((at / "run" / "summary.json").read_text())

    return Subject(
        start=[*command, *options],
        resume=[*command, "--resume"],
        begun=lambda at: (at / "run" / "config.toml").exists(),
        outcome=lambda at: summary(at)["weights_sha256"],
        phases=lambda at: (summary(at)["startup_seconds"], summary(at)["wall_seconds"]),
        state=lambda at: _state(at / "run"),
    )


def _state(run: Path) -> str:
    if not (run / "config.toml").exists():
        return "the run had not begun"
    if (run / "summary.json").exists():
        return "it was over"
    checkpoints = [path.name for path in (run / "checkpoints").glob("*")]
    if not checkpoints:
        return "the workers started"
    return "a checkpoint was written" if any(name.startswith(".") for name in checkpoints) else "it trained"


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
