"""Full disks: training continues with a warning, and earlier checkpoints stay intact."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.states import numbered, save, unexpected
from tests.support.checkpoints import load_newest
from tests.support.processes import run
from unisono.checkpoint import Event, Writer, WriteStatus, fingerprint
from unisono.errors import CheckpointError

MEGABYTE = 1 << 20


def large(step: int) -> dict[str, torch.Tensor]:
    """3 MB."""
    return {"model/x": torch.full((3 * MEGABYTE // 4,), float(step))}


def attempt(directory: Path, step: int, tensors: dict[str, torch.Tensor]) -> tuple[Writer, list[Event]]:
    """Stage and, where it was written, commit; nothing may raise."""
    events: list[Event] = []
    writer = Writer(directory, 0, 1, 2, events.append)
    writer.stage(step, tensors)
    writer.staged()
    writer.finish()
    if writer.state.written == step:
        writer.commit(step)
        writer.finish()
    return writer, events


def expect_failure(directory: Path, writer: Writer, events: list[Event], words: str) -> None:
    """One event with these words, no part left, the earlier checkpoint sound; then a smaller one succeeds."""
    assert (writer.state.phase, writer.state.failed, writer.state.committed) == (WriteStatus.FAILED, 2, -1)
    assert [event.kind for event in events] == ["failed"]
    assert events[0].words.startswith(f"checkpoint of step 2 was not written: {words}")
    assert events[0].words.endswith("; training continues")
    assert writer.state.error == events[0].words
    assert not [path for path in directory.rglob("part-*") if ".tmp" in str(path)]
    writer.abandon(2)
    writer.finish()
    assert sorted(path.name for path in directory.iterdir()) == ["LATEST", "step-00000001"]
    writer.stage(3, numbered(3))
    writer.finish()
    writer.commit(3)
    writer.finish()
    writer.close()
    found = load_newest(directory, unexpected)
    assert found is not None
    assert (found.step, fingerprint(found.tensors)) == (3, fingerprint(numbered(3)))


@contextlib.contextmanager
def tiny_disk(at: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    at.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(at).encode(), b"tmpfs", 0, b"size=4m"):
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield at
    finally:
        libc.umount2(str(at).encode(), 2)


@pytest.mark.root
def test_a_full_disk_is_told_with_what_is_needed_and_free(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk:
        save(disk / "run", 1, large(1))
        writer, events = attempt(disk / "run", 2, large(2))
        expect_failure(disk / "run", writer, events, f"no space left on device ({disk}/run, 3.1 MB needed, ")
        assert events[0].words.endswith("MB free); training continues")


@pytest.mark.root
def test_a_disk_without_room_for_the_manifest_fails_the_commit(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk:
        save(disk / "run", 1, numbered(1))
        events: list[Event] = []
        writer = Writer(disk / "run", 0, 1, 2, events.append)
        writer.stage(2, numbered(2))
        writer.finish()
        assert writer.state.written == 2
        with open(disk / "ballast", "wb") as ballast, contextlib.suppress(OSError):
            while True:
                os.write(ballast.fileno(), bytes(4096))
        writer.commit(2)
        writer.finish()
        (disk / "ballast").unlink()
        expect_failure(disk / "run", writer, events, "no space left on device (")


def _with_a_limit(rank: int, size: int, directory: str) -> list[Any]:
    """RLIMIT_FSIZE stands for a quota: no root is needed."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEGABYTE, MEGABYTE))
    path = Path(directory)
    writer, events = attempt(path, 2, large(2))
    expect_failure(path, writer, events, f"file too large ({directory}, 3.1 MB needed, ")
    return [event.kind for event in events]


@pytest.mark.long
def test_a_limit_of_the_system_is_told_likewise(tmp_path: Path) -> None:
    save(tmp_path, 1, large(1))
    assert run(1, _with_a_limit, str(tmp_path)) == [["failed", "committed"]]


def test_a_directory_that_vanishes_does_not_stop_training(tmp_path: Path) -> None:
    events: list[Event] = []
    writer = Writer(tmp_path / "run", 0, 1, 2, events.append)
    shutil.rmtree(tmp_path / "run")
    writer.stage(2, numbered(2))
    writer.finish()
    writer.close()
    assert writer.state.failed == 2
    assert [event.words for event in events] == [
        "checkpoint of step 2 was not written: no such file or directory"
        f" ({tmp_path}/run/.step-00000002.1.tmp); training continues"
    ]


def test_a_part_that_is_missing_fails_the_commit(tmp_path: Path) -> None:
    save(tmp_path, 1, numbered(1))
    events: list[Event] = []
    writer = Writer(tmp_path, 0, 2, 2, events.append)
    writer.stage(2, numbered(2))
    writer.finish()
    writer.commit(2)
    writer.finish()
    expect = "the part of worker 1 is not complete"
    assert [(event.kind, expect in event.words) for event in events] == [("failed", True)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000001"]
    writer.close()


def test_what_the_format_cannot_hold_is_told(tmp_path: Path) -> None:
    writer, events = attempt(tmp_path, 2, {"x": torch.zeros(2, dtype=torch.complex128)})
    writer.close()
    assert "'x' of complex128 [2] cannot be stored in a safetensors file" in events[0].words


def test_a_directory_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot hold checkpoints"):
        Writer(tmp_path / "file", 0, 1, 2, lambda event: None)


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_disk_that_wants_the_page_cache_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real, refusals = getattr(os, refused), []

    def refuse(target: Any, *args: Any) -> Any:
        flags = args[0] if refused == "open" else fcntl.fcntl(target, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            refusals.append(target)
            raise OSError(errno.EINVAL, "no")
        return real(target, *args)

    monkeypatch.setattr(os, refused, refuse)
    save(tmp_path, 2, numbered(2))
    assert len(refusals) == 1
    found = load_newest(tmp_path, unexpected)
    assert found is not None
    assert fingerprint(found.tensors) == fingerprint(numbered(2))


def test_closing_stops_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path, 0, 1, 2, unwanted_event)
    fallocate = os.posix_fallocate

    def closing(*args: int) -> None:
        fallocate(*args)
        writer._closing.set()

    monkeypatch.setattr(os, "posix_fallocate", closing)
    writer.stage(2, large(2))
    writer.finish()
    writer.close()
    assert writer.state.failed == 2
    assert [path.name for path in tmp_path.rglob("*")] == [".step-00000002.1.tmp"]


def unwanted_event(event: Event) -> None:
    raise AssertionError(event.words)
