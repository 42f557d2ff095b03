"""Where a worker's time goes: every moment belongs to exactly one phase, so that they add up to its life."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from unisono.observe.activity import Phase

T = TypeVar("T")
WORTHLESS = (Phase.COMPUTE, Phase.COMMUNICATION, Phase.DATA)
"""What of a step that was not kept was for nothing."""
_NEVER = float("nan")  # is not equal to itself: whoever looks while it stands there looks again


class Account:
    """The time of one phase. A context: inside, time is this phase's; contexts may lie in each other."""

    __slots__ = ("_ledger", "kept_seconds", "phase", "seconds")

    def __init__(self, ledger: Ledger, phase: Phase) -> None:
        self._ledger, self.phase = ledger, phase
        self.seconds = self.kept_seconds = 0.0

    def __enter__(self) -> None:
        self._ledger.push(self)

    def __exit__(self, *_: object) -> None:
        self._ledger.pop()


class Ledger:
    """The accounts of one worker; written by one thread, and read by any.

    Args:
        now: seconds of a clock that does not jump.
        age_seconds: how long the worker has been there already, in the first phase.
    """

    def __init__(self, now: Callable[[], float], age_seconds: float = 0.0) -> None:
        self._now = now
        self._accounts = {phase: Account(self, phase) for phase in Phase}
        self._open = [self._accounts[Phase.START]]
        self._since = now() - age_seconds
        self._changed = now()

    def __call__(self, phase: Phase) -> Account:
        """The context of `phase`."""
        return self._accounts[phase]

    def each(self, phase: Phase, items: Iterable[T]) -> Iterator[T]:
        """`items`; the time until one is there is `phase`'s."""
        account, source = self._accounts[phase], iter(items)
        while True:
            with account:
                try:
                    item = next(source)
                except StopIteration:
                    return
            yield item

    def set_phase(self, phase: Phase) -> None:
        """From now on time outside of all contexts is `phase`'s."""
        self._charge()
        self._open[0] = self._accounts[phase]
        self._changed = self._since

    # The next two are called several times a step: they do what `_charge` does without calling it.

    def push(self, account: Account) -> None:
        """Time is `account`'s until `pop`."""
        since, self._since = self._since, _NEVER
        now, accounts = self._now(), self._open
        accounts[-1].seconds += now - since
        accounts.append(account)
        self._changed = self._since = now

    def pop(self) -> None:
        """Time is again whose it was."""
        since, self._since = self._since, _NEVER
        now = self._now()
        self._open.pop().seconds += now - since
        self._changed = self._since = now

    def commit(self) -> None:
        """What was done until now is in the state, and will not be done again."""
        self._charge()
        for phase in WORTHLESS:
            account = self._accounts[phase]
            account.kept_seconds = account.seconds

    def discard(self) -> None:
        """What was done since the last `keep` was for nothing."""
        self._charge()
        for phase in WORTHLESS:
            account = self._accounts[phase]
            self._accounts[Phase.LOST].seconds += account.seconds - account.kept_seconds
            account.seconds = account.kept_seconds

    @property
    def current(self) -> tuple[Phase, float]:
        """The phase, and for how many seconds it has been that."""
        return self._open[-1].phase, max(0.0, self._now() - self._changed)

    def seconds(self) -> dict[Phase, float]:
        """What has gone into each phase."""
        while True:
            since, current = self._since, self._open[-1].phase
            found = {phase: account.seconds for phase, account in self._accounts.items()}
            if since == self._since:  # else the other thread was changing it
                found[current] += max(0.0, self._now() - since)
                return found

    def _charge(self) -> None:
        since, self._since = self._since, _NEVER
        now = self._now()
        self._open[-1].seconds += now - since
        self._since = now


def in_words(seconds: Mapping[Phase, float]) -> dict[str, float]:
    """For a file: phases by name, those that took any time."""
    return {phase.value: round(spent, 6) for phase, spent in seconds.items() if spent}
