"""Where a worker's time goes: every moment belongs to exactly one phase, so that the phases add up to its lifetime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from unisono.observe.activity import Phase

T = TypeVar("T")
STEP_PHASES = (Phase.COMPUTE, Phase.COMMUNICATION, Phase.DATA)
"""Phases of a step; their time is lost if the step is rolled back."""
_CHANGING = float("nan")  # is not equal to itself: a reader that finds it reads again


class PhaseAccount:
    """The time of one phase, and a context in which time counts for this phase. Contexts may be nested."""

    __slots__ = ("_ledger", "committed_seconds", "phase", "seconds")

    def __init__(self, ledger: TimeLedger, phase: Phase) -> None:
        self._ledger, self.phase = ledger, phase
        self.seconds = self.committed_seconds = 0.0

    def __enter__(self) -> None:
        self._ledger.push(self)

    def __exit__(self, *_: object) -> None:
        self._ledger.pop()


class TimeLedger:
    """The accounts of one worker; written by one thread, and read by any, without a lock.

    Args:
        now: returns the seconds of a clock that never jumps.
        age_seconds: the age of the worker at construction, which counts for `Phase.START`.
    """

    def __init__(self, now: Callable[[], float], age_seconds: float = 0.0) -> None:
        self._now = now
        self._accounts = {phase: PhaseAccount(self, phase) for phase in Phase}
        self._open = [self._accounts[Phase.START]]
        self._since = now() - age_seconds
        self._changed = now()

    def __call__(self, phase: Phase) -> PhaseAccount:
        """The context of `phase`."""
        return self._accounts[phase]

    def each(self, phase: Phase, items: Iterable[T]) -> Iterator[T]:
        """Iterate over `items`; the time until each is available counts for `phase`."""
        account, source = self._accounts[phase], iter(items)
        while True:
            with account:
                try:
                    item = next(source)
                except StopIteration:
                    return
            yield item

    def set_phase(self, phase: Phase) -> None:
        """Count the time outside of all contexts for `phase` from now on."""
        self._charge()
        self._open[0] = self._accounts[phase]
        self._changed = self._since

    # The next two are called several times a step: they repeat the code of `_charge` to save calls.

    def push(self, account: PhaseAccount) -> None:
        """Count time for `account` until `pop`."""
        since, self._since = self._since, _CHANGING
        now, accounts = self._now(), self._open
        accounts[-1].seconds += now - since
        accounts.append(account)
        self._changed = self._since = now

    def pop(self) -> None:
        """Count time again for the account from before the last `push`."""
        since, self._since = self._since, _CHANGING
        now = self._now()
        self._open.pop().seconds += now - since
        self._changed = self._since = now

    def commit(self) -> None:
        """Record that the steps taken until now are committed, and will not be repeated."""
        self._charge()
        for phase in STEP_PHASES:
            account = self._accounts[phase]
            account.committed_seconds = account.seconds

    def discard(self) -> None:
        """Count the time of steps since the last `commit` for `Phase.LOST`."""
        self._charge()
        for phase in STEP_PHASES:
            account = self._accounts[phase]
            self._accounts[Phase.LOST].seconds += account.seconds - account.committed_seconds
            account.seconds = account.committed_seconds

    @property
    def current(self) -> tuple[Phase, float]:
        """The current phase, and the seconds spent in it so far."""
        return self._open[-1].phase, max(0.0, self._now() - self._changed)

    def seconds(self) -> dict[Phase, float]:
        """Seconds by phase."""
        while True:
            since, current = self._since, self._open[-1].phase
            seconds = {phase: account.seconds for phase, account in self._accounts.items()}
            if since == self._since:  # otherwise the other thread changed it meanwhile
                seconds[current] += max(0.0, self._now() - since)
                return seconds

    def _charge(self) -> None:
        since, self._since = self._since, _CHANGING
        now = self._now()
        self._open[-1].seconds += now - since
        self._since = now


def seconds_by_name(seconds: Mapping[Phase, float]) -> dict[str, float]:
    """Seconds by the phase's name, without phases that took no time."""
    return {phase.value: round(spent, 6) for phase, spent in seconds.items() if spent}
