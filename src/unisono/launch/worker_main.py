"""The life of a worker process: its name, its log, its threads, its target, its report to the launcher."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import mmap
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from unisono.errors import CommunicationError, Diverged, InvalidInput, LoadingFailed, RunFailed, TaskMismatch
from unisono.launch.cluster_environment import WorkerIdentity
from unisono.launch.stop_request import Interrupted, StopRequest
from unisono.launch.terminal import attach, refuse
from unisono.observe.user_frames import raised_at
from unisono.system import atomic_files as atomic
from unisono.system.output_streams import unfailing


@dataclass(frozen=True)
class WorkerSpec:
    """What the launcher wants of one worker.

    Args:
        rank: of the worker; `size` is the number of all workers.
        target: ``module:function``.
        log: path of the file that takes what the worker prints.
        threads: compute threads.
        name: what processes of this run are called in ``ps``.
        path: the launcher's ``sys.path``; `directory` is its working directory.
        worker: a name that no other process of the run ever has; empty where nobody replaces workers.
        terminal: the process group whose terminal this worker may read from; 0: none.
    """

    rank: int
    size: int
    target: str
    log: str
    threads: int
    name: str
    path: list[str]
    directory: str
    worker: str = ""
    terminal: int = 0


class ReportChannel:
    """The private pipe to the launcher: one JSON value per line. Any thread may use it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._lock = channel, threading.Lock()

    def __call__(self, message: Mapping[str, Any]) -> None:
        """Have the launcher call ``on_message(rank, message)``; `message` is made of what JSON knows."""
        self.send("message", message)

    def ask(self, message: Mapping[str, Any]) -> None:
        """As a call, and wait until the launcher has heard it."""
        self(message)
        self._channel.recv(1)

    def send(self, kind: str, body: Any) -> None:
        line = json.dumps({kind: body}).encode() + b"\n"
        with self._lock:
            self._channel.sendall(line)


@dataclass(frozen=True)
class WorkerContext:
    """What a target is called with, before its own arguments.

    Args:
        identity: who this worker is.
        report: ``report(mapping)`` sends progress or an event to the launcher.
        stop: whether to stop at the next step boundary.
        name: that no other process of the run ever has; empty where nobody replaces workers.
    """

    identity: WorkerIdentity
    report: Callable[[Mapping[str, Any]], None]
    stop: StopRequest
    name: str = ""


def main(order: WorkerSpec, rendezvous: str, channel: int, payload: int, *terminal: int) -> int:
    """Carry `order` out in this freshly forked process; the process's exit code.

    Args:
        rendezvous: where the workers meet.
        channel: descriptor of the socket to the launcher.
        payload: descriptor of the pickled arguments, written by the launcher into anonymous memory.
        terminal: descriptors of the launcher's input and output, for a worker that may read from there.
    """
    identity = WorkerIdentity(order.rank, order.size, order.rank, order.size, rendezvous, "unisono")
    report = ReportChannel(socket.socket(fileno=channel))
    try:
        _settle_in(order, identity)
        if terminal:
            attach(order.terminal, list(terminal), lambda: report.ask({"kind": "breakpoint"}))
        else:
            refuse(order.rank)
        worker = WorkerContext(identity, report, StopRequest(leaves=bool(order.worker)).listen(), order.worker)
        report.send("result", _call(_resolve(order.target), worker, _arguments(payload)))
        status = 0
    except BaseException as error:  # whatever it is, the launcher has to know
        _print(error)
        report.send("failure", _describe(error))
        status = 1
    _finish()
    return status


def _settle_in(order: WorkerSpec, identity: WorkerIdentity) -> None:
    setproctitle(f"{order.name} worker {order.worker or order.rank}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect(order.log)
    faulthandler.enable()
    os.chdir(order.directory)
    sys.path[:] = order.path
    os.environ.update(identity.environ())
    os.environ["OMP_NUM_THREADS"] = str(order.threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(order.threads)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # drawn when the forkserver imported it, so all workers would share it


def _redirect(log: str) -> None:
    descriptor = atomic.open_to_append(log)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, stream in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, stream)
    os.close(nothing)
    os.close(descriptor)
    sys.stdout, sys.stderr = unfailing(1), unfailing(2)


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _arguments(payload: int) -> tuple[Any, ...]:
    with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as memory:
        arguments: tuple[Any, ...] = pickle.loads(memory)  # noqa: S301  our own launcher wrote it, into memory
    os.close(payload)
    return arguments


def _call(target: Callable[..., Any], worker: WorkerContext, arguments: tuple[Any, ...]) -> Any:
    try:
        return target(worker, *arguments)
    except SystemExit as leave:
        if leave.code:
            raise
        return None


def _finish() -> None:
    """What an interpreter does at its end and ``os._exit`` does not: threads, exit functions, buffers."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for text in (sys.stdout, sys.stderr):
        text.flush()


def _print(error: BaseException) -> None:
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return
    print(_traceback(error), end="", file=sys.stderr)


def _describe(error: BaseException) -> dict[str, Any]:
    """The fields of a `Failure`, all but the rank."""
    found: dict[str, Any] = {"at_seconds": time.monotonic(), "reason": _reason(error)}
    if isinstance(error, SystemExit):
        code = error.code
        return found | {"exit_code": code if isinstance(code, int) else int(code is not None)}
    line = raised_at(error.__traceback__)
    if isinstance(error, InvalidInput):
        value = error.value if isinstance(error.value, str | int | float | None) else repr(error.value)
        kind = TaskMismatch if isinstance(error, TaskMismatch) else InvalidInput
        found["said"] = [kind.__name__, [error.field, value, error.problem, error.cure]]
    elif isinstance(error, Diverged | LoadingFailed | RunFailed):
        found["said"] = [type(error).__name__, [_noted(str(error), error)]]
    elif isinstance(error, Interrupted):
        found["said"] = ["Interrupted", [error.number, [], error.words]]
    elif isinstance(error, KeyboardInterrupt):  # how SIGTERM reaches a script: a worker ignores SIGINT
        found["said"] = ["Interrupted", [signal.SIGTERM, [], f"the script was at {line}" if line else ""]]
    consequence = isinstance(error, CommunicationError) or _in_torchs_groups(error)
    return found | {"traceback": _traceback(error), "consequence": consequence, "line": line}


def _in_torchs_groups(error: BaseException) -> bool:
    """Whether torch.distributed raised it, as it does where another worker is gone."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, RuntimeError) and bool(frames) and "/torch/distributed/" in frames[-1].filename


def _reason(error: BaseException) -> str:
    """The class, what it says, and short notes, such as which sample it was."""
    notes = [str(note) for note in getattr(error, "__notes__", [])]
    lines = traceback.format_exception_only(error)
    said = lines[-1 - sum(len(note.split("\n")) for note in notes)].strip()
    return _noted(said, error)


def _noted(said: str, error: BaseException) -> str:
    """`said` with the short notes on `error`."""
    short = [note for note in map(str, getattr(error, "__notes__", [])) if "\n" not in note]
    return f"{said} ({', '.join(short)})" if short else said


def _traceback(error: BaseException) -> str:
    """As Python prints it, without the frames that led from here to the target."""
    trace, here = error.__traceback__, str(Path(__file__).parent)
    while trace and trace.tb_frame.f_code.co_filename.startswith((here, "<frozen ")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
