"""Every error that a caller may catch.

UnisonoError
├── InvalidInput               what the user wrote cannot work: names the field, the value, the cure
│   └── TaskMismatch           a worker would train something else than the others: names what differs
├── CommunicationError
│   ├── PeerLost               a peer is gone or silent beyond the deadline
│   └── MessageMismatch        two workers sent different messages where the same one was due
├── CheckpointError
│   ├── CheckpointDamaged      what was read is not what was written
│   └── CheckpointMismatch     written by another model: names the first tensor that differs
├── StateTransferError
│   ├── StateMissing           nobody who is there has what somebody needs
│   └── StateDamaged           what came from another worker's memory is not what was sent
├── Diverged                   a step is bad, or replicas differ: names step, micro-batch, samples, worker
├── LoadingFailed              every process that fetches some sample dies: names the sample
├── RunFailed                  what the user wrote turned out not to work after the first step
└── WorkerFailed               a worker process ended badly: carries its traceback
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def printable(text: str) -> str:
    """`text` that was received or read, for a terminal: what it would obey is written as an escape, as in ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """The same of several lines, whose ends and tabs stay."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


class UnisonoError(Exception):
    """Root of all errors raised on purpose by this package."""


class InvalidInput(UnisonoError):
    """What the user wrote cannot work. The command line prints it as one sentence and exits with 2.

    Args:
        field: the name as the user wrote it (``global_batch``, ``--text``).
        value: what it was set to.
        problem: why that cannot work, with the bound that it breaks.
        cure: what to write instead.
    """

    def __init__(self, field: str, value: Any, problem: str, cure: str) -> None:
        self.field, self.value, self.problem, self.cure = field, value, problem, cure
        shown = value if isinstance(value, str) else repr(value)
        super().__init__(f"{field} = {shown}: {problem}; {cure}" + ("" if cure.endswith("?") else "."))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.problem, self.cure)


class TaskMismatch(InvalidInput):
    """A worker would train something else than the other workers of its run; `field` is the first thing that differs
    and `value` what this worker has."""


class CommunicationError(UnisonoError):
    """Something between workers went wrong."""


class PeerLost(CommunicationError):
    """One or more peers are gone, or stayed silent beyond the deadline.

    Args:
        ranks: the ranks that are known to be missing; empty where the backend cannot tell.
        during: the verb that could not be completed, for instance ``sum``.
        detail: what was seen (a closed connection, a dead process, a deadline of so many seconds).
    """

    def __init__(self, ranks: Iterable[int], during: str, detail: str) -> None:
        self.ranks, self.during, self.detail = tuple(sorted(set(ranks))), during, detail
        who = "worker " + ", ".join(map(str, self.ranks)) if self.ranks else "a worker"
        super().__init__(f"{who} lost during {during}: {detail}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ranks, self.during, self.detail)


class MessageMismatch(CommunicationError):
    """Two workers reached the same point of the conversation with different messages; names both sides."""


class CheckpointError(UnisonoError):
    """A checkpoint cannot be written or used."""


class CheckpointDamaged(CheckpointError):
    """What was read is not what was written: a checksum, a length or a file is wrong."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint belongs to another model, optimizer or plan; names the first difference."""


class StateTransferError(UnisonoError):
    """State could not be passed on from worker to worker."""


class StateMissing(StateTransferError):
    """Nobody who is there has what somebody needs.

    Args:
        missing: names of tensors, with the boxes that are missing.
    """

    def __init__(self, missing: Iterable[str]) -> None:
        self.missing = tuple(missing)
        shown = ", ".join(self.missing[:3]) + (f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else "")
        super().__init__(f"no worker has {shown}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.missing,)


class StateDamaged(StateTransferError):
    """What came from another worker's memory is not what was sent; names the tensor and its holder."""


class Diverged(UnisonoError):
    """A loss or gradient is not finite, or replicas differ and no more than half are alike; names the step, the
    micro-batch, its samples and the worker. The run stays as it is."""

    exit_code = 2


class LoadingFailed(UnisonoError):
    """A process that fetches samples dies again and again on the same one; names the sample and how it ended."""


class RunFailed(UnisonoError):
    """What the user wrote turned out not to work after the first step: as `InvalidInput`, with the steps that are done.
    The run stays as it is, and can be resumed from its last checkpoint."""


class WorkerFailed(UnisonoError):
    """A worker process ended badly.

    Args:
        rank: which worker failed first.
        reason: one sentence (``ValueError: …`` or ``killed by SIGKILL``).
        traceback: the worker's traceback as text, empty where it left none.
    """

    def __init__(self, rank: int, reason: str, traceback: str = "") -> None:
        self.rank, self.reason, self.traceback = rank, reason, traceback
        super().__init__(f"worker {rank} failed: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.reason, self.traceback)


class Left(SystemExit):
    """Ends the script of a worker without which the others go on."""
