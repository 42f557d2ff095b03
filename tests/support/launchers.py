"""Starts toy launchers, and checks that they leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.leftovers import processes, within
from tests.support.processes import ignoring

ROOT = Path(__file__).parents[2]


@contextmanager
def toy(
    marker: str,
    logs: Path,
    target: str,
    *preload: str,
    module: str = "tests.support.toy_launcher",
    ignored: Iterable[int] = (),
) -> Iterator[subprocess.Popen[str]]:
    """A running launcher, started with signals `ignored`; nothing of it may be left 5 seconds after the block."""
    command = [sys.executable, "-m", module, marker, str(logs), target, *preload]
    temporary = logs / "temporary"
    temporary.mkdir()
    environ = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environ, preexec_fn=ignoring(*ignored)
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "starting\n"
        try:
            yield launcher
            launcher.wait(timeout=20)
            assert within(5, lambda: not processes(marker)), processes(marker)
            assert within(5, lambda: not list(temporary.iterdir())), list(temporary.rglob("*"))
        finally:
            for pid in processes(marker):
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, signal.SIGKILL)


def await_running(launcher: subprocess.Popen[str], workers: int = 3) -> None:
    assert launcher.stdout is not None
    assert sorted(launcher.stdout.readline() for _ in range(workers)) == [f"running {i}\n" for i in range(workers)]


def code(number: signal.Signals) -> int:
    return -number if number is signal.SIGKILL else 128 + number
