"""Runs of the command end in one clear way, and can be resumed where that is possible."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import processes
from tests.support.command_runs import STACKS, TASK, command, events, last_step, running_training, stderr_of
from tests.support.leftovers import session, within
from unisono.checkpoint import checkpoints
from unisono.cli import main

EXACT = ("--workers", "2", "--compress", "Exact()")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a user with a task of their own, and with one run of it that nobody disturbed."""
    at = tmp_path_factory.mktemp("home")
    (at / "own.py").write_text(TASK)
    done = unisono(at, "train", "own.py:task", *EXACT, "--run-dir", "whole")
    assert done.returncode == 0, done.stderr
    return at


def unisono(at: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command with `words`, in directory `at`, to its end; in a process that has imported torch already."""
    line = [str(word) for word in words]
    return subprocess.CompletedProcess(line, *processes.run(1, _unisono, at, line, timeout_seconds=150)[0])


def _unisono(rank: int, size: int, at: Path, words: list[str]) -> tuple[int, str, str]:
    """Its exit code, and what it and its processes have written to stdout and stderr."""
    os.chdir(at)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        code = main(words)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for file in (out, err):
            file.seek(0)
        return code, out.read(), err.read()


def weights(run: Path) -> str:
    digest: str = json.loads((run / "summary.json").read_text())["weights_sha256"]
    return digest


def came(run: Path) -> tuple[int, bool, str]:
    """The steps of a run, and whether it is complete, also in words."""
    summary = json.loads((run / "summary.json").read_text())
    return summary["steps"], summary["complete"], summary["ending"]


def goes_on(run: Path) -> str:
    """The last line of a command whose run can be resumed."""
    return f"the run directory is {run}; resume with  unisono train --run-dir {run} --resume\n"


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The process numbers of the workers, in their order."""
    return [pid for _, pid in sorted((name, pid) for pid, name in session(process.pid).items() if "worker" in name)]


# Coming from another host, and going.


@pytest.mark.long
@pytest.mark.parametrize("sync", ["AllReduce()", "DiLoCo(every=5)"])
def test_a_host_that_is_asked_to_end_has_its_workers_leave_and_the_others_go_on(sync: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TASK)
    run = tmp_path / "run"

    def members() -> int:
        return len(([{"members": ["0", "1"]}, *events(run, "view")])[-1]["members"])

    line = ("--workers", "2:4", "--sync", sync, "--steps", "1000000", "--checkpoint-every", "0")
    with running_training(tmp_path, "run", *line) as process:
        words = command("join", "--run-dir", "run", "--workers", "2")
        with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as host:
            assert within(60, lambda: members() == 4)
            host.terminate()
            out, _ = host.communicate(timeout=30)
        assert (host.returncode, out) == (0, "all workers of this host have left; the run may continue without them\n")
        assert within(30, lambda: members() == 2)
        done = last_step(run)
        assert within(30, lambda: last_step(run) >= done + 10)
        os.kill(process.pid, signal.SIGINT)
        stderr_of(process)
    assert process.returncode == 130


OTHER_TASKS = {
    ("samples: int = 96", "samples: int = 48"): "samples = 48: that is this worker's, and the run has 96",
    ("manual_seed(0)", "manual_seed(1)"): "data = sample 0: that is this worker's, and the run has another one",
    ("loss=loss", "optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=loss"): "optimizer = SGD: that is this worker's",
    (".square()", ".abs()"): "code of own.py = sha256 ",
}


@pytest.mark.long
def test_a_host_that_has_another_task_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TASK)
    line = ("--workers", "2:4", "--steps", "1000000", "--checkpoint-every", "0")
    with running_training(tmp_path, "run", *line) as process:
        for (old, new), words in OTHER_TASKS.items():
            (tmp_path / "own.py").write_text(TASK.replace(old, new))
            host = unisono(tmp_path, "join", "--run-dir", "run", "--workers", "1")
            assert host.returncode == 2, host.stderr
            assert words in host.stderr
            assert "give every host the same task, data and settings." in host.stderr
        done = last_step(tmp_path / "run")
        assert within(30, lambda: last_step(tmp_path / "run") >= done + 10)
        assert all(set(view["members"]) <= {"0", "1"} for view in events(tmp_path / "run", "view"))
        os.kill(process.pid, signal.SIGINT)
        stderr_of(process)
    assert process.returncode == 130


@pytest.mark.long
def test_a_replacement_that_finds_another_task_is_not_taken_in_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TASK)
    line = ("--workers", "2", "--steps", "1000000", "--checkpoint-every", "0")
    with running_training(tmp_path, "run", *line) as process:
        (tmp_path / "own.py").write_text(TASK.replace(".square()", ".abs()"))
        pids = {name: pid for pid, name in session(process.pid).items()}
        os.kill(pids["unisono worker 1"], signal.SIGKILL)
        assert within(60, lambda: "TaskMismatch" in (tmp_path / "run" / "logs" / "worker-1.log").read_text())
        done = last_step(tmp_path / "run")
        assert within(30, lambda: last_step(tmp_path / "run") >= done + 10)
        os.kill(process.pid, signal.SIGINT)
        words = stderr_of(process)
    assert process.returncode == 130
    assert "worker 1.2 cannot take part, 1 worker continues without it: code of own.py = sha256 " in words


# Being asked to end, and being killed.


@pytest.mark.short(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_at_a_step_with_a_checkpoint_and_says_how_to_go_on(
    number: signal.Signals, code: int, home: Path
) -> None:
    run = home / number.name
    with running_training(home, number.name, *EXACT, "--checkpoint-every", "0") as process:
        os.kill(process.pid, number)
        words = stderr_of(process)
    assert process.returncode == code, words
    assert "Traceback" not in words
    ((step, _),) = checkpoints(run / "checkpoints")
    assert step == last_step(run) < 600
    ending = f"stopped on request after {step} of 600 steps"
    assert f"interrupted by {number.name}: {ending}\nthe run directory is {run}; resume with  unisono train" in words
    assert came(run) == (step, False, ending)
    again = re.findall(r"resume with  unisono (.*)\n", words)
    done = unisono(home, *shlex.split(again[0]))
    assert done.returncode == 0, done.stderr
    assert f"resuming from the checkpoint of step {step}" in done.stderr
    assert weights(run) == weights(home / "whole")


@pytest.mark.long
def test_processes_have_names_and_a_killed_worker_is_named_and_ends_the_run(home: Path) -> None:
    run = home / "killed"
    with running_training(home, "killed", *EXACT, "--checkpoint-every", "5", "--no-elastic") as process:
        by_name = {name: pid for pid, name in session(process.pid).items()}
        assert set(by_name) == {f"unisono {role}" for role in ("launcher", "forkserver", "worker 0", "worker 1")}
        os.kill(by_name["unisono worker 1"], signal.SIGKILL)
        words = stderr_of(process)
    assert process.returncode == 1
    assert words.endswith(f"worker 1 failed: killed by SIGKILL (out of memory?)\n{goes_on(run)}")
    assert "Traceback" not in words
    done = unisono(home, "train", "own.py:task", "--run-dir", "killed", "--resume")
    assert done.returncode == 0, done.stderr
    assert weights(run) == weights(home / "whole")


@pytest.mark.short(1)
@pytest.mark.parametrize("how", ["", "--no-elastic"], ids=["elastic", "not elastic"])
def test_where_every_worker_is_asked_to_end_the_run_is_not_complete(how: str, home: Path) -> None:
    name = f"asked{how}"
    with running_training(home, name, *EXACT, "--checkpoint-every", "0", *how.split()) as process:
        for pid in workers_of(process):
            os.kill(pid, signal.SIGTERM)
        words = stderr_of(process)
    assert process.returncode == 143, words
    step = last_step(home / name)
    ending = f"stopped on request after {step} of 600 steps"
    assert came(home / name) == (step, False, ending)
    assert f"interrupted by SIGTERM: {ending}\n" in words
    assert [step for step, _ in checkpoints(home / name / "checkpoints")] == [step]


@pytest.mark.long
def test_the_last_worker_of_too_few_saves_what_it_has(home: Path) -> None:
    """One leaves, so that the others are fewer than the run needs; then they are asked to leave too."""
    with running_training(home, "few", *EXACT, "--workers", "2:3", "--checkpoint-every", "0") as process:
        first, second = workers_of(process)
        os.kill(first, signal.SIGTERM)
        assert within(30, lambda: first not in session(process.pid))
        os.kill(second, signal.SIGTERM)
        words = stderr_of(process)
    assert process.returncode == 143, words
    step, complete, _ = came(home / "few")
    assert not complete
    assert [step for step, _ in checkpoints(home / "few" / "checkpoints")] == [step]
    assert step >= last_step(home / "few") - 1


@pytest.mark.short(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_there_are_workers_ends_the_command_in_words(number: signal.Signals, home: Path) -> None:
    here = home / f"before-{number.name}"
    (home / "slow.py").write_text(
        "import pathlib, sys, time\n\ndef task(*, here: str):\n    pathlib.Path(here).touch()\n    time.sleep(600)\n"
    )
    line = command("train", "slow.py:task", "--here", here)
    streams: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, cwd=home, env=STACKS, start_new_session=True, **streams) as process:
        try:
            # A signal just before Python enters time.sleep is not seen until that returns, as it interrupts no call.
            assert within(90, lambda: here.exists() and psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
            os.kill(process.pid, number)
            assert stderr_of(process) == f"interrupted by {number.name}\n"
            assert process.wait(30) == 128 + number
            assert within(5, lambda: not session(process.pid)), session(process.pid)
        finally:
            for pid in session(process.pid):
                os.kill(pid, signal.SIGKILL)


# Nobody reads what is said.


@pytest.mark.long
def test_a_run_goes_on_when_its_output_leads_nowhere(home: Path) -> None:
    """Its reader is gone, as after `| head -1`; the disk is full; standard streams are closed from the start."""
    reader, gone = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    ways: dict[str, dict[str, Any]] = {
        "gone": {"stdout": gone, "stderr": gone},
        "full": {"stdout": full, "stderr": full},
        "closed": {"preexec_fn": lambda: os.closerange(0, 3)},
    }
    line = command("train", "own.py:task", *EXACT, "--steps", "50", "--run-dir")
    started = {name: subprocess.Popen([*line, f"unread-{name}"], cwd=home, **how) for name, how in ways.items()}
    os.close(gone), os.close(full)
    assert {name: process.wait(170) for name, process in started.items()} == dict.fromkeys(ways, 0)
    assert {came(home / f"unread-{name}") for name in ways} == {(50, True, "all 50 steps are done")}


def shown(terminal: int) -> bytes:
    """What a terminal has been sent since the last call, or before."""
    os.set_blocking(terminal, False)
    with suppress(BlockingIOError):
        return os.read(terminal, 1 << 16)
    return b"nothing new"


@pytest.mark.long
@pytest.mark.parametrize("ignored", [False, True], ids=["as usual", "nohup"])
def test_a_terminal_that_goes_away_asks_the_run_to_stop(ignored: bool, home: Path) -> None:
    run, (terminal, ours) = home / f"terminal-{ignored}", pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    line = command("train", "own.py:task", *EXACT, "--steps", "600", "--checkpoint-every", "0", "--run-dir", run)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), ours)
    process = subprocess.Popen(line, cwd=home, **streams, start_new_session=True, preexec_fn=take_terminal)
    os.close(ours)
    try:
        assert within(90, lambda: shown(terminal) and last_step(run) >= 10)
        os.close(terminal)
        assert process.wait(90) == (0 if ignored else 129)
        assert within(5, lambda: not session(process.pid)), session(process.pid)
    finally:
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)
    steps, complete, _ = came(run)
    assert complete == ignored
    assert [step for step, _ in checkpoints(run / "checkpoints")] == [steps]


# Two commands, one directory.


@pytest.mark.long
def test_a_run_that_is_alive_is_not_resumed_beside_itself(home: Path) -> None:
    with running_training(home, "alive", *EXACT) as process:
        done = unisono(home, "train", "own.py:task", "--run-dir", "alive", "--resume")
        assert done.returncode == 2
        where = re.escape(
            f"run_dir = {home / 'alive'}: it is in use by process {process.pid} on host {os.uname().nodename}"
        )
        assert re.fullmatch(f"{where} since .*; wait for that run or end it, or name another directory.\n", done.stderr)
        stderr_of(process)
    assert process.returncode == 0
    assert weights(home / "alive") == weights(home / "whole")
    assert len(events(home / "alive", "start")) == 1


@pytest.mark.long
def test_a_run_whose_launcher_was_killed_is_resumed_at_once(home: Path) -> None:
    with running_training(home, "orphaned", *EXACT, "--checkpoint-every", "5") as process:
        process.kill()
        done = unisono(home, "train", "own.py:task", "--run-dir", "orphaned", "--resume")
        assert done.returncode == 0, done.stderr
    assert weights(home / "orphaned") == weights(home / "whole")


# Errors of the user's own.


def test_an_error_in_one_worker_is_shown_once_and_first(home: Path) -> None:
    done = unisono(home, "train", "own.py:task", "--fails", "raise", "--workers", "3", "--run-dir", "raise")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    trace = done.stderr[done.stderr.index("Traceback") :]
    assert 'raise ValueError("spilled milk")  # the user\'s line' in trace
    error = r"\nValueError: spilled milk\n(after \d+ steps)\n\nworker 1 failed: ValueError: spilled milk \(\1\)\n"
    assert re.search(error + re.escape(goes_on(home / "raise")) + "$", trace), trace
    assert "worker 0" not in trace


@pytest.mark.short(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_that_calls_sys_exit_has_failed(workers: int, home: Path) -> None:
    name, last = f"exit-{workers}", workers - 1
    done = unisono(home, "train", "own.py:task", "--fails", "exit", "--run-dir", name, "--workers", str(workers))
    assert done.returncode == 1, done.stderr
    left = rf"worker {last}: user code called sys\.exit\(0\) on own\.py:\d+ loss after \d+ steps\n"
    assert re.search(left + re.escape(goes_on(home / name)) + "$", done.stderr), done.stderr


@pytest.mark.short(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_value_that_comes_late_leaves_the_run_and_its_checkpoints(workers: int, home: Path) -> None:
    name = f"late-{workers}"
    settings = ["--workers", str(workers), "--checkpoint-every", "2", "--load", "Inline()"]
    done = unisono(home, "train", "own.py:task", "--fails", "weight", "--run-dir", name, *settings)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    found = re.search(r"worker \d after (\d+) steps: weight = nan: a batch cannot count that much; .*\n", done.stderr)
    assert found, done.stderr
    assert int(found[1]) >= 12
    assert done.stderr.endswith(goes_on(home / name))
    assert checkpoints(home / name / "checkpoints")


@pytest.mark.long
@pytest.mark.parametrize("launched", [(), ("-m", "unisono", "launch", "--workers", "2")], ids=["alone", "launched"])
def test_a_bad_value_that_comes_late_leaves_the_run_of_a_script(launched: tuple[str, ...], home: Path) -> None:
    name = f"script-{len(launched)}"
    (home / "script.py").write_text(
        "import sys\n\nimport unisono\nfrom own import task\n\n"
        "unisono.train(task(fails='weight'), unisono.Config(run_dir=sys.argv[1], load=unisono.Inline()))\n"
    )
    line = [sys.executable, *launched, "script.py", name]
    done = subprocess.run(line, cwd=home, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1, done.stderr
    assert re.search(r"worker \d after \d+ steps: weight = nan: ", done.stderr), done.stderr
    assert (
        f"the run directory is {home / name}; resume with Config(run_dir='{home / name}', resume=True)" in done.stderr
    )
    assert (home / name / "config.toml").exists()


def test_a_bad_value_that_comes_first_takes_the_new_run_away(home: Path) -> None:
    done = unisono(home, "train", "own.py:task", "--fails", "weight at once", "--run-dir", "early")
    assert (done.returncode, (home / "early").exists()) == (2, False), done.stderr
    assert done.stderr.startswith("weight = nan: ")


def test_a_loss_that_is_not_a_number_is_one_sentence(home: Path) -> None:
    done = unisono(home, "train", "own.py:task", "--fails", "nan", "--workers", "2", "--run-dir", "nan")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    where = (
        r"in step \d+, micro-batch \d, computed by worker \d from samples .*, of which 11 contains non-finite numbers: "
    )
    assert re.match(f"the loss is nan {where}", last), done.stderr


# Disks.


@contextmanager
def disk(at: Path, options: str) -> Iterator[Path]:
    """A file system of its own, in memory."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    at.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(at).encode(), b"tmpfs", 0, options.encode()):
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield at
    finally:
        libc.umount2(str(at).encode(), 2)


def remount(at: Path, flags: int) -> None:
    assert ctypes.CDLL(None).mount(b"tmpfs", str(at).encode(), b"tmpfs", 32 | flags, None) == 0


NO_SPACE = r"no space left on device \(\S+, .* needed, .* free\)"


@pytest.mark.short(1)
@pytest.mark.root
@pytest.mark.parametrize(
    ("size", "why"), [("256k", NO_SPACE), ("1800k", f"({NO_SPACE}|worker 1 could not .*)")], ids=["either", "both"]
)
def test_a_disk_too_small_for_a_checkpoint_does_not_end_the_run(
    size: str, why: str, home: Path, tmp_path: Path
) -> None:
    """Too small for either worker's part, or for both parts together."""
    words = ("own.py:task", *EXACT, "--steps", "20", "--checkpoint-every", "5", "--width", "20000")
    with disk(tmp_path / "disk", f"size={size}") as at:
        done = unisono(home, "train", *words, "--run-dir", at / "run")
        assert done.returncode == 0, done.stderr
        told = [event["words"] for event in events(at / "run", "checkpoint failed")]
        assert all(done.stderr.count(f"note {words}\n") == 1 for words in told)
        assert re.fullmatch(rf"checkpoint of step 20 was not written: {why}; training continues", told[-1])
        assert json.loads((at / "run" / "summary.json").read_text())["steps"] == 20
        assert not checkpoints(at / "run" / "checkpoints")


def fill(file: Path) -> None:
    with suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))


@pytest.mark.long
def test_a_killed_worker_is_replaced_where_workers_come_and_go(home: Path) -> None:
    with running_training(home, "replaced", *EXACT) as process:
        by_name = {name: pid for pid, name in session(process.pid).items()}
        roles = ("launcher", "forkserver", "coordinator", "worker 0", "worker 1")
        assert set(by_name) == {f"unisono {role}" for role in roles}
        os.kill(by_name["unisono worker 1"], signal.SIGKILL)
        words = stderr_of(process)
    assert process.returncode == 0, words
    assert "worker 1 was killed by SIGKILL (out of memory?): 1 worker continues, a replacement is started" in words
    assert weights(home / "replaced") == weights(home / "whole")


@pytest.mark.long
def test_workers_go_on_without_a_forkserver_and_another_one_replaces_them(home: Path) -> None:
    with running_training(home, "unforked", *EXACT) as process:
        by_name = {name: pid for pid, name in session(process.pid).items()}
        os.kill(by_name["unisono forkserver"], signal.SIGKILL)
        assert within(30, lambda: by_name["unisono forkserver"] not in session(process.pid))
        os.kill(by_name["unisono worker 1"], signal.SIGKILL)
        words = stderr_of(process)
    assert process.returncode == 0, words
    assert "the fork server was killed by SIGKILL (out of memory?): workers continue, and another server" in words
    assert "worker 1 was killed by SIGKILL (out of memory?): 1 worker continues, a replacement is started" in words
    assert weights(home / "unforked") == weights(home / "whole")


@pytest.mark.long
@pytest.mark.root
@pytest.mark.parametrize("coming_and_going", [False, True])
def test_a_disk_that_fills_up_to_the_last_byte_does_not_end_the_run(coming_and_going, home, tmp_path) -> None:
    with disk(tmp_path / "disk", "size=4m") as at:
        options = (*EXACT, "--checkpoint-every", "50", "--fails", "talk")
        options += () if coming_and_going else ("--no-elastic",)
        with running_training(home, str(at / "run"), *options) as process:
            fill(at / "large")
            words = stderr_of(process)
        assert process.returncode == 0, words
        assert "no space left on device" in words
        # What a coordinator lets go of on the disk may be enough for the summary.
        assert coming_and_going or "summary.json was not written" in words


@pytest.mark.root
def test_a_place_that_cannot_be_written_is_named(home: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "size=4m") as at:
        assert unisono(home, "train", "own.py:task", "--steps", "5", "--run-dir", at / "old").returncode == 0
        remount(at, 1)
        for words in (("--run-dir", at / "new"), ("--run-dir", at / "old", "--resume", "--steps", "10")):
            done = unisono(home, "train", "own.py:task", *words)
            assert done.returncode == 2
            assert done.stderr.count("\n") == 1, done.stderr
            assert done.stderr.startswith(f"run_dir = {words[1]}: cannot be written (Read-only file system); ")


# Bad input, from the command to its exit code.

WRONG = {
    "digit": "task = digit: there is no such task; did you mean digits?",
    "own.py:tsk": "own.py has no function tsk; did you mean task?",
    "own.py:nothing": "task = own.py:nothing: it returned an int, not a Task",
    "own.py:task --workers 7": "workers = 7: a step has only 6 micro-batches",
    "own.py:task --micro-batch 5": "micro_batch = 5: does not divide global_batch = 24; use micro_batch=4 or 6",
    "own.py:task --samples 20": "global_batch = 24: larger than the dataset, which has 20 samples",
    "own.py:task --layout Foo(": "layout = Foo(: not a literal call",
    "own.py:task --layout Layout(tensor=2)": "write --workers 2",
    "own.py:task --workers 2 --layout Layout(shard=4)": "and the run's 2 workers are not a multiple of that; write ",
    "own.py:task --workers 3 --layout Layout(pipeline=3)": "2 units, so 1 to 2 stages; write Layout()",
    "own.py:task --workers 2 --layout Layout(pipeline=2,cuts=('9',))": "cuts = 9: Sequential has no module of that",
    "own.py:task --workers 2 --layout Layout(context=2)": "context = 2: Sequential does not compute the same on parts",
    "digits --workers 2 --layout Layout(context=2)": "context = 2: it needs 4 chunks of equal length, and sequences",
    "text --model.heads 3 --model.width 24 --workers 2 --layout Layout(tensor=2)": "not divide by 2; tensor must "
    "divide 3; write Layout()",
    "text --model.context 18 --workers 2 --layout Layout(context=2)": "have length 18; write Layout(), or pad or cut "
    "sequences: the nearest length that works is 16",
    "own.py:task --compress Zip()": "compress = Zip(): Zip is not a listed name; known: Auto, ByName, ",
    "own.py:task --run-dir whole": "whole: the directory exists; add --resume to continue the run",
    "own.py:task --run-dir nowhere --resume": "there is no such run to resume; leave out --resume to start it",
    "own.py:task --run-dir whole --resume --width 16": "tensor 'model/0.bias' is float32 [16] here and float32 [32] in",
    "own.py:task --run-dir whole --resume --seed 5": "seed = 5: the run to resume was started with 0",
    "text --text nowhere.txt": "nowhere.txt",
}


@pytest.mark.short(3)
@pytest.mark.parametrize("line", WRONG)
def test_bad_input_is_one_sentence_and_leaves_nothing(line: str, home: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*.toml")}
    entries = sorted(os.listdir(home))
    done = unisono(home, "train", *line.split(" "))
    assert done.returncode == 2, done.stderr
    assert WRONG[line] in done.stderr
    assert "Traceback" not in done.stderr
    *notes, sentence = done.stderr.splitlines()
    assert all(note.startswith(("note ", "stuck ")) for note in notes), done.stderr  # a machine may be slow
    assert re.match(r"\S+ = .*: .*; .*[.?]$", sentence), done.stderr
    assert done.stdout == ""
    assert sorted(os.listdir(home)) == entries
    assert before == {path: path.stat().st_mtime_ns for path in home.rglob("*.toml")}
