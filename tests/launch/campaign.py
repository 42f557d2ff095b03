"""Kill a run at random moments, and see that nothing of it stays and that it can always be resumed.

    python -m tests.launch.campaign --moments 50 --seconds 20 --start 'unisono train …' --resume '… --resume'

Each time, the command ``--start`` (later: ``--resume``, once the run exists) is started, and at a moment
drawn from the seed its launcher or one of its workers is killed by SIGKILL, or its launcher gets SIGINT or
SIGTERM. Then no process of it may exist, and no file of ours in shared memory that was not there before.
After the last moment ``--resume`` must end with 0. In the commands, ``{directory}`` stands for a fresh
directory.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launch.observation import processes, shared_memory, within

MARK = "UNISONO_CAMPAIGN"  # in the environment of every process of a campaign
GONE_SECONDS = 10.0


@dataclass(frozen=True)
class Moment:
    """When and how a run is hit.

    Args:
        after_seconds: from the start of its command.
        role: ``launcher``, ``forkserver`` or ``worker``.
        number: of the signal.
    """

    after_seconds: float
    role: str
    number: int


def draw(seed: int, moments: int, seconds: float) -> list[Moment]:
    """`moments` moments within the first `seconds` of a run; most hit the launcher or a worker by SIGKILL."""
    stream = random.Random(seed)
    ways = [("launcher", signal.SIGKILL), ("worker", signal.SIGKILL), ("launcher", signal.SIGKILL)]
    ways += [("worker", signal.SIGKILL), ("launcher", signal.SIGINT), ("launcher", signal.SIGTERM)]
    ways += [("forkserver", signal.SIGKILL)]
    return [Moment(stream.uniform(0, seconds), *stream.choice(ways)) for _ in range(moments)]


class Campaign:
    """One run, hit again and again.

    Args:
        start: the command that begins it; exits with 2 where the run exists already.
        resume: the command that goes on with it.
    """

    def __init__(self, start: Sequence[str], resume: Sequence[str]) -> None:
        self._start, self._resume = list(start), list(resume)
        self._mark = uuid.uuid4().hex
        # SPT_NOENV: processes that name themselves leave their environment, and the mark in it, readable
        self._environ = os.environ | {MARK: self._mark, "SPT_NOENV": "1"}
        self._memory = shared_memory()

    def hit(self, moment: Moment, resumed: bool) -> str:
        """Run the command until `moment`; what was wrong after it, empty if nothing was."""
        command = self._resume if resumed else self._start
        with subprocess.Popen(command, env=self._environ, stdout=subprocess.DEVNULL) as run:
            try:
                run.wait(moment.after_seconds)
            except subprocess.TimeoutExpired:
                self._strike(run, moment)
            run.wait(60)
        return self.left_over()

    def finish(self) -> str:
        """Resume to the end; what was wrong, empty if nothing was."""
        with tempfile.TemporaryFile() as said:  # no pipe, which a process that stays would keep open
            done = subprocess.run(self._resume, env=self._environ, stdout=said, stderr=said, check=False)
            said.seek(0)
            text = said.read().decode(errors="replace")
        return f"resume ended with {done.returncode}:\n{text}" if done.returncode else self.left_over()

    def left_over(self) -> str:
        """The processes and the shared memory that outlived the command."""
        if not within(GONE_SECONDS, lambda: not self.processes()):
            left = self.processes()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return f"processes stay: {left}"
        if not within(GONE_SECONDS, lambda: shared_memory() <= self._memory):
            return f"shared memory stays: {shared_memory() - self._memory}"
        return ""

    def _strike(self, run: subprocess.Popen[bytes], moment: Moment) -> None:
        named = {pid for pid, name in self.processes().items() if f" {moment.role}" in name}
        target = run.pid if moment.role == "launcher" else min(named, default=run.pid)
        os.kill(target, moment.number)

    def processes(self) -> dict[int, str]:
        """All processes that the commands started, by their command lines."""
        return processes(self._mark)


def conduct(start: Sequence[str], resume: Sequence[str], moments: Sequence[Moment], exists: Path) -> list[str]:
    """All that went wrong; `exists` is there once the run can be resumed."""
    campaign = Campaign(start, resume)
    wrong = []
    for number, moment in enumerate(moments):
        said = campaign.hit(moment, resumed=exists.exists())
        print(f"{number + 1}/{len(moments)} {moment}: {said or 'clean'}", flush=True)
        wrong += [f"{moment}: {said}"] if said else []
    said = campaign.finish()
    print(f"resume: {said or 'to the end'}", flush=True)
    return wrong + ([said] if said else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--start", required=True)
    parser.add_argument("--resume", required=True)
    parser.add_argument("--exists", default="{directory}", help="path that is there once the run can be resumed")
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of the window of moments")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="campaign-") as directory:
        fill = [text.replace("{directory}", directory) for text in (given.start, given.resume, given.exists)]
        moments = draw(given.seed, given.moments, given.seconds)
        wrong = conduct(shlex.split(fill[0]), shlex.split(fill[1]), moments, Path(fill[2]))
    print(f"{len(wrong)} of {given.moments} went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
