"""``unisono launch SCRIPT``: a script with a training loop of its own, on several workers of this host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import InvalidInput
from unisono.notation import nearest

USAGE = """\
usage: unisono launch [--workers N] [--logs DIR] SCRIPT.py [arguments of the script …]

Run SCRIPT.py on N workers of this host. In it, unisono.join() is all that a worker needs to find the others.
What worker 0 prints is shown; what each prints is kept in DIR/worker-<rank>.log.

  --workers N  processes to start [1]
  --logs DIR   where the logs go [runs/<script>-<date>/logs]
"""
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Launch:
    """What is to be run.

    Args:
        script: the file.
        arguments: what follows it, handed on untouched.
        workers: processes.
        logs: directory for the workers' output.
    """

    script: Path
    arguments: tuple[str, ...]
    workers: int
    logs: Path


def launch(words: list[str]) -> int:
    """Run the words after ``unisono launch``; 0 when every worker has come to its end.

    Raises:
        UnisonoError: what was written cannot work, or a worker failed.
    """
    if words[:1] in (["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    asked = read(words)

    from unisono.launch import PRELOAD, launch_script

    launch_script(
        asked.script,
        asked.arguments,
        asked.workers,
        logs=asked.logs,
        preload=(*PRELOAD, "unisono.world"),
        threads=max(1, len(os.sched_getaffinity(0)) // asked.workers),
        echo=sys.stdout.buffer,
        stop_seconds=_STOP_SECONDS,
    )
    return 0


def read(words: list[str]) -> Launch:
    """Our options up to the script; everything after it is the script's.

    Raises:
        InvalidInput: an unknown option, no script, or a number of workers that is none.
    """
    options, rest = _options(words)
    if not rest:
        raise InvalidInput("script", "(nothing)", "no script is given", "write unisono launch SCRIPT.py")
    script = Path(rest[0])
    if not script.is_file():
        raise InvalidInput("script", rest[0], "there is no such file", "check the path")
    default = f"runs/{script.stem}-{time.strftime('%Y%m%d-%H%M%S')}/logs"
    return Launch(script, tuple(rest[1:]), _workers(options), Path(options.get("--logs", default)))


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name not in ("--workers", "--logs"):
            raise InvalidInput(
                name, value or "(nothing)", "there is no such option", nearest(name, ["--workers", "--logs"])
            )
        if not equals and not rest:
            raise InvalidInput(name, "(nothing)", "a value is missing", f"write {name} VALUE")
        found[name] = value if equals else rest.pop(0)
    return found, rest


def _workers(options: Mapping[str, str]) -> int:
    text = options.get("--workers", "1")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InvalidInput("--workers", text, "not a whole number from 1", "write for instance --workers 2")
    return int(text)
