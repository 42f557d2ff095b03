"""Real worker processes for tests.

One fork server per session has imported what workers use, so that a worker starts in about 0.1 s.

    results = run(3, work, "an argument")         # calls work(rank, size, "an argument") in 3 processes
    with start(2, work) as workers:               # the same, with access to the processes
        os.kill(workers.processes[1].pid, signal.SIGKILL)
        results = workers.results(lost={1})       # results[1] is None
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

import torch

from unisono.errors import CommunicationError
from unisono.launch.failure import Failure, first_cause
from unisono.system.exit_status import describe_exit

# What a worker imports itself takes time in every worker. torch._dynamo comes with the first optimizer, the
# others with training, with the built-in digits, with worker 0's scalars and with the modules that hold the tests.
PRELOAD = [
    "torch._dynamo", "torch.distributed", "unisono.run.worker", "unisono.layout.parallelize", "sklearn.datasets",
    "torch.utils.tensorboard", "pytest", "hypothesis", __name__,
]  # fmt: skip


CAUSE_SECONDS = 5.0
"""How long the cause is awaited after one of its consequences: a rank that lost a peer may report before that peer."""


class ChildFailed(AssertionError):
    """A worker of a test failed; the traceback of the first cause is the message."""


@cache
def context() -> ForkServerContext:
    """The one forkserver of this session."""
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(PRELOAD)
    return chosen


@dataclass
class Workers:
    """Running processes; `processes[r]` runs rank *r*."""

    processes: list[Any]
    outcomes: list[Connection]
    timeout_seconds: float
    _results: dict[int, Any] = field(default_factory=dict)

    def results(self, lost: Collection[int] = ()) -> list[Any]:
        """What each rank returned; None for ranks in `lost`, which are not waited for.

        Raises:
            ChildFailed: a rank raised, was killed or exceeded the timeout; of several failures, names the first cause.
        """
        end = time.monotonic() + self.timeout_seconds
        awaited = {connection: rank for rank, connection in enumerate(self.outcomes) if rank not in lost}
        failures: list[Failure] = []
        while awaited and all(failure.consequence for failure in failures):
            ready = wait(list(awaited), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                failures += self._receive(awaited.pop(connection), connection)
            if failures:
                end = min(end, time.monotonic() + CAUSE_SECONDS)
        if failures:
            first = first_cause(failures)
            raise ChildFailed(f"rank {first.rank} failed: {first.reason}\n{first.traceback}")
        if awaited:
            raise ChildFailed(f"{sorted(awaited.values())} still run after {self.timeout_seconds} s")
        return [self._results.get(rank) for rank in range(len(self.processes))]

    def _receive(self, rank: int, connection: Connection) -> list[Failure]:
        """Keep the result of `rank`, or return its failure."""
        try:
            result, failure = pickle.loads(connection.recv_bytes())  # noqa: S301 (our own child wrote it)
        except EOFError:
            self.processes[rank].join(5)
            return [Failure(rank, time.monotonic(), describe_exit(self.processes[rank].exitcode))]
        if failure is not None:
            return [failure]
        self._results[rank] = result
        return []

    def end(self) -> None:
        """No process outlives its test."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process, connection in zip(self.processes, self.outcomes, strict=True):
            process.join()
            connection.close()


@contextmanager
def start(size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> Iterator[Workers]:
    """Start ``function(rank, size, *args)`` in `size` processes; they are killed on leaving the block.

    `function` is a top-level function of an importable module; arguments and results travel by pickle.
    """
    workers = Workers([], [], timeout_seconds)
    message = pickle.dumps((function, args))
    try:
        for rank in range(size):
            outcome, inner = context().Pipe(duplex=False)
            process = context().Process(target=_main, args=(message, rank, size, inner))
            process.start()
            inner.close()
            workers.processes.append(process)
            workers.outcomes.append(outcome)
        yield workers
    finally:
        workers.end()


def run(size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
    """The results of ``function(rank, size, *args)`` from `size` processes, by rank."""
    with start(size, function, *args, timeout_seconds=timeout_seconds) as workers:
        return workers.results()


def ignoring(*numbers: int) -> Callable[[], None]:
    """For `preexec_fn`: start the process with these signals ignored, as nohup and scripts in the background do."""

    def ignore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    return ignore


def _main(message: bytes, rank: int, size: int, outcome: Connection) -> None:
    try:
        gc.freeze()  # else the first collection touches, and so copies, all that the forkserver has imported
        torch.set_num_threads(1)
        function, args = pickle.loads(message)  # noqa: S301 (our own parent wrote it)
        answer = pickle.dumps((function(rank, size, *args), None))
    except BaseException as error:
        consequence = isinstance(error, CommunicationError)
        failure = Failure(rank, time.monotonic(), repr(error), traceback.format_exc(), consequence)
        answer = pickle.dumps((None, failure))
    outcome.send_bytes(answer)
