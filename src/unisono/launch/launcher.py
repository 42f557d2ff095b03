"""Start the workers of this host, and return their results, or raise the error of the first worker that failed.

    start_fork_server ─► ForkServer (imports torch) ─► launch ─► worker 0 … n-1 ─► results, or the first error

No module of the launcher imports torch. So the launcher is ready at once, and reads the configuration while the fork
server imports torch. `supervisor.WorkerSupervisor` supervises the workers.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
from setproctitle import getproctitle, setproctitle

from unisono.errors import InvalidInput
from unisono.launch.forkserver import ForkServer
from unisono.launch.log_tail import LogTail
from unisono.launch.options import PRELOAD, ElasticOptions, LaunchOptions
from unisono.launch.process_monitor import ProcessMonitor
from unisono.launch.signals import SignalInbox
from unisono.launch.supervisor import EventSource, OnMessage, WorkerSupervisor
from unisono.launch.terminal import terminal_descriptors
from unisono.launch.worker_main import WorkerSpec
from unisono.system import atomic_files as atomic

_CALL_STOP_SECONDS = 1.0  # between a signal and the end of a worker that only answers one call


def start_fork_server(preload: Sequence[str] = PRELOAD, name: str = "unisono") -> ForkServer:
    """Start the process that imports `preload` and forks the workers; returns at once.

    Pass the result to `launch`, or close it. The kernel kills the process if the calling thread ends while it imports
    the modules.
    """
    return ForkServer(preload, name)


def _ignore(rank: int, message: Mapping[str, Any]) -> None:
    pass


def launch(
    target: str,
    arguments: tuple[Any, ...],
    options: LaunchOptions,
    *,
    fork_server: ForkServer | None = None,
    on_message: OnMessage = _ignore,
    elastic: ElasticOptions | None = None,
    event_sources: Sequence[EventSource] = (),
) -> list[Any]:
    """Run ``target(worker, *arguments)`` in every worker, and return the results (JSON values) by rank.

    Args:
        target: ``module:function``, imported in the workers; its first argument is a `WorkerContext`.
        arguments: values that are pickled; classes and functions of the launcher's main script are pickled by value.
        fork_server: the result of `start_fork_server`, which `launch` closes; None: `launch` starts a fork server.
        on_message: called in this process with the rank of a worker and a message that the worker reported.
        elastic: if given, workers may join and leave. A worker that fails is replaced by one with another name
            (`WorkerContext.name`), and a worker that returns None has left. The first result other than None is the
            run's and comes first, unless the option `independent_exit` is set.
        event_sources: further sources of events, which the launcher's event loop serves.

    Raises:
        InvalidInput: the first worker that failed raised it; or `options.logs` cannot be written.
        WorkerFailed: a worker raised another error, was killed, or called ``sys.exit`` (`ScriptExited`). In an elastic
            run: too many workers failed in a row.
        UnisonoError: the coordinator exits whenever it is started.
        Interrupted: this process was asked to end, or every worker to leave.
    """
    with contextlib.ExitStack() as stack:
        inbox = stack.enter_context(SignalInbox())
        server = stack.enter_context(fork_server or start_fork_server(options.preload, options.name))
        stack.enter_context(_process_title(f"{options.name} launcher"))
        terminal, sources = terminal_descriptors(), list(event_sources)
        specs = _worker_specs(target, options, has_terminal=bool(terminal))
        if options.echo:
            tail = stack.enter_context(LogTail(Path(specs[0].log), options.echo))
            sources.append(tail)
            on_message = _following(tail, specs, on_message)
        payload = stack.enter_context(_in_memory(cloudpickle.dumps(arguments)))
        if elastic is None:
            supervisor = WorkerSupervisor(server, inbox, sources, on_message, options.stop_seconds, terminal=terminal)
            return supervisor.run(specs, payload)
        if elastic.coordinator:
            sources.append(elastic.coordinator)
        policy = elastic.restart_policy(options.workers, stack.enter_context(ProcessMonitor(elastic.contact)))
        supervisor = WorkerSupervisor(server, inbox, sources, on_message, options.stop_seconds, policy, terminal)
        return sorted(supervisor.run(specs, payload), key=lambda result: result is None)


def call_in_worker(
    target: str, arguments: tuple[Any, ...], server: ForkServer, *, threads: int = 1, name: str = "unisono"
) -> Any:
    """Run ``target(worker, *arguments)`` in one worker, which writes no log, and return its result.

    `server` stays open, for `launch`. Raises the errors of `launch`.
    """
    spec = WorkerSpec(0, 1, target, os.devnull, threads, name, sys.path, os.getcwd())
    with SignalInbox() as inbox, _in_memory(cloudpickle.dumps(arguments)) as payload:
        return WorkerSupervisor(server, inbox, (), _ignore, _CALL_STOP_SECONDS).run([spec], payload)[0]


def _worker_specs(target: str, options: LaunchOptions, *, has_terminal: bool) -> list[WorkerSpec]:
    specs = [
        WorkerSpec(rank, options.workers, target, log, options.threads, options.name, sys.path, os.getcwd())
        for rank, log in enumerate(_create_logs(options.logs, options.workers))
    ]
    if has_terminal and (options.debug_rank is not None or options.workers == 1):
        rank = options.debug_rank or 0
        specs[rank] = replace(specs[rank], terminal=os.getpgrp())
    return specs


def _following(tail: LogTail, specs: Sequence[WorkerSpec], on_message: OnMessage) -> OnMessage:
    """A function that has `tail` follow a message that concerns it, and then calls `on_message`."""

    def follow(rank: int, message: Mapping[str, Any]) -> None:
        if message.get("kind") == "speaks":
            tail.switch_to(Path(specs[rank].log), message["at"])
        if message.get("kind") == "breakpoint":
            tail.on_readable()  # earlier output is shown above the prompt
        on_message(rank, message)

    return follow


@contextlib.contextmanager
def _process_title(title: str) -> Iterator[None]:
    previous = getproctitle()
    setproctitle(title)
    try:
        yield
    finally:
        setproctitle(previous)


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    """A context with a descriptor of anonymous memory that has `data`."""
    with open(os.memfd_create("arguments"), "wb") as file:
        file.write(data)
        file.flush()
        yield file.fileno()


def _create_logs(directory: Path, workers: int) -> list[str]:
    """The paths of the workers' log files; files that do not exist are created."""
    paths = [(directory / f"worker-{rank}.log").absolute() for rank in range(workers)]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in paths:
            os.close(atomic.open_to_append(path))
    except OSError as error:
        raise InvalidInput(
            "logs", str(directory), f"cannot be written ({error.strerror})", "name another directory"
        ) from None
    return [str(path) for path in paths]
