"""The errors that a caller may catch.

UnisonoError
├── InvalidInput               invalid input: names the field, the value, the cure
│   └── TaskMismatch           a worker would train another task than the others: names what differs
├── CommunicationError
│   ├── PeerLost               a peer is lost, or unresponsive beyond the timeout
│   └── MessageMismatch        two workers sent different messages where they must be equal
├── CheckpointError
│   ├── CheckpointDamaged      what was read is not what was written
│   └── CheckpointMismatch     written by another model: names the first tensor that differs
├── StateTransferError
│   ├── StateMissing           no worker of the view has state that another needs
│   └── StateDamaged           received state is not what the other worker sent
├── Diverged                   a step is bad, or replicas differ: names step, micro-batch, samples, worker
├── LoadingFailed              every process that fetches a certain sample exits: names the sample
├── RunFailed                  invalid input was found after the first step, or user code ended a worker too early
└── WorkerFailed               a worker process failed: carries its traceback
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def printable(text: str) -> str:
    """`text` from an untrusted source, for a terminal: control characters become escapes such as ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """`printable` for a text of several lines: line ends and tabs are kept."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


class UnisonoError(Exception):
    """Root of all errors raised on purpose by this package."""


class InvalidInput(UnisonoError):
    """Invalid input. The command line prints it as one sentence and exits with 2.

    Args:
        field: the name as the user wrote it (``global_batch``, ``--text``).
        value: the invalid value.
        problem: why the value is invalid, with the bound that it exceeds.
        cure: what to write instead.
    """

    def __init__(self, field: str, value: Any, problem: str, cure: str) -> None:
        self.field, self.value, self.problem, self.cure = field, value, problem, cure
        shown = value if isinstance(value, str) else repr(value)
        super().__init__(f"{field} = {shown}: {problem}; {cure}" + ("" if cure.endswith("?") else "."))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.problem, self.cure)


class TaskMismatch(InvalidInput):
    """A worker would train another task than the other workers of its run.

    `field` is the first trait that differs, and `value` is this worker's value of it.
    """


class CommunicationError(UnisonoError):
    """Communication between workers failed."""


class PeerLost(CommunicationError):
    """One or more peers are lost, or were unresponsive beyond the timeout.

    Args:
        ranks: the lost ranks, as far as known; empty where the backend does not know them.
        during: the operation that could not be completed, for instance ``sum``.
        detail: what was observed (a closed connection, a process that exited, a timeout of so many seconds).
    """

    def __init__(self, ranks: Iterable[int], during: str, detail: str) -> None:
        self.ranks, self.during, self.detail = tuple(sorted(set(ranks))), during, detail
        workers = "worker " + ", ".join(map(str, self.ranks)) if self.ranks else "a worker"
        super().__init__(f"{workers} lost during {during}: {detail}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ranks, self.during, self.detail)


class MessageMismatch(CommunicationError):
    """Two workers sent different messages at the same point in their sequence of operations; names both messages."""


class CheckpointError(UnisonoError):
    """A checkpoint cannot be written or used."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint is not what was written: a checksum, a length or a file is wrong."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint belongs to another model, optimizer or plan; names the first difference."""


class StateTransferError(UnisonoError):
    """State could not be transferred between workers."""


class StateMissing(StateTransferError):
    """No worker of the view has state that another needs.

    Args:
        missing: the names of tensors, each with a box that is missing.
    """

    def __init__(self, missing: Iterable[str]) -> None:
        self.missing = tuple(missing)
        shown = ", ".join(self.missing[:3]) + (f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else "")
        super().__init__(f"no worker has {shown}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.missing,)


class StateDamaged(StateTransferError):
    """Received state is not what the other worker sent; names the tensor and its source."""


class Diverged(UnisonoError):
    """A loss or gradient is not finite, or replicas differ and no more than half are equal.

    Names the step, the micro-batch, its samples and the worker. The run's directory stays as it is.
    """

    exit_code = 2


class LoadingFailed(UnisonoError):
    """Loading processes exit repeatedly on the same sample; names the sample, and how the processes ended."""


class RunFailed(UnisonoError):
    """Invalid input was found after the first step of a run, or user code ended a worker that the others needed.

    Unlike after `InvalidInput`, the run can be resumed from its last checkpoint.
    """


class WorkerFailed(UnisonoError):
    """A worker process failed.

    Args:
        rank: the rank of the worker that failed first.
        reason: why it failed, as one sentence (``ValueError: …`` or ``killed by SIGKILL``).
        traceback: the worker's traceback as text, empty if there is none.
    """

    def __init__(self, rank: int, reason: str, traceback: str = "") -> None:
        self.rank, self.reason, self.traceback = rank, reason, traceback
        super().__init__(f"worker {rank} failed: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.reason, self.traceback)


class Left(SystemExit):
    """Ends the script of a worker that has left its group, while the others continue."""
