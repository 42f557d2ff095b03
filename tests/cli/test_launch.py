"""``unisono launch``: its options, and scripts that run as under plain Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_run import CommandOutput
from unisono.cli.launch import LaunchRequest, read_request

Unisono = Callable[..., CommandOutput]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "loop.py"
    path.write_text("")
    return path


def test_what_follows_the_script_is_the_scripts(script: Path) -> None:
    asked = read_request(["--workers", "3", "--logs=l", "loop.py", "--workers", "9", "x"])
    assert asked == LaunchRequest(Path("loop.py"), ("--workers", "9", "x"), 3, Path("l"), Path("l"))


def test_logs_have_a_place_of_their_own(script: Path) -> None:
    logs = read_request(["loop.py"]).logs
    assert logs.parts[0] == "runs"
    assert logs.parts[1].startswith("loop-")


def test_a_run_has_a_place_and_workers_a_range(script: Path) -> None:
    asked = read_request(["--workers", "2:4", "--run-dir", "r", "loop.py"])
    assert asked == LaunchRequest(Path("loop.py"), (), 2, Path("r/logs"), Path("r"), min_workers=2, max_workers=4)
    assert asked.most_workers == 4
    assert not read_request(["--no-elastic", "--workers", "2", "loop.py"]).elastic


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "script = (nothing): no script is given; write unisono launch SCRIPT.py."),
        ("nowhere.py", "script = nowhere.py: there is no such file; check the path."),
        ("--workers 0 loop.py", "--workers = 0: not a whole number from 1; write for instance --workers 2."),
        ("--workers 4:2 loop.py", "--workers = 4:2: the first number is larger than 2"),
        ("--no-elastic --workers 2:4 loop.py", "--no-elastic = (given): it excludes --workers 2:4, since no worker"),
        ("--key k loop.py", "--key = k: no coordinator is named"),
        ("--workers two loop.py", "--workers = two: not a whole number from 1"),
        ("--worker 2 loop.py", "--worker = (nothing): there is no such option; did you mean --workers?"),
        ("--workers", "--workers = (nothing): a value is missing"),
    ],
)
def test_what_cannot_work_is_one_sentence(script: Path, unisono: Unisono, line: str, says: str) -> None:
    said = unisono("launch", *line.split())
    assert said.code == 2
    assert said.err.startswith(says)
    assert said.err.count("\n") == 1
    assert not Path("runs").exists()


def launched(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "unisono",
        "launch",
        "--workers",
        "2",
        "--logs",
        "logs",
        str(script),
        *words,
    ]
    return subprocess.run(
        command, cwd=script.parent, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )


def test_a_script_runs_as_main_with_its_arguments_and_neighbours(script: Path) -> None:
    (script.parent / "neighbour.py").write_text("word = 'found'")
    script.write_text(
        "import os, sys, neighbour\n"
        "who = os.environ['UNISONO_RANK'], os.environ['UNISONO_SIZE']\n"
        "print(__name__, sys.argv[1:], neighbour.word, *who)\n"
    )
    done = launched(script, "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert "__main__ ['--lr', '1'] found 0 2\n" in done.stdout
    assert "found 1 2" not in done.stdout
    assert "found 1 2" in (script.parent / "logs" / "worker-1.log").read_text()


def test_a_failing_worker_is_shown_first_and_once(script: Path) -> None:
    script.write_text("import os\nif os.environ['UNISONO_RANK'] == '1':\n    raise ValueError('of the script')\n")
    done = launched(script)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert 'loop.py", line 3' in done.stderr
    assert done.stderr.endswith("worker 1 failed: ValueError: of the script\n")


def test_the_exit_code_of_a_script_is_the_exit_code(script: Path) -> None:
    script.write_text("import sys\nsys.exit(7)\n")
    assert launched(script).returncode == 7
