"""One command at a time may write to a run directory, with the workers that it started."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.leftovers import within
from unisono.errors import InvalidInput
from unisono.launch import lock
from unisono.launch.lock import LOCK, Holder, hold_lock, make_unique_directory


def other(**fields: object) -> Holder:
    """A command that is not this process."""
    return replace(Holder.current(), process=os.getppid(), **fields)


def _hold(rank: int, size: int, directory: Path, holder: Holder | None) -> None:
    with hold_lock(directory, holder or Holder.current()):
        (directory / f"{os.getpid()} holds it").touch()
        threading.Event().wait()


@contextmanager
def holding(directory: Path, holder: Holder | None = None) -> Iterator[processes.Workers]:
    """Another process that holds the lock: for itself, or for `holder`."""
    with processes.start(1, _hold, directory, holder) as workers:
        assert within(30, (directory / f"{workers.processes[0].pid} holds it").exists)
        yield workers


def named(directory: Path) -> Holder:
    """Whom the lock's file names."""
    return Holder(**json.loads((directory / LOCK).read_text()))


def taken(directory: Path, holder: Holder | None = None) -> None:
    with hold_lock(directory, holder or Holder.current()):
        pass


def test_a_second_command_is_refused_with_the_holder_and_its_start_time(tmp_path) -> None:
    with holding(tmp_path) as workers:
        with pytest.raises(InvalidInput) as refused:
            taken(tmp_path)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(named(tmp_path).since))
        assert str(refused.value) == (
            f"run_dir = {tmp_path}: it is in use by process {workers.processes[0].pid} on host {os.uname().nodename} "
            f"since {since}; wait for that run or end it, or name another directory."
        )


def test_a_command_that_was_killed_holds_nothing(tmp_path) -> None:
    with holding(tmp_path) as command:
        command.end()
        taken(tmp_path)


def test_workers_share_it_with_their_command_and_with_no_other(tmp_path) -> None:
    ours = other()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(hold_lock(tmp_path, ours))
        with pytest.raises(InvalidInput, match="in use by process"):
            taken(tmp_path)
    taken(tmp_path)


def test_a_worker_of_an_earlier_command_is_refused(tmp_path) -> None:
    earlier, later = other(since=1.0), other(since=2.0)
    taken(tmp_path, earlier)
    with hold_lock(tmp_path, later), pytest.raises(InvalidInput, match="in use by process"):
        taken(tmp_path, earlier)


def test_workers_that_run_longer_than_their_launcher_keep_the_lock(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lock, "_EXIT_SECONDS", 0.2)
    with holding(tmp_path) as command:
        with holding(tmp_path, named(tmp_path)):
            command.end()
            with pytest.raises(InvalidInput, match=r"workers of process \d+ on host .*, which has exited, since"):
                taken(tmp_path)
        taken(tmp_path)


def test_the_next_command_waits_for_workers_that_follow_their_launcher(tmp_path) -> None:
    with holding(tmp_path) as command, holding(tmp_path, named(tmp_path)) as workers:
        command.end()
        threading.Timer(0.2, workers.processes[0].kill).start()
        taken(tmp_path)


def test_it_goes_with_a_directory_that_is_removed(tmp_path, monkeypatch) -> None:
    """The one that opened the file before it was removed must not believe that it has it."""
    flock = fcntl.flock

    def late(file: int, how: int) -> None:
        monkeypatch.undo()
        (tmp_path / LOCK).unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with hold_lock(tmp_path, Holder.current()):
        assert (tmp_path / LOCK).exists()
        monkeypatch.setattr(lock, "_EXIT_SECONDS", 0.2)  # this process has it, so that the other one waits
        with pytest.raises(InvalidInput):
            taken(tmp_path, other())


def test_a_file_system_without_locks_has_runs_too(tmp_path, monkeypatch, caplog) -> None:
    def without(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without)
    with hold_lock(tmp_path, Holder.current()):
        pass
    assert re.search("no locks .No locks available.: do not start a second command", caplog.text)


def test_two_commands_never_get_the_same_new_directory(tmp_path) -> None:
    found = {make_unique_directory(tmp_path / "runs" / "a") for _ in range(3)}
    assert {path.name for path in found} == {"a", "a-2", "a-3"}
    assert all(path.is_dir() for path in found)
