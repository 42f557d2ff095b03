"""However the launcher ends, it leaves no process and no temporary file."""

from __future__ import annotations

import os
import select
import signal
import uuid
from pathlib import Path

import pytest

from tests.support.launchers import await_running, code, toy
from tests.support.leftovers import processes, within
from unisono.launch.forkserver import ForkServer

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]


@pytest.fixture
def marker() -> str:
    return f"toy-{uuid.uuid4().hex}"


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_before_the_fork_server_has_started(number: signal.Signals, marker: str, tmp_path: Path) -> None:
    with toy(marker, tmp_path, "wait_for_stop") as launcher:
        launcher.send_signal(number)
    assert launcher.returncode in (code(number), -number)  # Python may not have installed any handler yet


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_the_fork_server_imports(number: signal.Signals, marker: str, tmp_path: Path) -> None:
    with toy(marker, tmp_path, "wait_for_stop", "tests.support.slow_import") as launcher:
        assert within(10, lambda: f"{marker} forkserver" in processes(marker).values())
        launcher.send_signal(number)
    assert launcher.returncode == code(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_the_workers_run(number: signal.Signals, marker: str, tmp_path: Path) -> None:
    with toy(marker, tmp_path, "wait_for_stop") as launcher:
        await_running(launcher)
        names = set(processes(marker).values())
        roles = ("launcher", "forkserver", "worker 0", "worker 1", "worker 2")
        assert names == {f"{marker} {role}" for role in roles}
        launcher.send_signal(number)
    assert launcher.returncode == code(number)


def test_a_launcher_that_is_killed_before_it_reads_that_the_fork_server_is_ready() -> None:
    """The kernel then says that the connection was reset, and not that it has ended."""
    server = ForkServer([], f"unread-{uuid.uuid4().hex}")
    assert server._control is not None
    assert select.select([server], [], [], 60)[0]
    assert os.path.isdir(server.rendezvous_directory)
    server._control.close()
    server._control = None
    assert server.exit_report() == (0, "")
    assert not os.path.exists(server.rendezvous_directory)
    server.close()


def test_the_rendezvous_directory_is_not_public_before_it_exists() -> None:
    """Every user of the host can read arguments; with the name, another user could create the directory first."""
    with ForkServer([], f"secret-{uuid.uuid4().hex}") as server:
        process = Path(f"/proc/{server._process.pid}")
        for told in ("cmdline", "environ"):
            assert os.path.basename(server.rendezvous_directory).encode() not in (process / told).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_come_to_a_step_boundary_and_their_results_are_kept(
    number: signal.Signals, marker: str, tmp_path: Path
) -> None:
    with toy(marker, tmp_path, "wait_for_stop") as launcher:
        await_running(launcher)
        launcher.send_signal(number)
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "interrupted ['stopped', 'stopped', 'stopped']\n"


def test_a_terminal_that_closes_sends_several_signals_and_kills_no_worker(marker: str, tmp_path: Path) -> None:
    with toy(marker, tmp_path, "stop_slowly") as launcher:
        await_running(launcher)
        launcher.send_signal(signal.SIGHUP)
        await_running(launcher)  # each says that it was asked
        launcher.send_signal(signal.SIGHUP)
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "interrupted ['stopped', 'stopped', 'stopped']\n"


@pytest.mark.parametrize(
    ("ignored", "number"),
    [(signal.SIGINT, signal.SIGTERM), (signal.SIGINT, signal.SIGHUP), (signal.SIGHUP, signal.SIGTERM)],
)
def test_a_signal_that_was_ignored_at_the_start_stays_so(
    ignored: signal.Signals, number: signal.Signals, marker: str, tmp_path: Path
) -> None:
    """As after nohup, or in the background of a script; the other signals still end the run."""
    with toy(marker, tmp_path, "wait_for_stop", ignored=(ignored,)) as launcher:
        await_running(launcher)
        launcher.send_signal(ignored)
        launcher.send_signal(number)
    assert launcher.returncode == code(number)


def test_a_worker_that_does_not_stop_in_time_is_killed(marker: str, tmp_path: Path) -> None:
    with toy(marker, tmp_path, "ignore_stop") as launcher:
        await_running(launcher)
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "interrupted []\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_the_workers_started_ends_with_them(number: signal.Signals, marker: str, tmp_path: Path) -> None:
    with toy(marker, tmp_path, "with_children") as launcher:
        await_running(launcher)
        (meeting,) = (tmp_path / "temporary").iterdir()
        # A process whose exec has begun has no command line for a moment.
        assert within(5, lambda: sum("sleep(600)" in line for line in processes(str(meeting)).values()) == 3)
        launcher.send_signal(number)
    assert within(5, lambda: not processes(str(meeting)))


def kill(marker: str, role: str) -> None:
    os.kill(next(pid for pid, name in processes(marker).items() if name.endswith(role)), signal.SIGKILL)


def test_a_killed_worker_ends_the_run(marker: str, tmp_path: Path) -> None:
    with toy(marker, tmp_path, "ignore_stop") as launcher:
        await_running(launcher)
        kill(marker, "worker 1")
    assert launcher.returncode == 1


def test_workers_continue_when_the_fork_server_is_killed(marker: str, tmp_path: Path) -> None:
    with toy(marker, tmp_path, "wait_for_stop") as launcher:
        await_running(launcher)
        kill(marker, "forkserver")
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "running 0\n"  # a notice
        assert sum("worker" in name for name in processes(marker).values()) == 3
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.readline() == "interrupted ['stopped', 'stopped', 'stopped']\n"


def test_workers_whose_fork_server_is_killed_before_it_has_done_with_them_continue(marker: str, tmp_path: Path) -> None:
    with toy(marker, tmp_path, "wait_for_stop", "tests.support.stalled_fork_server") as launcher:
        await_running(launcher)
        kill(marker, "forkserver")
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "running 0\n"  # a notice
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.readline() == "interrupted ['stopped', 'stopped', 'stopped']\n"


def test_without_a_fork_server_workers_are_killed_with_the_launcher(marker: str, tmp_path: Path) -> None:
    with toy(marker, tmp_path, "ignore_stop") as launcher:
        await_running(launcher)
        kill(marker, "forkserver")
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "running 0\n"
        launcher.kill()
        launcher.wait()
        assert within(5, lambda: not processes(marker))
        for meeting in (tmp_path / "temporary").iterdir():  # of which nobody is left who could remove it
            meeting.rmdir()
