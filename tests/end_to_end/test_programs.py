"""Whole training scripts come to the same numbers on two workers, once a few lines of them are changed."""

from __future__ import annotations

import difflib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("programs")
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if not path.stem.endswith("_distributed"))
LAUNCH = [sys.executable, "-m", "unisono", "launch", "--workers", "2"]
TOLERANCE = 1e-6


def digest(*command: str, at: Path) -> dict[str, Any]:
    """The numbers that a program prints last."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=at, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("digest "))
    found: dict[str, Any] = json.loads(line.removeprefix("digest "))
    return found


def flat(values: Any) -> Iterator[float]:
    for value in values.values() if isinstance(values, dict) else values:
        yield from flat(value) if isinstance(value, dict | list) else [value]


def differ(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest relative difference between two digests."""
    pairs = zip(flat(one), flat(other), strict=True)
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) if math.isfinite(a - b) else math.inf for a, b in pairs)


def changed_lines(name: str) -> int:
    """How many lines are to be added or changed for several workers; blank ones do not count."""
    one, other = (
        [line for line in (PROGRAMS / f"{each}.py").read_text().splitlines() if line.strip()]
        for each in (name, f"{name}_distributed")
    )
    codes = difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in codes if kind != "equal")


def test_few_lines_are_changed() -> None:
    changed = {name: changed_lines(name) for name in NAMES}
    assert statistics.median(changed.values()) <= 4, changed
    assert max(changed.values()) <= 6, changed


@pytest.mark.short(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_program_on_two_workers_comes_to_what_it_does_alone(name: str, tmp_path: Path) -> None:
    alone = digest(sys.executable, str(PROGRAMS / f"{name}.py"), at=tmp_path)
    together = digest(*LAUNCH, str(PROGRAMS / f"{name}_distributed.py"), at=tmp_path)
    assert alone.keys() == together.keys()
    assert differ(alone, together) <= TOLERANCE, (alone, together)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_program_for_several_workers_runs_alone(name: str, tmp_path: Path) -> None:
    plain, single = (digest(sys.executable, str(PROGRAMS / f"{each}.py"), at=tmp_path)
                     for each in (name, f"{name}_distributed"))  # fmt: skip
    assert differ(plain, single) <= TOLERANCE, (plain, single)
