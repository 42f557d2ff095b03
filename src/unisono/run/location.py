"""The location of a run's files, as its workers agree on it, and the workers that can write there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Callable
from pathlib import Path

from unisono.checkpoint import Writer
from unisono.comm import Communicator
from unisono.comm.text import broadcast_text
from unisono.config import Config
from unisono.errors import InvalidInput
from unisono.launch.lock import Holder, hold_lock
from unisono.notation import show
from unisono.run.directory import CHECKPOINTS, claim_run_directory
from unisono.run.spec import RunSpec
from unisono.trainer.loop_checkpoint import same_directory


@dataclasses.dataclass(frozen=True)
class RunLocation:
    """The files of the current attempt of a run.

    Args:
        path: the run's directory on worker 0's host.
        attempt: a unique name of this attempt.
        writers: the workers that can write there, in order; other workers may be on hosts without that directory.
    """

    path: Path
    attempt: str
    writers: tuple[int, ...]

    def writer(
        self, make: Callable[..., Writer], comm: Communicator, config: Config, stack: contextlib.ExitStack
    ) -> Writer | None:
        """This worker's checkpoint writer, closed with `stack`; None if this worker cannot write to the directory.

        Raises:
            InvalidInput: replicas are sharded, and not all workers can write.
        """
        if config.layout.workers > 1 and len(self.writers) < comm.size:
            raise InvalidInput(
                "layout", show(config.layout), f"every worker writes its part of a checkpoint, and {self.path} is "
                f"not the same directory on all {comm.size} workers", "give --run-dir a directory that all hosts "
                "share")  # fmt: skip
        if comm.rank not in self.writers:
            return None
        writer = make(self.path / CHECKPOINTS, self.writers.index(comm.rank), len(self.writers))
        stack.callback(writer.close)
        return writer


class DirectoryLock:
    """This worker's share of the lock on the run's directory, from its first view to the end of the process."""

    def __init__(self) -> None:
        self._stack, self._shared = contextlib.ExitStack(), False

    def share(self, path: Path, holder: Holder) -> None:
        """Share the lock of the directory `path` with all processes of the command `holder`."""
        if not self._shared:
            with contextlib.suppress(OSError):  # the directory is not writable: the checkpoint writer reports it
                self._stack.enter_context(hold_lock(path, holder))
        self._shared = True

    def close(self) -> None:
        """Release the share."""
        self._stack.close()


def locate(
    comm: Communicator, config: Config, spec: RunSpec, lock: DirectoryLock, stack: contextlib.ExitStack
) -> RunLocation:
    """Collective: the location of the run's files, as all workers agree on it.

    If the launcher named no directory, worker 0 creates or reopens one, and locks it until `stack` closes.
    """
    attempt = broadcast_text(comm, secrets.token_hex(8))
    if spec.path is not None and spec.contact is None:
        if spec.holder:
            lock.share(spec.path, spec.holder)
        return RunLocation(spec.path, attempt, tuple(range(comm.size)))
    if comm.rank == 0 and spec.path is None:
        holder = Holder.current()
        path = stack.enter_context(claim_run_directory(config, spec.source, holder))
        spec = dataclasses.replace(spec, path=path, holder=holder)
    path, writers = same_directory(comm, str(spec.path) if comm.rank == 0 else "", attempt)
    holder_text = broadcast_text(comm, json.dumps(spec.holder and dataclasses.asdict(spec.holder)))
    if comm.rank in writers and (fields := json.loads(holder_text)):
        lock.share(path, Holder(**fields))
    return RunLocation(path, attempt, writers)
