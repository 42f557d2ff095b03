"""Run a user's script in every worker, as ``python script.py …`` would run it."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import InvalidInput, Left
from unisono.launch.forkserver import ForkServer
from unisono.launch.launcher import launch
from unisono.launch.options import ElasticOptions, LaunchOptions
from unisono.launch.stop_request import STOP_ALL
from unisono.launch.supervisor import OnMessage
from unisono.launch.torch_store import TorchStore
from unisono.launch.worker_main import WorkerContext
from unisono.membership.protocol import CoordinatorAddress
from unisono.observe.user_frames import describe_exit

FINISHED = True  # the result of a worker whose script has finished
_ELASTIC_CONTEXT: ContextVar[ElasticContext | None] = ContextVar("elastic_context", default=None)


def launch_script(
    path: Path,
    arguments: Sequence[str],
    options: LaunchOptions,
    *,
    fork_server: ForkServer | None = None,
    on_message: OnMessage = lambda rank, message: None,
    elastic: ElasticOptions | None = None,
) -> bool:
    """Run the script at `path` in every worker; see `launch`.

    Returns whether the script has finished in any worker. If so, it has finished in all workers that have not left.

    Args:
        elastic: if given, workers may join and leave while the script is in its distributed training loop.

    Raises:
        InvalidInput: there is no file at `path`.
        ScriptExited: the script called ``sys.exit`` with something other than 0, in the first worker that failed.
        WorkerFailed, Interrupted: as for `launch`.
    """
    if not path.is_file():
        raise InvalidInput("script", str(path), "there is no such file", "give the path of a Python script")
    target = f"{__name__}:{run_script.__name__}"
    contact = elastic.contact if elastic else None
    with TorchStore() as store:
        # init_process_group() needs ranks that are unique in the run; a launcher that joins counts its own from 0.
        port = None if elastic and elastic.coordinator is None else store.port
        target_arguments = (str(path.absolute()), list(arguments), str(path), contact, port)
        results = launch(
            target,
            target_arguments,
            options,
            fork_server=fork_server,
            on_message=on_message,
            elastic=elastic,
            event_sources=[store],
        )
    return any(result is FINISHED for result in results)


def run_script(
    worker: WorkerContext,
    path: str,
    arguments: Sequence[str],
    shown: str,
    contact: CoordinatorAddress | None = None,
    port: int | None = None,
) -> bool | None:
    """The worker's target: run `path` as ``__main__`` with ``sys.argv = [shown, *arguments]``.

    If `port` is given, torch's store is served there, and torchrun's environment variables are set. A request to stop
    raises KeyboardInterrupt in a script that does not handle the signal. Returns `FINISHED`, or None in a worker that
    has left the run before its end.

    Args:
        shown: the script's path as the user wrote it.
        contact: the address of the coordinator in an elastic run; else None.
        port: the port of torch's store on this host; None: it is not served.
    """
    worker.stop.close()  # the script does not poll this request
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if port is not None:
        os.environ.update(worker.identity.torch_environ(port))
    if contact is not None:
        signal.signal(STOP_ALL, _stop_all)
        _ELASTIC_CONTEXT.set(ElasticContext(worker, contact))
    sys.argv = [shown, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    try:
        runpy.run_path(path, run_name="__main__")
    except Left:
        return None
    except SystemExit as error:
        if error.code:
            raise
        _report_exit(worker, describe_exit(error))
    else:
        _report_exit(worker, "its script finished")
    return FINISHED


def _report_exit(worker: WorkerContext, text: str) -> None:
    """Report that the script has exited.

    From the next steps of the other workers, the launcher then sees whether the run is over.
    """
    worker.report({"kind": "ended", "place": worker.identity.rank, "text": text})


@dataclass(frozen=True)
class ElasticContext:
    """What a script's process needs to take part in an elastic run.

    Args:
        worker: the context of this worker.
        contact: the address of the coordinator.
    """

    worker: WorkerContext
    contact: CoordinatorAddress

    @property
    def first(self) -> bool:
        """Whether this process was there when the run began; its name is then its rank."""
        return self.worker.name == str(self.worker.identity.rank)

    def leave_when_asked(self) -> None:
        """Let SIGTERM ask this worker to leave the run, unless the script handles it; main thread only."""
        if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
            signal.signal(signal.SIGTERM, self._leave)

    def interrupt_again(self) -> None:
        """Let SIGTERM raise KeyboardInterrupt again, as before `leave_when_asked`."""
        if signal.getsignal(signal.SIGTERM) == self._leave:
            signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _leave(self, number: int, frame: Any) -> None:
        self.worker.stop.leaving = True


def take_elastic_context() -> ElasticContext | None:
    """Return the context of this process; a second call returns None, as a process takes part in one run only."""
    context = _ELASTIC_CONTEXT.get()
    _ELASTIC_CONTEXT.set(None)
    return context


def _stop_all(number: int, frame: Any) -> None:
    """Handle a request that all workers stop, by the script's own handler of SIGTERM or as Ctrl-C."""
    installed = signal.getsignal(signal.SIGTERM)
    is_ours = isinstance(getattr(installed, "__self__", None), ElasticContext)
    handle: Callable[[int, Any], Any] = installed if callable(installed) and not is_ours else signal.default_int_handler
    handle(signal.SIGTERM, frame)
