"""Main function of a worker process: set up the process, call the target, report its result or failure."""

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
from unisono.launch.terminal import attach_terminal, refuse_breakpoint
from unisono.observe.user_frames import raised_at
from unisono.system import atomic_files as atomic
from unisono.system.output_streams import unfailing


@dataclass(frozen=True)
class WorkerSpec:
    """What the launcher asks of one worker.

    Args:
        rank: the worker's rank.
        size: number of workers.
        target: ``module:function``, which the worker calls.
        log: path of the file that receives the worker's output.
        threads: number of compute threads.
        name: first word of the names of the run's processes in ``ps``.
        path: the launcher's ``sys.path``.
        directory: the launcher's working directory.
        worker: name that no other process of the run ever has; empty if workers are not replaced.
        terminal: process group whose terminal this worker may read from; 0: none.
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
    """A private socket to the launcher, with one JSON value per line; thread-safe."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._lock = channel, threading.Lock()

    def __call__(self, message: Mapping[str, Any]) -> None:
        """Have the launcher call ``on_message(rank, message)``; the values of `message` are JSON values."""
        self.send("message", message)

    def send_and_wait(self, message: Mapping[str, Any]) -> None:
        """Send `message` as `__call__` does, and return when the launcher has handled it."""
        self(message)
        self._channel.recv(1)

    def send(self, kind: str, body: Any) -> None:
        line = json.dumps({kind: body}).encode() + b"\n"
        with self._lock:
            self._channel.sendall(line)


@dataclass(frozen=True)
class WorkerContext:
    """What a target receives as its first argument: which worker runs it, and how to reach the launcher.

    Args:
        identity: rank of this worker, number of workers, and their rendezvous.
        report: ``report(mapping)`` sends progress or an event to the launcher.
        stop: whether this worker was asked to stop or to leave.
        name: name that no other process of the run ever has; empty if workers are not replaced.
    """

    identity: WorkerIdentity
    report: Callable[[Mapping[str, Any]], None]
    stop: StopRequest
    name: str = ""


def main(spec: WorkerSpec, rendezvous: str, channel: int, payload: int, *terminal: int) -> int:
    """Run the target of `spec` in this process, which was just forked; returns the exit code.

    Args:
        rendezvous: URL by which the workers find each other.
        channel: descriptor of the socket to the launcher.
        payload: descriptor of the pickled arguments, in anonymous memory.
        terminal: descriptors of the launcher's input and output, if this worker may read from the terminal.
    """
    identity = WorkerIdentity(spec.rank, spec.size, spec.rank, spec.size, rendezvous, "unisono")
    report = ReportChannel(socket.socket(fileno=channel))
    try:
        _set_up_process(spec, identity)
        if terminal:
            attach_terminal(spec.terminal, list(terminal), lambda: report.send_and_wait({"kind": "breakpoint"}))
        else:
            refuse_breakpoint(spec.rank)
        worker = WorkerContext(identity, report, StopRequest(leaves=bool(spec.worker)).listen(), spec.worker)
        report.send("result", _call(_resolve(spec.target), worker, _arguments(payload)))
        status = 0
    except BaseException as error:  # the launcher reports every error
        _print_error(error)
        report.send("failure", failure_fields(error))
        status = 1
    _shut_down()
    return status


def _set_up_process(spec: WorkerSpec, identity: WorkerIdentity) -> None:
    setproctitle(f"{spec.name} worker {spec.worker or spec.rank}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect(spec.log)
    faulthandler.enable()
    os.chdir(spec.directory)
    sys.path[:] = spec.path
    os.environ.update(identity.environ())
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(spec.threads)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # the fork server drew the seed at import, so all workers would share it


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
        arguments: tuple[Any, ...] = pickle.loads(memory)  # noqa: S301  our own launcher has written it, to memory
    os.close(payload)
    return arguments


def _call(target: Callable[..., Any], worker: WorkerContext, arguments: tuple[Any, ...]) -> Any:
    try:
        return target(worker, *arguments)
    except SystemExit as error:
        if error.code:
            raise
        return None


def _shut_down() -> None:
    """Join threads, call exit functions and flush buffers, which ``os._exit`` does not."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for text in (sys.stdout, sys.stderr):
        text.flush()


def _print_error(error: BaseException) -> None:
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return
    print(_traceback(error), end="", file=sys.stderr)


def failure_fields(error: BaseException) -> dict[str, Any]:
    """Fields of the `Failure` that describes `error`, except the rank."""
    fields: dict[str, Any] = {"at_seconds": time.monotonic(), "reason": _reason(error)}
    if isinstance(error, SystemExit):
        code = error.code
        return fields | {"exit_code": code if isinstance(code, int) else int(code is not None)}
    line = raised_at(error.__traceback__)
    if isinstance(error, InvalidInput):
        value = error.value if isinstance(error.value, str | int | float | None) else repr(error.value)
        kind = TaskMismatch if isinstance(error, TaskMismatch) else InvalidInput
        fields["original"] = [kind.__name__, [error.field, value, error.problem, error.cure]]
    elif isinstance(error, Diverged | LoadingFailed | RunFailed):
        fields["original"] = [type(error).__name__, [_with_notes(str(error), error)]]
    elif isinstance(error, Interrupted):
        fields["original"] = ["Interrupted", [error.number, [], error.words]]
    elif isinstance(error, KeyboardInterrupt):  # raised in a script by SIGTERM: a worker ignores SIGINT
        fields["original"] = ["Interrupted", [signal.SIGTERM, [], f"the script was at {line}" if line else ""]]
    consequence = isinstance(error, CommunicationError) or _raised_by_torch_distributed(error)
    return fields | {"traceback": _traceback(error), "consequence": consequence, "line": line}


def _raised_by_torch_distributed(error: BaseException) -> bool:
    """Whether torch.distributed raised `error`, as it does when another worker is lost."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, RuntimeError) and bool(frames) and "/torch/distributed/" in frames[-1].filename


def _reason(error: BaseException) -> str:
    """Class and message of `error`, with short notes, such as which sample it was."""
    notes = [str(note) for note in getattr(error, "__notes__", [])]
    lines = traceback.format_exception_only(error)
    message = lines[-1 - sum(len(note.split("\n")) for note in notes)].strip()
    return _with_notes(message, error)


def _with_notes(message: str, error: BaseException) -> str:
    """`message` with the one-line notes of `error`."""
    short = [note for note in map(str, getattr(error, "__notes__", [])) if "\n" not in note]
    return f"{message} ({', '.join(short)})" if short else message


def _traceback(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames between this module and the target."""
    trace, here = error.__traceback__, str(Path(__file__).parent)
    while trace and trace.tb_frame.f_code.co_filename.startswith((here, "<frozen ")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
