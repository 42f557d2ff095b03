"""Background processes that fetch micro-batches ahead of need. One that dies is replaced.

    worker                        loading process
    ask(key)  ──── key ────────►  fetch.seeded(key), which writes down in shared memory at which sample it is
    take()    ◄─── batch ───────  tensors travel through shared memory
              ◄─── end of file ─  it died: another process is forked, and asked for all that was due again

A micro-batch depends on nothing but seed, step and number, so that it is the same whichever process fetches it.
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
_STARTING, _WAITING = -3, -2  # in place of the number of a sample
_NOT_FETCHING = {_STARTING: "at its start", _WAITING: "while waiting for work"}
_SHOWN = 8
_BROKEN = EOFError, OSError, RuntimeError  # how a message fails to come whose sender has died


class LoadingProcesses:
    """`load.count` processes that fetch `keys` in turn, each `load.ahead` ahead of what was taken.

    Args:
        notice: told one sentence for each process that died and was replaced.
    """

    def __init__(self, fetch: Fetch, keys: Iterator[Key], load: Processes, notice: Callable[[str], None]) -> None:
        get_temp_dir()  # inherited: one that a process made for its sockets would be left behind when it is killed
        self._keys = keys
        self._stacks = LoaderStacks(load.count)
        self._places = [_Place(number, fetch, self._stacks, notice) for number in range(load.count)]
        self._asked: deque[tuple[Key, _Place]] = deque()
        self._turn = 0
        for _ in range(load.count * load.ahead):
            self._ask()

    @property
    def next(self) -> Key | None:
        """The key of the batch that `take` returns."""
        return self._asked[0][0] if self._asked else None

    def take(self) -> Fetched:
        """The next batch, and its part of the seconds that fetching it took.

        Raises:
            Exception: what the dataset raised.
            LoadingFailed: a process and its replacement died on the same sample.
        """
        _, place = self._asked.popleft()
        self._ask()
        batch, seconds = place.take()
        return batch, seconds / len(self._places)

    def stacks(self) -> list[str]:
        """See `Stacks.collect`."""
        return self._stacks.collect()

    def close(self) -> None:
        """End all processes. May be called twice."""
        self._asked.clear()
        places, self._places = self._places, []
        for place in places:
            place.ask_to_end()
        for place in places:
            place.end()
        self._stacks.close()

    def _ask(self) -> None:
        for key in islice(self._keys, 1):
            place = self._places[self._turn % len(self._places)]
            self._turn += 1
            place.ask(key)
            self._asked.append((key, place))


class _At(NamedTuple):
    """What a process does: which sample of which micro-batch it fetches, or `ALL`, `_WAITING`, `_STARTING`."""

    step: int
    micro_batch: int
    sample: int


_START = _At(0, 0, _STARTING)


class _Journal:
    """What a process does, in memory that it shares with the worker; and whether it is asked to end."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self.at = _START

    @property
    def at(self) -> _At:
        return _At(*self._words[:3])

    @at.setter
    def at(self, at: _At) -> None:
        self._words[0], self._words[1], self._words[2] = at

    def at_sample(self, sample: int) -> None:
        self._words[2] = sample

    @property
    def ending(self) -> bool:
        return bool(self._words[3])

    def ask_to_end(self) -> None:
        self._words[3] = 1


class _Place:
    """One loading process, and after its death the next one. Batches come in the order in which they were asked for."""

    def __init__(self, number: int, fetch: Fetch, stacks: LoaderStacks, notice: Callable[[str], None]) -> None:
        self._number, self._fetch, self._stacks, self._notice = number, fetch, stacks, notice
        self._due: deque[Key] = deque()
        self._deaths: dict[_At, str] = {}
        self._start()

    def ask(self, key: Key) -> None:
        self._due.append(key)
        self._send(key)

    def take(self) -> Fetched:
        """What was asked for first."""
        while (outcome := self._receive()) is None:
            self._replace()
        self._due.popleft()
        self._deaths.pop(_START, None)  # it does start
        if isinstance(outcome, RemoteException):
            raise outcome.rebuild()
        return outcome

    def ask_to_end(self) -> None:
        self._journal.ask_to_end()
        self._send(None)

    def end(self) -> None:
        if not self._has_ended(within_seconds=_END_SECONDS):
            self._process.kill()
        self._release()

    def _start(self) -> None:
        self._journal = _Journal()
        self._connection, theirs = _FORK.Pipe()
        self._process = _FORK.Process(
            target=_live, args=(self._number, self._fetch, self._journal, self._stacks, theirs, os.getpid()),
            daemon=True)  # fmt: skip
        self._process.start()
        theirs.close()
        for key in self._due:
            self._send(key)

    def _send(self, key: Key | None) -> None:
        with suppress(OSError):  # it has died, as is seen once something of it is due
            self._connection.send(key)

    def _receive(self) -> Fetched | RemoteException | None:
        """The next outcome; None: the process has died."""
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
        """Start another process, unless two have died of the same work."""
        at, how = self._journal.at, self._how()
        if at in self._deaths:
            raise LoadingFailed(
                f"every loading process dies {self._while(at)}: the first {self._deaths[at]}, the second {how}; "
                "correct the data or the code that loads it, or leave the sample out"
            )
        if at.sample != _WAITING:
            self._deaths[at] = how
        self._notice(f"loading process {self._number} {how} {self._while(at)}: another one takes its place")
        self._release()
        self._start()

    def _has_ended(self, within_seconds: float) -> bool:
        """By its sentinel: code of the user's that waits for child processes may have taken its exit code."""
        return bool(wait([self._process.sentinel], within_seconds))

    def _how(self) -> str:
        """How the process has ended."""
        self._process.join()
        status = self._process.exitcode
        return "ended" if status is None else exit_clause(status)

    def _release(self) -> None:
        self._process.join()
        self._connection.close()
        with suppress(ValueError):  # its exit code was taken
            self._process.close()

    def _while(self, at: _At) -> str:
        if at.sample in _NOT_FETCHING:
            return _NOT_FETCHING[at.sample]
        samples = self._fetch.samples(at.step, at.micro_batch)
        shown = ", ".join(map(str, samples[:_SHOWN])) + ", …" * (len(samples) > _SHOWN)
        what = f"one of the samples {shown}" if at.sample == ALL else f"sample {at.sample}"
        return f"while fetching {what} (step {at.step}, micro-batch {at.micro_batch})"


def _live(
    number: int, fetch: Fetch, journal: _Journal, stacks: LoaderStacks, connection: Connection, parent: int
) -> None:
    """The life of a loading process."""
    set_up_child(parent, f"loader {number}")
    stacks.register(number)
    fetch.on_sample = journal.at_sample
    messages: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    threading.Thread(target=_send_all, args=(connection, messages), daemon=True).start()
    journal.at = _At(0, 0, _WAITING)
    while (key := connection.recv()) is not None and not journal.ending:
        journal.at = _At(key[0], key[1], ALL)
        messages.put(_message(fetch, key))
        journal.at = _At(key[0], key[1], _WAITING)


def _message(fetch: Fetch, key: Key) -> memoryview:
    try:
        return ForkingPickler.dumps(timed(fetch.seeded, key))
    except Exception as error:  # of the dataset, or of a batch that cannot be pickled
        return ForkingPickler.dumps(RemoteException.of(error, below=_HERE))


def _send_all(connection: Connection, messages: queue.SimpleQueue[memoryview]) -> None:
    """In a thread of its own: a large message waits for the worker to take it, and the next batch is fetched
    meanwhile."""
    while True:
        connection.send_bytes(messages.get())
