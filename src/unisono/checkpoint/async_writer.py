"""Checkpoints written while training goes on.

    training   ── step ──┬─ forward, backward ──┬─ optimizer ─┬─ forward, backward ── ...
                       stage                 staged
    copier               └─ copy ──┐
    scribe (low priority)          └─ hash, write, fsync ──── written ┄┄ all workers have ┄┄ commit (worker 0)

Two threads, because a thread that has lowered its priority may not raise it again, and the optimizer waits
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

from unisono.checkpoint import directory as place
from unisono.checkpoint.commit import commit_parts
from unisono.checkpoint.failure_text import reason
from unisono.checkpoint.ownership import ShardMap, TensorShard, write_plan
from unisono.checkpoint.part_file import WriteStopped, write_part
from unisono.checkpoint.safetensors_format import Container, Spec, specs_of
from unisono.checkpoint.staging import Image, Staging, Window
from unisono.errors import CheckpointError
from unisono.tensors.box import Box

Holders = Sequence[ShardMap] | None  # by worker; None: everybody holds everything
Specs = Mapping[str, Spec]


class WriteStatus(StrEnum):
    """What becomes of the checkpoint staged last."""

    IDLE = "idle"
    STAGING = "staging"
    WRITING = "writing"
    WRITTEN = "written"
    FAILED = "failed"


@dataclass(frozen=True)
class WriteProgress:
    """Where a writer is. Steps are -1 until there is one.

    Args:
        step: the step staged last.
        phase: what becomes of it.
        error: why it failed, else empty.
        written: the last step whose part is completely on this worker's disk.
        failed: the last step that failed here.
        committed: the last step that was committed here (worker 0).
    """

    step: int = -1
    phase: WriteStatus = WriteStatus.IDLE
    error: str = ""
    written: int = -1
    failed: int = -1
    committed: int = -1


@dataclass(frozen=True)
class Event:
    """What happened to a checkpoint: `kind` is ``committed`` or ``failed``, `words` one sentence for a
    person."""

    kind: str
    step: int
    words: str


class Writer:
    """One worker's hand in the checkpoints under `directory`, which all workers share.

    All methods are for one thread, the training loop's. None raises because of the disk, and none but
    `staged`, `finish` and `close` waits. Construct the writers of all workers before any of them stages:
    worker 0 clears away what earlier lives left.

    Args:
        directory: made (0700) if it is not there.
        rank, size: this worker's, of those who share out the tensors.
        keep: how many checkpoints stay, the newest.
        on_event: called in a background thread with every `Event`.
        attempt: tells the workers of this life from a straggler of an earlier one; the same on all.

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
            raise ValueError(f"attempt={attempt!r} is not letters and digits, which a file's name can hold")
        self._directory, self._rank, self._size, self._keep = Path(directory), rank, size, keep
        self._on_event, self._attempt = on_event, attempt
        self._staging: Staging | None = None
        self._planned: tuple[Specs, Holders] | None = None  # what the staging's memory is for
        self._copying: Future[Staging] | None = None
        self._jobs: list[Future[Any]] = []
        self._meta: dict[int, str] = {}
        self._abandoned: set[int] = set()
        self._closing = threading.Event()
        self._state, self._lock = WriteProgress(), threading.Lock()
        self._open()
        self._copier = ThreadPoolExecutor(1, "checkpoint-copier")
        self._scribe = ThreadPoolExecutor(1, "checkpoint-scribe", initializer=_lower_priority)

    @property
    def state(self) -> WriteProgress:
        """Where this writer is; never waits."""
        return self._state

    @property
    def busy(self) -> bool:
        """Whether anything that was asked for is still to be done."""
        return any(not job.done() for job in self._jobs)

    def prepare(self, tensors: Mapping[str, Tensor], holders: Holders = None) -> None:
        """Take the memory for copies of `tensors` now, in the background, and not at the first `stage`.
        Optional."""
        self._check(tensors, holders)
        specs, pinned = specs_of(tensors), any(x.is_cuda for x in tensors.values())
        self._jobs.append(self._copier.submit(self._prepare, specs, holders, pinned))

    def stage(self, step: int, tensors: Mapping[str, Tensor], meta: Any = None, holders: Holders = None) -> None:
        """Begin the checkpoint of `step`; returns at once.

        The tensors must not change until `staged` returns. Waits first for an earlier checkpoint that is still on its
        way: ask `busy`.

        Args:
            tensors: what this worker holds, by global name.
            meta: anything that JSON can hold, taken over now; only that of worker 0 is kept.
            holders: what each worker holds, by rank, the same on all; see `holding`. Each box is written once, by one
                of those that have it. None: everybody holds `tensors`, whole. The same object, where nothing changed,
                saves work.

        Raises:
            TypeError: `meta` is not JSON.
            ValueError: `tensors` are not what ``holders[rank]`` says.
        """
        self._begin(step, tensors, meta, holders)
        self._copying = self._copier.submit(self._copy, dict(tensors), holders, _streams(tensors))
        self._jobs.append(self._scribe.submit(self._write, step, self._copying.result))

    def write(self, step: int, tensors: Mapping[str, Tensor], meta: Any = None, holders: Holders = None) -> None:
        """As `stage`, for tensors that do not change until `finish` returns: takes no memory for a copy of them."""
        self._begin(step, tensors, meta, holders)
        window = lambda: Window(self._share(specs_of(tensors), holders), tensors)
        self._jobs.append(self._scribe.submit(self._write, step, window))

    def staged(self) -> None:
        """Wait until the tensors may change. Returns at once where nothing is being staged."""
        if self._copying is not None:
            self._copying.exception()  # a failed copy is told by the writing that follows it
            self._copying = None

    def commit(self, step: int) -> None:
        """Worker 0, when all workers have written their part of `step`: make it a checkpoint, in the
        background."""
        self._jobs.append(self._scribe.submit(self._commit, step, self._meta.pop(step)))

    def abandon(self, step: int, by: Sequence[int] = ()) -> None:
        """When workers (`by`) could not write their part of `step`: stop writing it here; worker 0 removes
        what there is, and tells of it unless its own part failed, which it has told."""
        self._abandoned.add(step)
        self._meta.pop(step, None)
        if self._rank == 0:
            self._jobs.append(self._scribe.submit(self._remove, step))
            if by and self._state.failed != step:
                who = f"worker {', '.join(map(str, by))} could not write its part, see its log"
                self._jobs.append(self._scribe.submit(self._on_event, Event("failed", step, _not_written(step, who))))

    def finish(self) -> None:
        """Wait until the background has nothing left to do."""
        self.staged()
        for job in self._jobs:
            job.result()  # the disk's errors are dealt with in the job; what comes out is a programming error
        self._jobs.clear()

    def close(self) -> None:
        """Stop writing at the next chunk and end the threads; call `finish` before to keep what is on its
        way."""
        self._closing.set()
        self._copier.shutdown()
        self._scribe.shutdown()

    def _open(self) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._rank == 0:
                place.sweep(self._directory)
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
        """Raise ValueError where this worker holds something else than it has told."""
        if holders is None:
            return
        if len(holders) != self._size:
            raise ValueError(f"{len(holders)} workers are said to hold something, and {self._size} write")
        told, here = {name: piece.spec for name, piece in holders[self._rank].items()}, specs_of(tensors)
        if told != here:
            name = min(name for name in told.keys() | here.keys() if told.get(name) != here.get(name))
            raise ValueError(f"tensor {name!r} is {here.get(name, 'not')} here; {told.get(name, 'none')} was told")

    # Everything below runs in the background.

    def _prepare(self, specs: Specs, holders: Holders, pinned: bool) -> None:
        with contextlib.suppress(Exception):  # the same happens at `stage`, and is told there
            self._memory(specs, holders, pinned)

    def _memory(self, specs: Specs, holders: Holders, pinned: bool) -> Staging:
        if self._staging is None or self._planned != (specs, holders):
            self._staging = None  # the old memory goes before the new is taken
            self._staging, self._planned = Staging(self._share(specs, holders), pinned), (specs, holders)
        return self._staging

    def _share(self, specs: Specs, holders: Holders) -> dict[str, TensorShard]:
        """What this worker writes."""
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
            path = place.temporary(self._directory, step, self._attempt)
            path.mkdir(mode=0o700, exist_ok=True)
            write_part(path, self._rank, step, image, lambda: self._unwanted(step))
            self._update(phase=WriteStatus.WRITTEN, written=step)
        except WriteStopped:
            self._update(phase=WriteStatus.FAILED, error="abandoned", failed=step)
        except Exception as error:  # a thread's outermost frame: whatever it is, training goes on and is told
            self._fail(step, reason(error, self._directory, file.nbytes if file else 0))

    def _commit(self, step: int, meta: str) -> None:
        path = place.temporary(self._directory, step, self._attempt)
        try:
            nbytes = commit_parts(path, self._directory, step, self._size, json.loads(meta))
        except Exception as error:  # as above
            self._fail(step, reason(error, self._directory, 0))
            self._remove(step)
            return
        self._update(committed=step)
        words = f"checkpoint of step {step} is complete ({nbytes / 1e9:.3g} GB)"
        try:
            place.prune(self._directory, step, self._keep)
        except OSError as error:
            words += f"; an old one could not be removed: {error.strerror}"
        self._on_event(Event("committed", step, words))

    def _remove(self, step: int) -> None:
        with contextlib.suppress(OSError):  # what stays is invisible, and the next life sweeps it up
            place.remove(place.temporary(self._directory, step, self._attempt))

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
    """A side stream for each CUDA device, which waits for what the current stream still has to compute."""
    devices = 1 + max((x.get_device() for x in tensors.values() if x.is_cuda), default=-1)
    streams = [torch.cuda.Stream(device) for device in range(devices)]
    for device, stream in enumerate(streams):
        stream.wait_stream(torch.cuda.current_stream(device))
    return streams


def _not_written(step: int, why: str) -> str:
    return f"checkpoint of step {step} was not written: {why}; training goes on"


def _lower_priority() -> None:
    with contextlib.suppress(OSError):  # refused: then it competes with training as an equal, and is as right
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
