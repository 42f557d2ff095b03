"""Background processes that fetch micro-batches in advance. A process that exits is replaced.

    worker                            loading process
    request(key)  ──── key ────────►  fetch.seeded(key), which records the current sample in shared memory
    take()        ◄─── batch ───────  tensors are sent through shared memory
                  ◄─── end of file ─  it has exited: the worker forks another one, and requests pending keys again

A micro-batch depends only on seed, step and number, so it is equal whichever process fetches it.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import NamedTuple

from unisono.data.fetch import ALL, Fetch, Fetched, Key, timed
from unisono.data.fork_setup import set_up_child
from unisono.data.load_modes import Processes
from unisono.data.loader_stacks import LoaderStacks
from unisono.data.remote_exception import RemoteException
from unisono.errors import LoadingFailed
from unisono.system.exit_status import exit_clause

_FORK = multiprocessing.get_context("fork")
_HERE = str(Path(__file__).parent)
_END_SECONDS = 5.0
_STARTING, _WAITING = -3, -2  # in place of the index of a sample
_NOT_FETCHING = {_STARTING: "at its start", _WAITING: "while waiting for work"}
_SHOWN = 8
_BROKEN = EOFError, OSError, RuntimeError  # errors of a message whose sender has exited


class LoadingProcesses:
    """`load.count` processes that fetch `keys` in turn, each up to `load.ahead` micro-batches in advance.

    Args:
        notice: called with one sentence for each process that exited and was replaced.
    """

    def __init__(self, fetch: Fetch, keys: Iterator[Key], load: Processes, notice: Callable[[str], None]) -> None:
        get_temp_dir()  # so that processes inherit it: a directory that a killed process has made would remain
        self._keys = keys
        self._stacks = LoaderStacks(load.count)
        self._slots = [_LoaderSlot(number, fetch, self._stacks, notice) for number in range(load.count)]
        self._requested: deque[tuple[Key, _LoaderSlot]] = deque()
        self._next_slot = 0
        for _ in range(load.count * load.ahead):
            self._request()

    @property
    def next(self) -> Key | None:
        """The key of the batch that `take` returns next."""
        return self._requested[0][0] if self._requested else None

    def take(self) -> Fetched:
        """The next batch, and the seconds that it took to fetch, divided by the number of processes.

        Raises:
            Exception: the dataset raised it in the other process.
            LoadingFailed: a process and its replacement exited on the same sample.
        """
        _, slot = self._requested.popleft()
        self._request()
        batch, seconds = slot.take()
        return batch, seconds / len(self._slots)

    def stacks(self) -> list[str]:
        """See `LoaderStacks.collect`."""
        return self._stacks.collect()

    def close(self) -> None:
        """End all processes. May be called twice."""
        self._requested.clear()
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.request_end()
        for slot in slots:
            slot.end()
        self._stacks.close()

    def _request(self) -> None:
        for key in islice(self._keys, 1):
            slot = self._slots[self._next_slot % len(self._slots)]
            self._next_slot += 1
            slot.request(key)
            self._requested.append((key, slot))


class _Position(NamedTuple):
    """The sample of a micro-batch that a process fetches; in place of the sample, `ALL`, `_WAITING` or `_STARTING`."""

    step: int
    micro_batch: int
    sample: int


_START = _Position(0, 0, _STARTING)


class _Journal:
    """The position of a process, and whether it shall end, in memory shared with the worker."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self.at = _START

    @property
    def at(self) -> _Position:
        return _Position(*self._words[:3])

    @at.setter
    def at(self, at: _Position) -> None:
        self._words[0], self._words[1], self._words[2] = at

    def set_sample(self, sample: int) -> None:
        self._words[2] = sample

    @property
    def ending(self) -> bool:
        return bool(self._words[3])

    def request_end(self) -> None:
        self._words[3] = 1


class _LoaderSlot:
    """One loading process, and its replacement after it exits. Batches are returned in the order of requests."""

    def __init__(self, number: int, fetch: Fetch, stacks: LoaderStacks, notice: Callable[[str], None]) -> None:
        self._number, self._fetch, self._stacks, self._notice = number, fetch, stacks, notice
        self._pending: deque[Key] = deque()
        self._failures: dict[_Position, str] = {}
        self._start()

    def request(self, key: Key) -> None:
        self._pending.append(key)
        self._send(key)

    def take(self) -> Fetched:
        """The batch that was requested first."""
        while (outcome := self._receive()) is None:
            self._replace()
        self._pending.popleft()
        self._failures.pop(_START, None)  # the process does start
        if isinstance(outcome, RemoteException):
            raise outcome.rebuild()
        return outcome

    def request_end(self) -> None:
        self._journal.request_end()
        self._send(None)

    def end(self) -> None:
        if not self._has_ended(within_seconds=_END_SECONDS):
            self._process.kill()
        self._release()

    def _start(self) -> None:
        self._journal = _Journal()
        self._connection, theirs = _FORK.Pipe()
        self._process = _FORK.Process(
            target=_run_loader, args=(self._number, self._fetch, self._journal, self._stacks, theirs, os.getpid()),
            daemon=True)  # fmt: skip
        self._process.start()
        theirs.close()
        for key in self._pending:
            self._send(key)

    def _send(self, key: Key | None) -> None:
        with suppress(OSError):  # it has exited, which `take` notices
            self._connection.send(key)

    def _receive(self) -> Fetched | RemoteException | None:
        """The next outcome; None if the process has exited."""
        if self._connection not in wait([self._connection, self._process.sentinel]):
            return None
        try:
            outcome: Fetched | RemoteException = self._connection.recv()
        except _BROKEN:
            if not self._has_ended(within_seconds=_END_SECONDS):
                raise
            return None
        return outcome

    def _replace(self) -> None:
        """Start another process, unless two have exited on the same sample."""
        at, how = self._journal.at, self._how()
        if at in self._failures:
            raise LoadingFailed(
                f"every loading process exits {self._while(at)}: the first {self._failures[at]}, the second {how}; "
                "correct the data or the code that loads it, or leave the sample out"
            )
        if at.sample != _WAITING:
            self._failures[at] = how
        self._notice(f"loading process {self._number} {how} {self._while(at)}: it is replaced")
        self._release()
        self._start()

    def _has_ended(self, within_seconds: float) -> bool:
        """Whether the process has exited, by its sentinel, since user code may have waited for child processes."""
        return bool(wait([self._process.sentinel], within_seconds))

    def _how(self) -> str:
        """How the process has exited, as text."""
        self._process.join()
        status = self._process.exitcode
        return "ended" if status is None else exit_clause(status)

    def _release(self) -> None:
        self._process.join()
        self._connection.close()
        with suppress(ValueError):  # user code has waited for it
            self._process.close()

    def _while(self, at: _Position) -> str:
        if at.sample in _NOT_FETCHING:
            return _NOT_FETCHING[at.sample]
        samples = self._fetch.samples(at.step, at.micro_batch)
        shown = ", ".join(map(str, samples[:_SHOWN])) + ", …" * (len(samples) > _SHOWN)
        what = f"one of the samples {shown}" if at.sample == ALL else f"sample {at.sample}"
        return f"while fetching {what} (step {at.step}, micro-batch {at.micro_batch})"


def _run_loader(
    number: int, fetch: Fetch, journal: _Journal, stacks: LoaderStacks, connection: Connection, parent: int
) -> None:
    """Body of a loading process."""
    set_up_child(parent, f"loader {number}")
    stacks.register(number)
    fetch.on_sample = journal.set_sample
    messages: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    threading.Thread(target=_send_all, args=(connection, messages), daemon=True).start()
    journal.at = _Position(0, 0, _WAITING)
    while (key := connection.recv()) is not None and not journal.ending:
        journal.at = _Position(key[0], key[1], ALL)
        messages.put(_message(fetch, key))
        journal.at = _Position(key[0], key[1], _WAITING)


def _message(fetch: Fetch, key: Key) -> memoryview:
    try:
        return ForkingPickler.dumps(timed(fetch.seeded, key))
    except Exception as error:  # of the dataset, or since the batch cannot be pickled
        return ForkingPickler.dumps(RemoteException.of(error, below=_HERE))


def _send_all(connection: Connection, messages: queue.SimpleQueue[memoryview]) -> None:
    """Body of the sending thread: while a large message waits for the worker, the next batch is fetched."""
    while True:
        connection.send_bytes(messages.get())
