"""Writes checkpoints in the background while training continues.

    training   ── step ──┬─ forward, backward ──┬─ optimizer ─┬─ forward, backward ── ...
                       stage                 staged
    copy thread          └─ copy ──┐
    write thread (low priority)    └─ hash, write, fsync ──── written ┄┄ on all workers ┄┄ commit (worker 0)

There are two threads, because a thread that has lowered its priority may not raise it again, and the optimizer waits
for the copy.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint import directory as layout
from unisono.checkpoint.commit import commit_parts
from unisono.checkpoint.failure_text import reason
from unisono.checkpoint.ownership import ShardMap, TensorShard, write_plan
from unisono.checkpoint.part_file import WriteStopped, write_part
from unisono.checkpoint.safetensors_format import Container, Spec, specs_of
from unisono.checkpoint.staging import Image, Staging, Window
from unisono.errors import CheckpointError
from unisono.tensors.box import Box

Holders = Sequence[ShardMap] | None  # the shards of each rank; None: every rank holds every tensor, whole
Specs = Mapping[str, Spec]


class WriteStatus(StrEnum):
    """Status of the checkpoint that was staged last."""

    IDLE = "idle"
    STAGING = "staging"
    WRITING = "writing"
    WRITTEN = "written"
    FAILED = "failed"


@dataclass(frozen=True)
class WriteProgress:
    """Progress of a writer. A step is -1 until there is such a step.

    Args:
        step: the step staged last.
        phase: the status of that step.
        error: why that step failed; empty if it did not.
        written: the last step whose part file is complete on disk.
        failed: the last step that this worker could not write or commit.
        committed: the last step that this worker committed; only worker 0 does.
    """

    step: int = -1
    phase: WriteStatus = WriteStatus.IDLE
    error: str = ""
    written: int = -1
    failed: int = -1
    committed: int = -1


@dataclass(frozen=True)
class Event:
    """A checkpoint was committed or has failed.

    Args:
        kind: ``committed`` or ``failed``.
        step: the step of the checkpoint.
        words: one sentence for a person.
    """

    kind: str
    step: int
    words: str


class Writer:
    """Writes one worker's part files of the checkpoints in `directory`, which all workers share.

    All methods are for one thread, that of the training loop. None of them raises because of the disk. `staged`,
    `finish` and `close` wait; `stage` and `write` wait only if an earlier checkpoint is still being written. Construct
    the writers of all workers before any of them stages, since worker 0 removes unfinished files of earlier attempts.

    Args:
        directory: created (0700) if it does not exist.
        rank, size: this worker's rank among the workers that write, and their number.
        keep: how many checkpoints remain, the newest ones.
        on_event: called in a background thread with every `Event`.
        attempt: a name of this attempt, the same on all workers. It keeps their files apart from those of a straggler
            of an earlier attempt.

    Raises:
        CheckpointError: the directory cannot be used.
        ValueError: `attempt` is not letters and digits.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        size: int,
        keep: int,
        on_event: Callable[[Event], None],
        attempt: str = "1",
    ) -> None:
        if not attempt.isalnum():
            raise ValueError(f"attempt={attempt!r} is not letters and digits, as needed in the name of a file")
        self._directory, self._rank, self._size, self._keep = Path(directory), rank, size, keep
        self._on_event, self._attempt = on_event, attempt
        self._staging: Staging | None = None
        self._planned: tuple[Specs, Holders] | None = None  # tensors that `_staging` has memory for
        self._copying: Future[Staging] | None = None
        self._jobs: list[Future[Any]] = []
        self._meta: dict[int, str] = {}
        self._abandoned: set[int] = set()
        self._closing = threading.Event()
        self._state, self._lock = WriteProgress(), threading.Lock()
        self._open()
        self._copy_thread = ThreadPoolExecutor(1, "checkpoint-copy")
        self._write_thread = ThreadPoolExecutor(1, "checkpoint-write", initializer=_lower_priority)

    @property
    def state(self) -> WriteProgress:
        """The progress of this writer; never waits."""
        return self._state

    @property
    def busy(self) -> bool:
        """Whether background work is not finished."""
        return any(not job.done() for job in self._jobs)

    def prepare(self, tensors: Mapping[str, Tensor], holders: Holders = None) -> None:
        """Allocate memory for copies of `tensors` now, in the background, and not at the first `stage`. Optional."""
        self._check(tensors, holders)
        specs, pinned = specs_of(tensors), any(x.is_cuda for x in tensors.values())
        self._jobs.append(self._copy_thread.submit(self._prepare, specs, holders, pinned))

    def stage(self, step: int, tensors: Mapping[str, Tensor], meta: Any = None, holders: Holders = None) -> None:
        """Start the checkpoint of `step`, and return while it is copied and written.

        The tensors must not change until `staged` returns. If an earlier checkpoint is still being written (see
        `busy`), waits for it first.

        Args:
            tensors: the tensors of this worker, by global name.
            meta: anything that JSON can hold, encoded now; only that of worker 0 is written.
            holders: the shards of each rank, see `shards_of`; the same on all ranks. Each box is written once, by one
                of the ranks that have it. None: every rank holds `tensors`, whole. Passing the same object again saves
                work.

        Raises:
            TypeError: `meta` is not JSON.
            ValueError: `tensors` do not match ``holders[rank]``.
        """
        self._begin(step, tensors, meta, holders)
        self._copying = self._copy_thread.submit(self._copy, dict(tensors), holders, _streams(tensors))
        self._jobs.append(self._write_thread.submit(self._write, step, self._copying.result))

    def write(self, step: int, tensors: Mapping[str, Tensor], meta: Any = None, holders: Holders = None) -> None:
        """As `stage`, but without a copy of the tensors, which must not change until `finish` returns."""
        self._begin(step, tensors, meta, holders)
        window = lambda: Window(self._plan(specs_of(tensors), holders), tensors)
        self._jobs.append(self._write_thread.submit(self._write, step, window))

    def staged(self) -> None:
        """Wait until the tensors may change; returns at once if nothing is being staged."""
        if self._copying is not None:
            self._copying.exception()  # `_write` reports a failed copy
            self._copying = None

    def commit(self, step: int) -> None:
        """Make the written parts of `step` a checkpoint, in the background.

        To be called on worker 0 alone, when all workers have written their part.
        """
        self._jobs.append(self._write_thread.submit(self._commit, step, self._meta.pop(step)))

    def abandon(self, step: int, by: Sequence[int] = ()) -> None:
        """Stop writing `step`, because the workers in `by` could not write their parts.

        Worker 0 removes the files of `step`. It also emits an event, unless its own part failed and it has emitted one
        for that.
        """
        self._abandoned.add(step)
        self._meta.pop(step, None)
        if self._rank == 0:
            self._jobs.append(self._write_thread.submit(self._remove, step))
            if by and self._state.failed != step:
                why = f"worker {', '.join(map(str, by))} could not write its part, see its log"
                self._jobs.append(
                    self._write_thread.submit(self._on_event, Event("failed", step, _not_written(step, why)))
                )

    def finish(self) -> None:
        """Wait until all background work is done."""
        self.staged()
        for job in self._jobs:
            job.result()  # jobs handle errors of the disk; any other is a bug
        self._jobs.clear()

    def close(self) -> None:
        """Stop writing at the next chunk and end the threads; call `finish` first to complete what is in progress."""
        self._closing.set()
        self._copy_thread.shutdown()
        self._write_thread.shutdown()

    def _open(self) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._rank == 0:
                layout.sweep(self._directory)
        except OSError as error:
            raise CheckpointError(f"{self._directory} cannot hold checkpoints: {error.strerror}") from error

    def _begin(self, step: int, tensors: Mapping[str, Tensor], meta: Any, holders: Holders) -> None:
        self._check(tensors, holders)
        self.finish()
        if self._rank == 0:
            self._meta[step] = json.dumps(meta)
        self._abandoned.discard(step)
        self._update(step=step, phase=WriteStatus.STAGING, error="")

    def _check(self, tensors: Mapping[str, Tensor], holders: Holders) -> None:
        """Raise ValueError if the tensors differ from this rank's shards in `holders`."""
        if holders is None:
            return
        if len(holders) != self._size:
            raise ValueError(f"holders are given for {len(holders)} ranks, but {self._size} workers write")
        declared, here = {name: shard.spec for name, shard in holders[self._rank].items()}, specs_of(tensors)
        if declared != here:
            name = min(name for name in declared.keys() | here.keys() if declared.get(name) != here.get(name))
            raise ValueError(
                f"tensor {name!r} is {here.get(name, 'missing')} here and {declared.get(name, 'missing')} in holders"
            )

    # Everything below runs in the background.

    def _prepare(self, specs: Specs, holders: Holders, pinned: bool) -> None:
        with contextlib.suppress(Exception):  # `stage` meets the same error, and reports it
            self._memory(specs, holders, pinned)

    def _memory(self, specs: Specs, holders: Holders, pinned: bool) -> Staging:
        if self._staging is None or self._planned != (specs, holders):
            self._staging = None  # free the old memory before allocating the new
            self._staging, self._planned = Staging(self._plan(specs, holders), pinned), (specs, holders)
        return self._staging

    def _plan(self, specs: Specs, holders: Holders) -> dict[str, TensorShard]:
        """The shards that this worker writes."""
        whole = {name: TensorShard(spec.dtype, Box.whole(spec.shape)) for name, spec in specs.items()}
        return write_plan(holders or [whole] * self._size)[self._rank]

    def _copy(self, tensors: Mapping[str, Tensor], holders: Holders, streams: list[torch.cuda.Stream]) -> Staging:
        staging = self._memory(specs_of(tensors), holders, bool(streams))
        staging.copy(tensors, streams)
        return staging

    def _write(self, step: int, made: Callable[[], Image]) -> None:
        file: Container | None = None
        try:
            image = made()
            file = image.container
            self._update(phase=WriteStatus.WRITING)
            path = layout.temporary(self._directory, step, self._attempt)
            path.mkdir(mode=0o700, exist_ok=True)
            write_part(path, self._rank, step, image, lambda: self._unwanted(step))
            self._update(phase=WriteStatus.WRITTEN, written=step)
        except WriteStopped:
            self._update(phase=WriteStatus.FAILED, error="abandoned", failed=step)
        except Exception as error:  # outermost frame of a thread: training continues whatever the error
            self._fail(step, reason(error, self._directory, file.nbytes if file else 0))

    def _commit(self, step: int, meta: str) -> None:
        path = layout.temporary(self._directory, step, self._attempt)
        try:
            nbytes = commit_parts(path, self._directory, step, self._size, json.loads(meta))
        except Exception as error:  # as above
            self._fail(step, reason(error, self._directory, 0))
            self._remove(step)
            return
        self._update(committed=step)
        words = f"checkpoint of step {step} is complete ({nbytes / 1e9:.3g} GB)"
        try:
            layout.prune(self._directory, step, self._keep)
        except OSError as error:
            words += f"; an old one could not be removed: {error.strerror}"
        self._on_event(Event("committed", step, words))

    def _remove(self, step: int) -> None:
        with contextlib.suppress(OSError):  # what remains is invisible, and the next attempt removes it
            layout.remove(layout.temporary(self._directory, step, self._attempt))

    def _unwanted(self, step: int) -> bool:
        return self._closing.is_set() or step in self._abandoned

    def _fail(self, step: int, why: str) -> None:
        words = _not_written(step, why)
        self._update(phase=WriteStatus.FAILED, error=words, failed=step)
        self._on_event(Event("failed", step, words))

    def _update(self, **changes: Any) -> None:
        with self._lock:
            self._state = replace(self._state, **changes)


def _streams(tensors: Mapping[str, Tensor]) -> list[torch.cuda.Stream]:
    """A side stream for each CUDA device, which waits for the pending work of the current stream."""
    devices = 1 + max((x.get_device() for x in tensors.values() if x.is_cuda), default=-1)
    streams = [torch.cuda.Stream(device) for device in range(devices)]
    for device, stream in enumerate(streams):
        stream.wait_stream(torch.cuda.current_stream(device))
    return streams


def _not_written(step: int, why: str) -> str:
    return f"checkpoint of step {step} was not written: {why}; training continues"


def _lower_priority() -> None:
    with contextlib.suppress(OSError):  # not permitted: then it competes with training for cores
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
