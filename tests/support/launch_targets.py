"""Worker programs for the tests of the launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from unisono.errors import InvalidInput, PeerLost
from unisono.launch import WorkerContext


def answer(worker: WorkerContext, *arguments: Any) -> list[Any]:
    print("printed by", worker.identity.rank)
    print("complained by", worker.identity.rank, file=sys.stderr)
    worker.report({"rank": worker.identity.rank})
    return [worker.identity.rank, worker.identity.size, os.environ["UNISONO_RENDEZVOUS"], *arguments]


def call(worker: WorkerContext, function: Any) -> Any:
    return function(worker.identity.rank)


def environment(worker: WorkerContext) -> dict[str, Any]:
    names = ("UNISONO_RANK", "UNISONO_SIZE", "UNISONO_LOCAL_RANK", "UNISONO_LOCAL_SIZE", "OMP_NUM_THREADS")
    directory = Path(os.environ["UNISONO_RENDEZVOUS"].removeprefix("file://"))
    return {name: os.environ[name] for name in names} | {
        "directory": str(directory),
        "mode": directory.stat().st_mode & 0o777,
        "title": Path("/proc/self/cmdline").read_text().rstrip("\0"),
        "interrupt ignored": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "torch": "torch" in sys.modules,
    }


def wait_for_stop(worker: WorkerContext) -> str:
    """Until it is asked to stop, as a training loop: by looking at every step boundary."""
    worker.report({"pid": os.getpid()})
    while not worker.stop.requested:
        time.sleep(0.01)
    return "stopped"


def stop_slowly(worker: WorkerContext) -> str:
    """Reports the stop request, and takes a while."""
    wait_for_stop(worker)
    worker.report({"asked": True})
    time.sleep(0.3)
    return "stopped"


def ignore_stop(worker: WorkerContext) -> None:
    worker.report({"pid": os.getpid()})
    threading.Event().wait()


def with_children(worker: WorkerContext) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", worker.identity.rendezvous])
    ignore_stop(worker)


def fail_at(worker: WorkerContext, rank: int) -> None:
    if worker.identity.rank == rank:
        raise ValueError("the cause")
    wait_for_stop(worker)


def fail_as_consequence(worker: WorkerContext) -> None:
    """Worker 1 is killed; worker 0 reports that before the launcher can detect it."""
    if worker.identity.rank == 0:
        raise PeerLost([1], "sum", "connection closed")
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def only_lose_peers(worker: WorkerContext) -> None:
    if worker.identity.rank == 0:
        raise PeerLost([1], "sum", "silent")
    ignore_stop(worker)


def refuse(worker: WorkerContext) -> None:
    raise InvalidInput("steps", 3, "too few", "use 4 or more")


def die(worker: WorkerContext, number: int) -> None:
    if worker.identity.rank == 1:
        os.kill(os.getpid(), number)
    ignore_stop(worker)


def vanish(worker: WorkerContext) -> None:
    os._exit(0)


def leave(worker: WorkerContext, code: Any) -> None:
    sys.exit(code)


def with_semaphore(worker: WorkerContext) -> None:
    """Has what a killed process does not remove: only multiprocessing's resource tracker does."""
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    worker.report({"name": semaphore._semlock.name})
    os.kill(os.getpid(), signal.SIGKILL)


def unspeakable(worker: WorkerContext) -> Any:
    return object()
