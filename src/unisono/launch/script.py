"""A user's script as a worker's target: what ``python script.py …`` would do, in every worker."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from unisono.errors import InvalidInput
from unisono.launch.forkserver import Forkserver
from unisono.launch.local import PRELOAD, launch
from unisono.launch.worker import Worker


def launch_script(
    path: Path,
    arguments: Sequence[str],
    workers: int,
    *,
    logs: Path,
    preload: Sequence[str] = PRELOAD,
    threads: int = 1,
    echo: BinaryIO | None = None,
    prepared: Forkserver | None = None,
    stop_seconds: float = 30.0,
) -> None:
    """Run the script at `path` in `workers` processes; see `launch`, whose `echo` shows worker 0 live.

    Raises:
        InvalidInput: there is no such file.
        ScriptExited: the script left by ``sys.exit`` with something else than 0, the first of all workers.
        WorkerFailed, Interrupted: as `launch`.
    """
    if not path.is_file():
        raise InvalidInput("script", str(path), "there is no such file", "give the path of a Python script")
    target = f"{__name__}:{run_script.__name__}"
    given = (str(path.absolute()), list(arguments), str(path))
    launch(
        target,
        given,
        workers,
        logs=logs,
        preload=preload,
        threads=threads,
        echo=echo,
        prepared=prepared,
        stop_seconds=stop_seconds,
    )


def run_script(worker: Worker, path: str, arguments: Sequence[str], shown: str) -> None:
    """The target: run `path` as ``__main__`` with ``sys.argv = [shown, *arguments]``.

    A request to stop reaches a script that does not listen for one as Ctrl-C would.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.argv = [shown, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    runpy.run_path(path, run_name="__main__")
