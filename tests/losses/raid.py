"""``unisono`` with some words, whose launcher kills workers of its own: ``python -m tests.losses.raid PLAN WORDS…``.

A launcher knows the moment at which a replacement begins, and its process id. PLAN is JSON, see `Plan`.
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

from unisono.cli import main
from unisono.launch import local
from unisono.launch.seen import Seen


@dataclass(frozen=True)
class Strike:
    """One kill.

    Args:
        delay_seconds: after the replacement for the last victim began; of a strike without `heir`, after the last kill.
        heir: the victim is that replacement; else any worker that is there.
        whom: 0 to 1; picks among these.
    """

    delay_seconds: float
    heir: bool
    whom: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What befalls a run.

    Args:
        run: the run's directory, or a file to which each line adds a step.
        first_step: done before the first kill, which hits any worker.
        whom: 0 to 1; picks it.
        strikes: the kills after it.
    """

    run: str
    first_step: int
    whom: float
    strikes: tuple[Strike, ...]

    @staticmethod
    def draw(seed: int, run: Path, kills: int, first_step: int, heirs: float) -> Plan:
        """`kills` of them; `heirs` is the share of those that hit the replacement of the last victim."""
        chance = random.Random(f"losses {seed}")
        strikes = tuple(
            Strike(chance.uniform(0, 1.5), chance.random() < heirs, chance.random()) for _ in range(kills - 1)
        )
        return Plan(str(run), first_step + chance.randrange(8), chance.random(), strikes)

    @staticmethod
    def read(text: str) -> Plan:
        """What `write` wrote."""
        told = json.loads(text)
        return Plan(**{**told, "strikes": tuple(Strike(**each) for each in told["strikes"])})

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def last_step(run: Path) -> int:
    """The furthest that is on record."""
    with suppress(OSError):
        lines = (run / "events.jsonl").read_bytes().splitlines()[-40:]
        for line in reversed(lines):
            with suppress(ValueError):
                event = json.loads(line)
                if event["event"] == "step":
                    return int(event["step"])
    return 0


class Raiding(Seen):
    """Kills as the plan says, and writes down whom in ``strikes.jsonl`` beside the run."""

    plan: Plan

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._there: dict[str, int] = {}
        self._latest = ""
        self._news = threading.Condition()
        threading.Thread(target=self._raid, daemon=True).start()

    def began(self, worker: str, pid: int) -> None:
        """See `Seen`."""
        super().began(worker, pid)
        with self._news:
            self._there[worker], self._latest = pid, worker
            self._news.notify_all()

    def ended(self, worker: str) -> None:
        """See `Seen`."""
        with self._news:
            self._there.pop(worker, None)
        super().ended(worker)

    def _raid(self) -> None:
        run = Path(self.plan.run)
        while last_step(run) < self.plan.first_step:
            time.sleep(0.02)
        self._kill(self._any(self.plan.whom))
        for strike in self.plan.strikes:
            with self._news:
                before = self._latest
                if strike.heir:
                    self._news.wait_for(lambda before=before: self._latest != before)  # type: ignore[misc]
            time.sleep(strike.delay_seconds)
            self._kill(self._latest if strike.heir else self._any(strike.whom))

    def _any(self, whom: float) -> str:
        with self._news:
            there = sorted(self._there)
            return there[int(whom * len(there))] if there else ""

    def _kill(self, worker: str) -> None:
        pid = self._there.get(worker)
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        run = Path(self.plan.run)
        with run.with_name(f"{run.name}-strikes.jsonl").open("a") as file:
            file.write(json.dumps({"at": time.time(), "worker": worker, "step": last_step(run)}) + "\n")


if __name__ == "__main__":
    Raiding.plan = Plan.read(sys.argv[1])
    local.Seen = Raiding  # type: ignore[misc]
    sys.exit(main(sys.argv[2:]))
