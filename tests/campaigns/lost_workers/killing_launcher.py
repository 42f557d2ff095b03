"""The command ``unisono``, with a launcher that kills its own workers.

    python -m tests.campaigns.lost_workers.killing_launcher PLAN WORDS…

Only the launcher knows the moment at which a replacement starts, and its process id.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.lost_workers.tasks import FIRST, LAST, STEPS, allow
from unisono.cli import main
from unisono.launch import launcher as local
from unisono.launch.process_monitor import ProcessMonitor

MOST_SECONDS = 1.5  # between the beginning of a replacement and its end


@dataclass(frozen=True)
class Strike:
    """One kill.

    Args:
        seconds: after the last victim's replacement has begun; without `heir`, after the kill before.
        heir: the victim is that replacement; else any worker that is there.
        step: a step is awaited besides, so that no limit is exceeded.
        whom: 0 to 1; picks among those who are there.
    """

    seconds: float
    heir: bool
    step: bool
    whom: float


@dataclass(frozen=True)
class Plan:
    """What befalls a run.

    Args:
        run: its directory.
        over: a file that is made after the last kill, or, where that one is `late`, before: the run then comes to its
            end, and it hits what it hits.
        first_step: which is done before the first worker is killed; 0: this one may have just begun.
        strikes: that one, and all others.
    """

    run: str
    over: str
    late: bool
    first_step: int
    strikes: tuple[Strike, ...]

    @staticmethod
    def draw(seed: int, run: Path, over: Path, kills: int, heirs: float) -> Plan:
        """Of `kills`, of which a share of `heirs` hit the replacement for the last victim."""
        chance = random.Random(f"losses {seed}")
        strikes = [Strike(chance.uniform(0, MOST_SECONDS), False, False, chance.random())]
        for number in range(1, kills):
            seconds, heir, whom = chance.uniform(0, MOST_SECONDS), chance.random() < heirs, chance.random()
            strikes.append(Strike(seconds, heir, number % 2 == 0, whom))
        return Plan(str(run), str(over), chance.random() < 0.3, chance.choice([0, *range(6, 14)]), tuple(strikes))

    @staticmethod
    def read(text: str) -> Plan:
        """What `write` wrote."""
        told = json.loads(text)
        return Plan(**{**told, "strikes": tuple(Strike(**each) for each in told["strikes"])})

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def steps(run: Path) -> list[int]:
    """Those that are on record, in the order in which they were taken."""
    found = []
    with suppress(OSError):
        for line in (run / "events.jsonl").read_bytes().splitlines():
            with suppress(ValueError):  # a part of a line
                event = json.loads(line)
                if event["event"] == "step":
                    found.append(int(event["step"]))
    return found


class Raiding(ProcessMonitor):
    """Kills as `plan` says, and writes down whom in ``strikes.jsonl`` beside the run."""

    plan: Plan

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._there: dict[str, int] = {}
        self._news, self._begun = threading.Condition(), 0
        threading.Thread(target=self._raid, daemon=True).start()

    def process_started(self, worker: str, pid: int) -> None:
        """See `ProcessMonitor`."""
        super().process_started(worker, pid)
        with self._news:
            self._there[worker] = pid
            self._begun += 1
            self._news.notify_all()

    def process_exited(self, worker: str) -> None:
        """See `ProcessMonitor`."""
        with self._news:
            self._there.pop(worker, None)
        super().process_exited(worker)

    def _raid(self) -> None:
        run = Path(self.plan.run)
        _await_steps(run, self.plan.first_step)
        with self._news:
            self._news.wait_for(lambda: self._there)
        for number, strike in enumerate(self.plan.strikes, 1):
            with self._news:
                begun, taken = self._begun, len(steps(run))
                if strike.heir:
                    self._news.wait_for(lambda begun=begun: self._begun > begun)  # type: ignore[misc]
            if self.plan.late and strike is self.plan.strikes[-1]:
                Path(self.plan.over).touch()
            time.sleep(strike.seconds)
            if strike.step:
                _await_steps(run, taken + 1)
            self._strike(strike, run)
            allow(self.plan.over, FIRST + (STEPS - LAST - FIRST) * number // len(self.plan.strikes))
        Path(self.plan.over).touch()

    def _strike(self, strike: Strike, run: Path) -> None:
        with self._news:
            there = list(self._there)
            if not there:  # the run is over
                return
            victim = there[-1] if strike.heir else there[int(strike.whom * len(there))]
            os.kill(self._there.pop(victim), signal.SIGKILL)
        with Path(self.plan.over).with_name("strikes.jsonl").open("a") as file:
            taken = steps(run)
            file.write(json.dumps({"worker": victim, "step": max(taken[-1:], default=0), "taken": len(taken)}) + "\n")


def _await_steps(run: Path, number: int) -> None:
    """Also returns where no further step is begun before the raid is over."""
    while len(taken := steps(run)) < number and taken[-1:] != [STEPS - LAST]:
        time.sleep(0.01)


if __name__ == "__main__":
    Raiding.plan = Plan.read(sys.argv[1])
    local.ProcessMonitor = Raiding  # type: ignore[misc]
    sys.exit(main(sys.argv[2:]))
