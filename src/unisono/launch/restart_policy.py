"""Decides what the exit of a worker process means: the run fails, continues without it, or starts a replacement."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

from unisono.errors import RunFailed
from unisono.launch.failure import Failure
from unisono.launch.stop_request import STOP, STOP_ALL
from unisono.membership.protocol import StepCount
from unisono.system.backoff import Backoff

_MAX_WITHOUT_STEP = 3  # the run fails after so many failures in one slot without a step between them
_MAX_WITHOUT_PROGRESS = 10  # the run fails after so many failures in one slot without a step beyond all earlier ones
_RESTART_INTERVAL = Backoff(first_seconds=1.0, factor=2.0, longest_seconds=60.0)
_STABLE_SECONDS = 30.0  # a process that ran this long did not fail because of its start


@dataclass(frozen=True)
class RestartVerdict:
    """What the launcher does about a worker that has exited.

    Args:
        notice: sentence for the user; empty: there is none.
        failure: the failure for which the run has failed; None: it continues.
        restart_in_seconds: after how many seconds a replacement is started; None: no replacement is started.
    """

    notice: str = ""
    failure: Failure | None = None
    restart_in_seconds: float | None = None


class RestartPolicy(Protocol):
    """Decides what the exit of a process means, for all workers of a launcher.

    Each worker has a slot, numbered from 0; a replacement has the slot, the rank and the log of its predecessor.
    """

    stop_signal: signal.Signals
    """The signal that asks a worker to return at the next step boundary."""

    def next_name(self, slot: int) -> str:
        """The name of the process that is about to be started in `slot`."""

    def on_message(self, message: Mapping[str, Any]) -> RestartVerdict:
        """Take note of a message that a worker reported."""

    def process_started(self, slot: int, pid: int) -> None:
        """Take note that a process runs in `slot`."""

    def process_exited(self, slot: int) -> None:
        """Take note that the process in `slot` has exited, for whatever reason."""

    def worker_returned(self, slot: int, result: Any, others: int) -> RestartVerdict:
        """Decide about a worker that has returned `result`, while `others` processes of the launcher still run."""

    def worker_failed(self, failure: Failure, others: int, lifetime_seconds: float) -> RestartVerdict:
        """Decide about a worker whose process has exited without a result, or whose task was refused.

        Args:
            failure: how the worker failed; its slot is ``failure.rank``.
            others: how many other processes of the launcher still run.
            lifetime_seconds: how long the worker's process has lived.
        """

    def is_complete(self, results: Sequence[Any]) -> bool:
        """Whether `results` are all that the run needs."""

    def incomplete_reason(self, results: Sequence[Any]) -> str:
        """Why the run is incomplete, although no worker has failed; empty if it is complete.

        Called when all workers have exited.

        Raises:
            RunFailed: other workers continue a training loop that a worker of this launcher has left.
        """


class NoRestart:
    """The policy of a run that is not elastic: every worker has to return, and the first failure fails the run."""

    stop_signal = STOP

    def next_name(self, slot: int) -> str:
        """See `RestartPolicy`."""
        return ""

    def on_message(self, message: Mapping[str, Any]) -> RestartVerdict:
        """See `RestartPolicy`."""
        return RestartVerdict()

    def process_started(self, slot: int, pid: int) -> None:
        """See `RestartPolicy`."""

    def process_exited(self, slot: int) -> None:
        """See `RestartPolicy`."""

    def worker_returned(self, slot: int, result: Any, others: int) -> RestartVerdict:
        """See `RestartPolicy`."""
        return RestartVerdict()

    def worker_failed(self, failure: Failure, others: int, lifetime_seconds: float) -> RestartVerdict:
        """See `RestartPolicy`."""
        return RestartVerdict(failure=failure)

    def is_complete(self, results: Sequence[Any]) -> bool:
        """See `RestartPolicy`."""
        return False

    def incomplete_reason(self, results: Sequence[Any]) -> str:
        """See `RestartPolicy`."""
        return ""


class ProcessObserver(Protocol):
    """Reports the launcher's processes to the coordinator, and knows the run's steps.

    Attributes:
        step_count: steps that workers of any launcher have taken in the run, as last received.
    """

    @property
    def step_count(self) -> StepCount: ...
    def fetch_step_count(self) -> StepCount:
        """Ask for the newest `step_count`, which may take seconds. It includes the steps of survivors of a loss."""

    def others_continue(self, without: Set[str]) -> bool:
        """Whether other workers take a step without the workers `without`, which have exited; may take seconds."""

    def process_started(self, worker: str, pid: int) -> None: ...
    def process_exited(self, worker: str) -> None: ...


class RestartFailed:
    """The policy of an elastic run: a worker whose process exits without a result is replaced, up to a limit.

    A worker that returns None has left the run, and is not replaced. The first result other than None ends the run.

    The run fails after three losses in one slot, or ``max(3, 2 * slots)`` losses in all slots together, without a step
    between them. Any step counts, also a local step, and a step that is rolled back later. The run also fails after
    ten losses in one slot if no step between them exceeded the furthest step before them.

    If processes of one slot live for less than 30 s, the interval between their starts grows. The third process starts
    at least 1 s after the second, the fourth at least 2 s after the third, and so on, doubling up to 60 s. A process
    that lives for 30 s or longer ends this sequence.

    Args:
        slots: number of processes at a time.
        observer: notified of each process that has started or exited, by its name.
        prefix: what the names of all processes of this launcher begin with.
    """

    stop_signal = STOP_ALL

    def __init__(self, slots: int, observer: ProcessObserver, prefix: str = "") -> None:
        self._slots, self._observer, self._prefix = slots, observer, prefix
        self._starts: Counter[int] = Counter()
        self._short_lifetimes: Counter[int] = Counter()  # by slot: how many processes in a row lived for a short time
        self._step_count = StepCount()
        self._without_step: list[Failure] = []  # failures since the last step
        self._without_progress: list[Failure] = []  # failures since the last step beyond all earlier ones

    def next_name(self, slot: int) -> str:
        """See `RestartPolicy`."""
        self._starts[slot] += 1
        return self._name(slot)

    def on_message(self, message: Mapping[str, Any]) -> RestartVerdict:
        """See `RestartPolicy`."""
        if message.get("kind") == "step":
            self._without_step.clear()
        return RestartVerdict()

    def process_started(self, slot: int, pid: int) -> None:
        """See `RestartPolicy`."""
        self._observer.process_started(self._name(slot), pid)

    def process_exited(self, slot: int) -> None:
        """See `RestartPolicy`."""
        self._observer.process_exited(self._name(slot))

    def others_continue(self, without: Set[str]) -> bool:
        """See `ProcessObserver`."""
        return self._observer.others_continue(without)

    def worker_returned(self, slot: int, result: Any, others: int) -> RestartVerdict:
        """See `RestartPolicy`."""
        return RestartVerdict(f"worker {self._name(slot)} has left: {_others_go_on(others)}")

    def worker_failed(self, failure: Failure, others: int, lifetime_seconds: float) -> RestartVerdict:
        """See `RestartPolicy`."""
        if failure.is_mismatch:
            return self._worker_refused(failure, others)
        self._update_steps(self._observer.step_count)
        self._without_step.append(failure)
        self._without_progress.append(failure)
        is_short = lifetime_seconds < _STABLE_SECONDS
        self._short_lifetimes[failure.rank] = self._short_lifetimes[failure.rank] + 1 if is_short else 0
        if cause := self._exceeded_limit(failure.rank):
            return RestartVerdict(failure=cause)
        pause = round(max(0.0, self._interval_seconds(failure.rank) - lifetime_seconds), 1)
        when = f" in {pause:g} s" if pause else ""
        notice = (
            f"worker {self._name(failure.rank)} {_was(failure.reason)}: {_others_go_on(others)}, "
            f"a replacement is started{when}"
        )
        return RestartVerdict(notice, restart_in_seconds=pause)

    def is_complete(self, results: Sequence[Any]) -> bool:
        """See `RestartPolicy`."""
        return any(result is not None for result in results)

    def incomplete_reason(self, results: Sequence[Any]) -> str:
        """See `RestartPolicy`."""
        return "" if self.is_complete(results) else "every worker was asked to leave before the run was over"

    def _worker_refused(self, failure: Failure, others: int) -> RestartVerdict:
        """Decide about a worker whose task, code or data differs from that of the others.

        If the worker is the first process of its slot, the run fails. A replacement has found files that were changed
        after the start of the run: then the others may continue.
        """
        if self._starts[failure.rank] == 1 or not others:
            return RestartVerdict(failure=failure)
        return RestartVerdict(
            f"worker {self._name(failure.rank)} cannot take part, {_others_go_on(others)} without it: {failure.error()}"
        )

    def _update_steps(self, count: StepCount) -> None:
        if count.taken > self._step_count.taken:
            self._without_step.clear()
        if count.furthest > self._step_count.furthest:
            self._without_progress.clear()
        self._step_count = StepCount(count.taken, max(count.furthest, self._step_count.furthest))

    def _exceeded_limit(self, slot: int) -> Failure | None:
        """The failure of the run, if a limit on failures is reached; else None."""
        if self._find_exceeded(slot) is None:
            return None
        self._update_steps(self._observer.fetch_step_count())  # the known count may be some seconds old
        return self._find_exceeded(slot)

    def _find_exceeded(self, slot: int) -> Failure | None:
        """The first of the failures that reach a limit, with the limit in its reason; None if no limit is reached."""
        here, max_in_all = _of_slot(slot, self._without_step), max(2 * self._slots, _MAX_WITHOUT_STEP)
        if len(here) >= _MAX_WITHOUT_STEP:
            return _with_limit(here, f"of worker {slot} were lost in a row {WITHOUT_STEP}")
        if len(self._without_step) >= max_in_all:
            return _with_limit(self._without_step, f"of {self._slots} workers were lost in a row {WITHOUT_STEP}")
        if len(here := _of_slot(slot, self._without_progress)) >= _MAX_WITHOUT_PROGRESS:
            words = f"of worker {slot} were lost in a row with no step beyond step {self._step_count.furthest}"
            return _with_limit(here, words)
        return None

    def _name(self, slot: int) -> str:
        start = self._starts[slot]
        return f"{self._prefix}{slot}" + (f".{start}" if start > 1 else "")

    def _interval_seconds(self, slot: int) -> float:
        """The least time from the start of the process that has exited in `slot` to the start of the next one."""
        short = self._short_lifetimes[slot]
        return _RESTART_INTERVAL.seconds(short - 2) if short > 1 else 0.0


class JoinedLauncher(RestartFailed):
    """As `RestartFailed`, for a launcher that has joined a run.

    When this launcher is asked to end, its workers leave the run, which other launchers may continue without them.
    """

    stop_signal = STOP

    def incomplete_reason(self, results: Sequence[Any]) -> str:
        """See `RestartPolicy`."""
        return ""


class IndependentExit:
    """The policy for scripts with a training loop of their own: after the loop, each worker exits by itself.

    Inside the loop, `policy` decides. Once the loop has ended, no worker is replaced, because no worker could send the
    state to the replacement. When every worker that has completed the loop has exited, the launcher does not wait for
    the rest, which are frozen or joined too late. A script that exits inside the loop should end the loop for all: the
    run fails if the others take a step without that worker.

    Args:
        policy: decides about workers inside the loop.
        initial: slots whose first processes form the first group. Until all of these processes have entered the loop,
            they need each other, and none can be replaced.
    """

    def __init__(self, policy: RestartFailed, initial: Iterable[int] = ()) -> None:
        self._policy = policy
        self._before_loop = set(initial)
        self._in_loop: set[int] = set()
        self._past_loop: set[int] = set()
        self._exited_in_loop: dict[int, str] = {}  # by slot: how its script exited inside the loop
        self._names: dict[int, str] = {}
        self._all_names: set[str] = set()  # the names of all processes of this launcher so far
        self._loop_ended, self._recovers = False, True
        self.stop_signal = policy.stop_signal

    def next_name(self, slot: int) -> str:
        """See `RestartPolicy`."""
        for slots in (self._in_loop, self._past_loop):
            slots.discard(slot)
        self._names[slot] = self._policy.next_name(slot)
        self._all_names.add(self._names[slot])
        return self._names[slot]

    def on_message(self, message: Mapping[str, Any]) -> RestartVerdict:
        """See `RestartPolicy`."""
        match message.get("kind"):
            case "loop":
                self._before_loop.discard(message["place"])
                self._in_loop.add(message["place"])
            case "over":
                self._in_loop.discard(message["place"])
                self._past_loop.add(message["place"])
                self._loop_ended = True
                self._recovers = self._recovers and message.get("recovers", True)
            case "ended" if message["place"] in self._in_loop:
                self._exited_in_loop[message["place"]] = message["text"]
            case "step" if failure := self._exited_in_loop_of(message["members"]):
                return RestartVerdict(failure=failure)
        return self._policy.on_message(message)

    def process_started(self, slot: int, pid: int) -> None:
        """See `RestartPolicy`."""
        self._policy.process_started(slot, pid)

    def process_exited(self, slot: int) -> None:
        """See `RestartPolicy`."""
        self._policy.process_exited(slot)

    def worker_returned(self, slot: int, result: Any, others: int) -> RestartVerdict:
        """See `RestartPolicy`."""
        if result is None:
            return self._policy.worker_returned(slot, result, others)
        self._loop_ended = True
        return RestartVerdict()

    def worker_failed(self, failure: Failure, others: int, lifetime_seconds: float) -> RestartVerdict:
        """See `RestartPolicy`."""
        if self._loop_ended:
            why = AFTER_LOOP if self._recovers else OTHER_LOOP
            return RestartVerdict(failure=replace(failure, reason=f"{failure.reason}, {why}"))
        is_needed = failure.rank in self._before_loop and len(self._before_loop) > 1
        self._before_loop.discard(failure.rank)
        if is_needed:
            return RestartVerdict(failure=replace(failure, reason=f"{failure.reason}, {BEFORE_LOOP}"))
        return self._policy.worker_failed(failure, others, lifetime_seconds)

    def is_complete(self, results: Sequence[Any]) -> bool:
        """See `RestartPolicy`."""
        return bool(self._past_loop) and all(results[slot] is not None for slot in self._past_loop)

    def incomplete_reason(self, results: Sequence[Any]) -> str:
        """See `RestartPolicy`."""
        if self._exited_in_loop and not self._past_loop and self._policy.others_continue(self._all_names):
            slot, how = next(iter(self._exited_in_loop.items()))
            raise RunFailed(self._exit_reason(slot, how))
        return self._policy.incomplete_reason(results)

    def _exited_in_loop_of(self, members: Sequence[str]) -> Failure | None:
        """The failure of the run if `members` took a step after a script exited inside the loop; else None."""
        for slot, how in self._exited_in_loop.items():
            if self._names[slot] not in members:
                reason = self._exit_reason(slot, how)
                return Failure(slot, time.monotonic(), reason, original=("RunFailed", [reason]))
        return None

    def _exit_reason(self, slot: int, how: str) -> str:
        return f"worker {self._names[slot]}: {how}, {IN_LOOP}"


WITHOUT_STEP = "without a step in between"
BEFORE_LOOP = "before its loop over world.steps began: a lost worker is replaced only inside the loop"
IN_LOOP = "inside its loop over world.steps, which the others continued"
OTHER_LOOP = (
    "in a loop in which no worker is replaced, since it reads its own data or keeps state on one worker: start the run "
    "again from its newest checkpoint (world.save, world.load)"
)
AFTER_LOOP = "after the loop over world.steps had ended: no worker is replaced any more"


def _of_slot(slot: int, failures: Sequence[Failure]) -> list[Failure]:
    return [failure for failure in failures if failure.rank == slot]


def _with_limit(failures: Sequence[Failure], words: str) -> Failure:
    """The first of `failures`, whose number is the limit, with the limit in its reason."""
    first = failures[0]
    return replace(first, reason=f"{first.reason}; {len(failures)} processes {words} (the limit is {len(failures)})")


def _was(reason: str) -> str:
    return f"was {reason}" if reason.startswith("killed") else reason


def _others_go_on(others: int) -> str:
    if not others:
        return "no worker of this host continues"
    return f"{others} workers continue" if others > 1 else "1 worker continues"
