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
    """What a communicator tells of itself, to any thread."""

    @property
    def waits_for(self) -> tuple[str, tuple[int, ...]]:
        """The operation that its worker waits for now, and whom, where that is known; empty: none."""


class Loads(Protocol):
    """What a loader tells of the processes that fetch data, to any thread."""

    def stacks(self) -> list[str]:
        """Where each is in its code, as `faulthandler` says it."""


class ActivityTracker(Protocol):
    """Is told what the training does; never waits and never raises."""

    def __call__(self, phase: Phase) -> AbstractContextManager[None]:
        """Inside, the time is `phase`'s."""

    def each(self, phase: Phase, items: Iterable[T]) -> Iterable[T]:
        """`items`; the time until one is there is `phase`'s."""

    def set_phase(self, phase: Phase, on: Waits | None = None, loader: Loads | None = None) -> None:
        """From now on the time outside of all contexts is `phase`'s; others are waited for `on` that wire, data from
        that `loader`."""

    def set_position(self, step: int, micro_batch: int) -> None:
        """That micro-batch of step `step` begins."""

    def commit(self, done: int) -> None:
        """`done` steps are in the state."""

    def discard(self) -> None:
        """What was done since the last `keep` was for nothing."""


class NullTracker:
    """Nobody looks."""

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
    """The watch of the thread that makes it.

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
