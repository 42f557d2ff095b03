"""A user's script as a worker's target: what ``python script.py …`` would do, in every worker."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from unisono.errors import InvalidInput, Left
from unisono.launch.forkserver import Forkserver
from unisono.launch.launcher import PRELOAD, ElasticOptions, launch
from unisono.launch.stop_request import STOP_ALL
from unisono.launch.supervisor import OnMessage
from unisono.launch.torch_store import TorchStore
from unisono.launch.worker_main import WorkerContext
from unisono.membership.protocol import CoordinatorAddress
from unisono.observe.user_frames import exit_in_words

DONE = True  # what comes of a script that has come to its end
_TAKES_PART: ContextVar[ElasticContext | None] = ContextVar("takes_part", default=None)


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
    on_message: OnMessage = lambda rank, message: None,
    elastic: ElasticOptions | None = None,
    debugs: int | None = None,
) -> bool:
    """Run the script at `path` in `workers` processes; see `launch`, whose `echo` shows worker 0 live, and whose
    `debugs` has the terminal.

    Returns whether any has come to its end; all have, but those that left the others before.

    Args:
        elastic: workers may come and go while the script is in the loop that it runs with the others.

    Raises:
        InvalidInput: there is no such file.
        ScriptExited: the script left by ``sys.exit`` with something else than 0, the first of all workers.
        WorkerFailed, Interrupted: as `launch`.
    """
    if not path.is_file():
        raise InvalidInput("script", str(path), "there is no such file", "give the path of a Python script")
    target = f"{__name__}:{run_script.__name__}"
    contact = elastic.contact if elastic else None
    with TorchStore() as store:
        # Workers of several launchers are not numbered together, as such a script would need.
        port = None if elastic and elastic.coordination is None else store.port
        given = (str(path.absolute()), list(arguments), str(path), contact, port)
        results = launch(
            target,
            given,
            workers,
            logs=logs,
            preload=preload,
            threads=threads,
            echo=echo,
            prepared=prepared,
            stop_seconds=stop_seconds,
            on_message=on_message,
            elastic=elastic,
            beside=[store],
            debugs=debugs,
        )
    return any(result is DONE for result in results)


def run_script(
    worker: WorkerContext,
    path: str,
    arguments: Sequence[str],
    shown: str,
    contact: CoordinatorAddress | None = None,
    port: int | None = None,
) -> bool | None:
    """The target: run `path` as ``__main__`` with ``sys.argv = [shown, *arguments]``, and the environment of torchrun
    where torch's store can be reached at `port`.

    A request to stop reaches a script that does not listen for one as Ctrl-C would. Returns `DONE`, or None from a
    worker that has left the others before the end.
    """
    worker.stop.close()  # a script does not look at it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if port is not None:
        os.environ.update(worker.identity.torch_environ(port))
    if contact is not None:
        signal.signal(STOP_ALL, _stop)
        _TAKES_PART.set(ElasticContext(worker, contact))
    sys.argv = [shown, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    try:
        runpy.run_path(path, run_name="__main__")
    except Left:
        return None
    except SystemExit as leave:
        if leave.code:
            raise
        _tell_end(worker, exit_in_words(leave))
    else:
        _tell_end(worker, "its script came to its end")
    return DONE


def _tell_end(worker: WorkerContext, text: str) -> None:
    """Whether that was the end for all shows only in what the others do next."""
    worker.report({"kind": "ended", "place": worker.identity.rank, "text": text})


@dataclass(frozen=True)
class ElasticContext:
    """What a script's process was given if workers may come and go.

    Args:
        contact: of the coordinator.
    """

    worker: WorkerContext
    contact: CoordinatorAddress

    @property
    def first(self) -> bool:
        """Whether this is one of the processes with which the run began: those have the names of their places."""
        return self.worker.name == str(self.worker.identity.rank)

    def leave_when_asked(self) -> None:
        """From now on, SIGTERM asks this worker to leave the others, unless the script listens for it itself. Only the
        main thread may call it."""
        if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
            signal.signal(signal.SIGTERM, self._leave)

    def interrupt_again(self) -> None:
        """From now on, it is as Ctrl-C again."""
        if signal.getsignal(signal.SIGTERM) == self._leave:
            signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _leave(self, number: int, frame: Any) -> None:
        self.worker.stop.leaving = True


def takes_part() -> ElasticContext | None:
    """What this process was given to do so; said once, as a process takes part in one run only."""
    found = _TAKES_PART.get()
    _TAKES_PART.set(None)
    return found


def _stop(number: int, frame: Any) -> None:
    """All are to stop: what the script wants to happen at SIGTERM, else Ctrl-C."""
    theirs = signal.getsignal(signal.SIGTERM)
    ours = isinstance(getattr(theirs, "__self__", None), ElasticContext)
    handle: Callable[[int, Any], Any] = theirs if callable(theirs) and not ours else signal.default_int_handler
    handle(signal.SIGTERM, frame)
