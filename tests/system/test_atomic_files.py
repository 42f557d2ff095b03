"""Files are complete or absent, and transient errors are retried."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import InvalidInput
from unisono.membership import CoordinatorAddress
from unisono.membership import contact_file as card
from unisono.observe import write_summary
from unisono.system import atomic_files as atomic


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_PAUSES_SECONDS", (0.0, 0.0))


def failing(monkeypatch: pytest.MonkeyPatch, name: str, times: int, number: int, after: bool = False) -> list[Any]:
    """Have a method of `Path` fail so many times, before it has its effect or `after`; what it was called with."""
    plain: Callable[..., Any] = getattr(Path, name)
    called: list[Any] = []

    def method(self: Path, *given: Any) -> Any:
        called.append(given)
        if len(called) > times:
            return plain(self, *given)
        if after:
            plain(self, *given)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, name, method)
    return called


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EBUSY, errno.EAGAIN, errno.EINTR], ids=errno.errorcode.get)
def test_what_passes_is_tried_again(number: int, tmp_path: Path, monkeypatch) -> None:
    called = failing(monkeypatch, "replace", 2, number)
    atomic.write(tmp_path / "file", b"whole")
    assert len(called) == 3
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("number", "tries"), [(errno.ESTALE, 3), (errno.ENOSPC, 1)])
def test_a_permanent_error_is_raised_and_leaves_no_file(number: int, tries: int, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_bytes(b"before")
    called = failing(monkeypatch, "replace", 9, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        atomic.write_durably(tmp_path / "file", b"after")
    assert len(called) == tries
    assert (tmp_path / "file").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("after", [False, True])
def test_a_directory_is_moved_though_the_first_answer_is_lost(after: bool, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "one").mkdir()
    failing(monkeypatch, "rename", 1, errno.ESTALE, after)
    atomic.move(tmp_path / "one", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_what_is_not_there_cannot_be_moved(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic.move(tmp_path / "one", tmp_path / "other")


def test_all_that_is_replaced_in_a_run_is_replaced_here(tmp_path: Path, monkeypatch) -> None:
    for write in (
        lambda: write_summary(tmp_path / "summary.json", {"steps": 3}),
        lambda: card.write_contact(tmp_path, CoordinatorAddress("http://127.0.0.1:1", "token")),
    ):
        with monkeypatch.context() as patch:
            called = failing(patch, "replace", 1, errno.ESTALE)
            write()
            assert len(called) == 2
    failing(monkeypatch, "replace", 9, errno.EACCES)
    with pytest.raises(InvalidInput, match="cannot be written"):
        card.write_contact(tmp_path, CoordinatorAddress("http://127.0.0.1:1", "token"))


def test_what_killed_writers_left_is_found(tmp_path: Path) -> None:
    for name in (".file.7.tmp", ".file.8.tmp", ".other.7.tmp", "file"):
        (tmp_path / name).touch()
    assert {path.name for path in atomic.unfinished(tmp_path, "file")} == {".file.7.tmp", ".file.8.tmp"}


def test_what_is_appended_goes_to_a_file_of_its_own_and_nowhere_else(tmp_path: Path) -> None:
    other, link, pipe, made = (tmp_path / name for name in ("other", "link", "pipe", "made"))
    other.write_bytes(b"mine")
    link.symlink_to(other)
    os.mkfifo(pipe)
    for wrong in (link, pipe, tmp_path):
        with pytest.raises(OSError, match=r"symbolic links|No such device|Is a directory"):
            atomic.open_to_append(wrong)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="found a pipe"):
        atomic.open_to_append(pipe)
    os.close(reader)
    assert other.read_bytes() == b"mine"
    for text in (b"one", b"two"):
        descriptor = atomic.open_to_append(made)
        os.write(descriptor, text)
        os.close(descriptor)
    assert made.read_bytes() == b"onetwo"
    assert made.stat().st_mode & 0o777 == 0o600


def test_a_file_with_the_temporary_name_is_not_written_to(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    os.link(other, tmp_path / f".file.{os.getpid()}.{threading.get_ident()}.tmp")
    atomic.write(tmp_path / "file", b"new")
    assert (other.read_bytes(), (tmp_path / "file").read_bytes()) == (b"mine", b"new")
