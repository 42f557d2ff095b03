"""What a worker is doing: recorded by its own thread, and read by any other thread at any time, without a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from unisono.errors import printable
from unisono.observe.activity import MAX_MISSING, MAX_TEXT_CHARACTERS, Activity, Phase
from unisono.observe.time_ledger import TimeLedger
from unisono.observe.user_frames import user_line, user_line_of_dump

T = TypeVar("T")
_LINE_SECONDS = 0.1  # time in a phase after which its line is looked up
_LOADER_SECONDS = 0.5  # time of waiting for data after which loader processes are interrupted for their lines


class WaitState(Protocol):
    """What any thread may read of a communicator."""

    @property
    def waits_for(self) -> tuple[str, tuple[int, ...]]:
        """The operation that the worker waits for, and the ranks that have not started it, if known; empty: none."""


class StackSource(Protocol):
    """What any thread may read of a loader's processes."""

    def stacks(self) -> list[str]:
        """The stack of each process, as `faulthandler` writes it."""


class ActivityTracker(Protocol):
    """Records what a worker does. Its methods never block and never raise."""

    def __call__(self, phase: Phase) -> AbstractContextManager[None]:
        """A context in which time counts for `phase`."""

    def each(self, phase: Phase, items: Iterable[T]) -> Iterable[T]:
        """Iterate over `items`; the time until each is available counts for `phase`."""

    def set_phase(self, phase: Phase, on: WaitState | None = None, loader: StackSource | None = None) -> None:
        """Count the time outside of all contexts for `phase` from now on.

        Args:
            on: the communicator on which this worker waits for others.
            loader: the loader of this worker's data.
        """

    def set_position(self, step: int, micro_batch: int) -> None:
        """Note that this micro-batch of step `step` begins."""

    def commit(self, steps: int) -> None:
        """Note that `steps` steps are committed: the time spent on them counts as useful."""

    def discard(self) -> None:
        """Count the time since the last `commit` for `Phase.LOST`."""


class NullTracker:
    """Records nothing."""

    def __call__(self, phase: Phase) -> AbstractContextManager[None]:
        """See `ActivityTracker`."""
        return _NO_CONTEXT

    def each(self, phase: Phase, items: Iterable[T]) -> Iterable[T]:
        """See `ActivityTracker`."""
        return items

    def set_phase(self, phase: Phase, on: WaitState | None = None, loader: StackSource | None = None) -> None:
        """See `ActivityTracker`."""

    def set_position(self, step: int, micro_batch: int) -> None:
        """See `ActivityTracker`."""

    def commit(self, steps: int) -> None:
        """See `ActivityTracker`."""

    def discard(self) -> None:
        """See `ActivityTracker`."""


_NO_CONTEXT: AbstractContextManager[None] = nullcontext()


class ThreadTracker:
    """Records what the thread that creates it does.

    Args:
        now: returns the seconds of a clock that never jumps.
        age_seconds: the age of the worker at construction.

    Attributes:
        ledger: where the worker's time goes.
        steps: the number of committed steps.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, age_seconds: float = 0.0) -> None:
        self.ledger = TimeLedger(now, age_seconds)
        self.steps = self._step = 0
        self._micro_batch = -1
        self._communicator: WaitState | None = None
        self._loader: StackSource | None = None
        self._thread = threading.get_ident()

    def __call__(self, phase: Phase) -> AbstractContextManager[None]:
        """See `ActivityTracker`."""
        return self.ledger(phase)

    def each(self, phase: Phase, items: Iterable[T]) -> Iterable[T]:
        """See `ActivityTracker`."""
        return self.ledger.each(phase, items)

    def set_phase(self, phase: Phase, on: WaitState | None = None, loader: StackSource | None = None) -> None:
        """See `ActivityTracker`."""
        self.ledger.set_phase(phase)
        self._communicator, self._loader = on, loader

    def set_position(self, step: int, micro_batch: int) -> None:
        """See `ActivityTracker`."""
        self._step, self._micro_batch = step, micro_batch

    def commit(self, steps: int) -> None:
        """See `ActivityTracker`."""
        self.ledger.commit()
        self.steps = self._step = steps
        self._micro_batch = -1

    def discard(self) -> None:
        """See `ActivityTracker`."""
        self.ledger.discard()

    def activity(self) -> Activity:
        """The current activity; may be called from any thread."""
        phase, since = self.ledger.current
        communicator = self._communicator
        waits_for, missing = communicator.waits_for if communicator else ("", ())
        line = user_line(self._thread, loading=phase is Phase.DATA) if since > _LINE_SECONDS else ""
        if phase is Phase.DATA and since > _LOADER_SECONDS and self._loader:
            line = next((each for text in self._loader.stacks() if (each := user_line_of_dump(text))), line)
        return Activity(phase, self._step, self._micro_batch, since, printable(waits_for)[:MAX_TEXT_CHARACTERS],
                     missing[:MAX_MISSING], printable(line)[-MAX_TEXT_CHARACTERS:])  # fmt: skip
