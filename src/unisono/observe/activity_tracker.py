"""What a worker is doing, told by the thread that does it, and read by any other at any time, without a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from unisono.errors import printable
from unisono.observe.activity import LONGEST_WORDS, MOST_MISSING, Activity, Phase
from unisono.observe.time_ledger import Ledger
from unisono.observe.user_frames import dumped, line_of

T = TypeVar("T")
_LINE_SECONDS = 0.1  # in a phase, from when it is of use to know its line
_ASK_SECONDS = 0.5  # of waiting for data, from when processes that fetch some are interrupted for a moment


class Waits(Protocol):
    """What a communicator lets any thread read."""

    @property
    def waits_for(self) -> tuple[str, tuple[int, ...]]:
        """The operation that its worker waits for, and the ranks, where they are known; empty: none."""


class Loads(Protocol):
    """What a loader lets any thread read about the processes that fetch data."""

    def stacks(self) -> list[str]:
        """The stack of each, as `faulthandler` writes it."""


class ActivityTracker(Protocol):
    """Records what a worker does. Its methods never block and never raise."""

    def __call__(self, phase: Phase) -> AbstractContextManager[None]:
        """A context: the time inside counts for `phase`."""

    def each(self, phase: Phase, items: Iterable[T]) -> Iterable[T]:
        """Iterate over `items`; the time until each is available counts for `phase`."""

    def set_phase(self, phase: Phase, on: Waits | None = None, loader: Loads | None = None) -> None:
        """Count the time outside of all contexts for `phase` from now on.

        Args:
            on: the communicator on which this worker waits for others.
            loader: where its data comes from.
        """

    def set_position(self, step: int, micro_batch: int) -> None:
        """Note that this micro-batch of step `step` begins."""

    def commit(self, done: int) -> None:
        """Note that `done` steps are committed: the time spent on them counts as useful."""

    def discard(self) -> None:
        """Count the time since the last `commit` for `Phase.LOST`."""


class NullTracker:
    """Records nothing."""

    def __call__(self, phase: Phase) -> AbstractContextManager[None]:
        """See `ActivityTracker`."""
        return _NOTHING

    def each(self, phase: Phase, items: Iterable[T]) -> Iterable[T]:
        """See `ActivityTracker`."""
        return items

    def set_phase(self, phase: Phase, on: Waits | None = None, loader: Loads | None = None) -> None:
        """See `ActivityTracker`."""

    def set_position(self, step: int, micro_batch: int) -> None:
        """See `ActivityTracker`."""

    def commit(self, done: int) -> None:
        """See `ActivityTracker`."""

    def discard(self) -> None:
        """See `ActivityTracker`."""


_NOTHING: AbstractContextManager[None] = nullcontext()


class ThreadTracker:
    """Records what the thread that creates it does.

    Args:
        now: seconds of a clock that does not jump.
        age_seconds: how long the worker has been there already.

    Attributes:
        ledger: where its time goes.
        done: steps that are in the state.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, age_seconds: float = 0.0) -> None:
        self.ledger = Ledger(now, age_seconds)
        self.done = self._step = 0
        self._micro_batch = -1
        self._wire: Waits | None = None
        self._loader: Loads | None = None
        self._thread = threading.get_ident()

    def __call__(self, phase: Phase) -> AbstractContextManager[None]:
        """See `ActivityTracker`."""
        return self.ledger(phase)

    def each(self, phase: Phase, items: Iterable[T]) -> Iterable[T]:
        """See `ActivityTracker`."""
        return self.ledger.each(phase, items)

    def set_phase(self, phase: Phase, on: Waits | None = None, loader: Loads | None = None) -> None:
        """See `ActivityTracker`."""
        self.ledger.set_phase(phase)
        self._wire, self._loader = on, loader

    def set_position(self, step: int, micro_batch: int) -> None:
        """See `ActivityTracker`."""
        self._step, self._micro_batch = step, micro_batch

    def commit(self, done: int) -> None:
        """See `ActivityTracker`."""
        self.ledger.commit()
        self.done = self._step = done
        self._micro_batch = -1

    def discard(self) -> None:
        """See `ActivityTracker`."""
        self.ledger.discard()

    def doing(self) -> Activity:
        """Now; for any thread."""
        phase, since = self.ledger.current
        wire = self._wire
        waits_for, missing = wire.waits_for if wire else ("", ())
        line = line_of(self._thread, loading=phase is Phase.DATA) if since > _LINE_SECONDS else ""
        if phase is Phase.DATA and since > _ASK_SECONDS and self._loader:
            line = next((found for text in self._loader.stacks() if (found := dumped(text))), line)
        return Activity(phase, self._step, self._micro_batch, since, printable(waits_for)[:LONGEST_WORDS],
                     missing[:MOST_MISSING], printable(line)[-LONGEST_WORDS:])  # fmt: skip
