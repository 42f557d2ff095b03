"""Start workers on this host, hear what they report, and end them all when one fails or the user says so.

    prepare ─► Forkserver (imports torch) ─► launch ─► worker 0 … n-1 ─► results, or the first one's error

Workers may come and go where they are told of a coordinator (`ElasticOptions`).

Nothing here imports torch, so that the launcher is up at once, and reads the configuration while the
forkserver imports it. What happens then is `crew.Crew`'s.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
from setproctitle import getproctitle, setproctitle

from unisono.errors import InvalidInput
from unisono.launch.coordinator_process import CoordinatorProcess
from unisono.launch.forkserver import Forkserver
from unisono.launch.log_tail import Tail
from unisono.launch.process_monitor import ProcessMonitor
from unisono.launch.restart_policy import IndependentExit, JoinedLauncher, Present, RestartFailed, RestartPolicy
from unisono.launch.signals import SignalInbox
from unisono.launch.supervisor import EventSource, OnMessage, WorkerSupervisor
from unisono.launch.terminal import descriptors
from unisono.launch.worker_main import WorkerSpec
from unisono.membership.protocol import CoordinatorAddress
from unisono.system import atomic_files as atomic

# The first optimizer that is built imports torch._dynamo, a second of computing: once is enough.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "numpy", "cloudpickle")
_ANSWER_SECONDS = 1.0  # between a signal and the end of who was asked


@dataclass(frozen=True)
class ElasticOptions:
    """Workers that die are replaced, and some may leave before the end.

    Args:
        contact: of the coordinator that is told whose process has ended.
        coordination: its process, where it is this launcher's to look after; else others may go on without it.
        launcher: a name that tells the workers of this launcher from those of others; the first needs none.
        each_to_its_end: workers go on after what they do together, each to an end of its own; else the first result is
            the run's.
    """

    contact: CoordinatorAddress
    coordination: CoordinatorProcess | None = None
    launcher: str = ""
    each_to_its_end: bool = False

    def succession(self, places: int, present: Present) -> RestartPolicy:
        """What becomes of workers that end."""
        kind = RestartFailed if self.coordination else JoinedLauncher
        found = kind(places, present, f"{self.launcher}:" if self.launcher else "")
        # Workers of another launcher come later.
        return IndependentExit(found, () if self.launcher else range(places)) if self.each_to_its_end else found


def prepare(preload: Sequence[str] = PRELOAD, name: str = "unisono") -> Forkserver:
    """Start importing `preload` in the process that will fork the workers; returns at once.

    Hand the result to `launch`, or close it. The calling thread must live while the server imports, which
    follows it into death.
    """
    return Forkserver(preload, name)


def _ignore(rank: int, message: Mapping[str, Any]) -> None:
    pass


def launch(
    target: str,
    arguments: tuple[Any, ...] = (),
    workers: int = 1,
    *,
    logs: Path,
    preload: Sequence[str] = PRELOAD,
    threads: int = 1,
    name: str = "unisono",
    on_message: OnMessage = _ignore,
    echo: BinaryIO | None = None,
    prepared: Forkserver | None = None,
    stop_seconds: float = 30.0,
    elastic: ElasticOptions | None = None,
    beside: Sequence[EventSource] = (),
    debugs: int | None = None,
) -> list[Any]:
    """Run ``target(worker, *arguments)`` in `workers` processes; their results (of JSON's kinds) by rank.

    Args:
        target: ``module:function``, imported in the workers.
        arguments: pickled by value where they come from the launcher's main script.
        logs: directory for ``worker-<rank>.log``.
        preload: modules that the workers find imported, unless `prepared` already did that.
        threads: compute threads of a worker.
        name: first word of the processes' names in ``ps``.
        on_message: called here with the rank and what that worker reported.
        echo: takes a copy of worker 0's log while it grows, and from when another one reports that it ``speaks``, of
            that one's, from so many bytes on.
        prepared: from `prepare`; is closed.
        stop_seconds: how long workers may take to a step boundary after Ctrl-C, SIGTERM or SIGHUP, before
            they are killed. A second SIGINT or SIGTERM kills them at once.
        elastic: each process has a name of its own (``Worker.name``). One that dies is replaced, one that returns None
            has left, and the first other result is the run's, and comes first (but see `ElasticOptions`).
        beside: looked after meanwhile.
        debugs: the worker that has this process's terminal, or whatever it reads from, for ``breakpoint()`` and its
            standard input. Default: one that is alone.

    Raises:
        InvalidInput: the first failing worker raised it; or `logs` cannot be written.
        WorkerFailed: a worker raised something else, was killed, or left by ``sys.exit`` (`ScriptExited`); where they
            are replaced, too many were killed in a row.
        UnisonoError: no coordinator stays up.
        Interrupted: this process was asked to end, or every worker to leave.
    """
    with contextlib.ExitStack() as stack:
        inbox = stack.enter_context(SignalInbox())
        server = stack.enter_context(prepared or prepare(preload, name))
        stack.enter_context(_titled(f"{name} launcher"))
        orders = [
            WorkerSpec(rank, workers, target, log, threads, name, sys.path, os.getcwd())
            for rank, log in enumerate(_logs(logs, workers))
        ]
        terminal = descriptors()
        if terminal and (debugs is not None or workers == 1):
            orders[debugs or 0] = replace(orders[debugs or 0], terminal=os.getpgrp())
        beside = list(beside)
        if echo:
            tail = stack.enter_context(Tail(Path(orders[0].log), echo))
            beside.append(tail)
            on_message = _shown(tail, orders, on_message)
        payload = stack.enter_context(_in_memory(cloudpickle.dumps(arguments)))
        if elastic is None:
            return WorkerSupervisor(server, inbox, beside, on_message, stop_seconds, terminal=terminal).run(
                orders, payload
            )
        if elastic.coordination:
            beside.append(elastic.coordination)
        succession = elastic.succession(workers, stack.enter_context(ProcessMonitor(elastic.contact)))
        results = WorkerSupervisor(server, inbox, beside, on_message, stop_seconds, succession, terminal).run(
            orders, payload
        )
        return sorted(results, key=lambda result: result is None)


def ask(target: str, arguments: tuple[Any, ...], server: Forkserver, *, threads: int = 1, name: str = "unisono") -> Any:
    """What ``target(worker, *arguments)`` returns in one process that leaves nothing behind, not even a log; `server`
    stays open, for `launch`.

    Raises:
        Like `launch`.
    """
    order = WorkerSpec(0, 1, target, os.devnull, threads, name, sys.path, os.getcwd())
    with SignalInbox() as inbox, _in_memory(cloudpickle.dumps(arguments)) as payload:
        return WorkerSupervisor(server, inbox, (), _ignore, _ANSWER_SECONDS).run([order], payload)[0]


def _shown(tail: Tail, orders: Sequence[WorkerSpec], on_message: OnMessage) -> OnMessage:
    def hear(rank: int, message: Mapping[str, Any]) -> None:
        if message.get("kind") == "speaks":
            tail.turn_to(Path(orders[rank].log), message["at"])
        if message.get("kind") == "breakpoint":
            tail.attend()  # what was printed before stands above the prompt
        on_message(rank, message)

    return hear


@contextlib.contextmanager
def _titled(title: str) -> Iterator[None]:
    former = getproctitle()
    setproctitle(title)
    try:
        yield
    finally:
        setproctitle(former)


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    """A descriptor of anonymous memory that holds `data`."""
    with open(os.memfd_create("arguments"), "wb") as file:
        file.write(data)
        file.flush()
        yield file.fileno()


def _logs(directory: Path, workers: int) -> list[str]:
    """The workers' logs, made if they are new."""
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
