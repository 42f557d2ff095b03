"""A debugger in a worker has the launcher's terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROMPT, SECONDS = "(Pdb) ", 170.0


class Session:
    """A command on a terminal of its own."""

    def __init__(self, at: Path, *words: str) -> None:
        self.shown = ""
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(at)
            os.environ |= {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
            os.execv(sys.executable, [sys.executable, "-m", "unisono", *words])

    def until(self, words: str) -> str:
        """What is shown up to `words`, from where the last call ended."""
        end = time.monotonic() + SECONDS
        while words not in self.shown:
            ready, _, _ = select.select([self._terminal], [], [], end - time.monotonic())
            assert ready, self.shown[-2000:]
            try:
                self.shown += os.read(self._terminal, 4096).decode(errors="replace")
            except OSError as error:  # nobody has the terminal any more
                raise AssertionError(self.shown[-2000:]) from error
        before, _, self.shown = self.shown.partition(words)
        return before

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def end(self) -> int:
        """The exit code; what is shown is read on meanwhile."""
        try:
            while True:
                self.shown += os.read(self._terminal, 4096).decode(errors="replace")
        except OSError:
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def close(self) -> None:
        try:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._terminal)


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[object]:
    opened: list[Session] = []

    def start(*words: str) -> Session:
        opened.append(Session(tmp_path, *words))
        return opened[-1]

    yield start
    for session in opened:
        session.close()


SCRIPT = """
import os
if os.environ["RANK"] == os.environ.get("STOPS", "0"):
    secret = 41
    print("before")
    breakpoint()
    print("after", secret, input())
"""


@pytest.mark.long
def test_a_single_worker_is_debugged_as_in_plain_python(sessions, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    session = sessions("launch", "--workers", "1", "script.py")
    assert "before" in session.until(PROMPT)
    session.type("p secret + 1\n")
    assert "42" in session.until(PROMPT)
    session.type("\x03")  # Ctrl-C at the prompt is the debugger's
    session.until(PROMPT)
    session.type("c\nanswer\n")
    session.until("after 41 answer")
    assert session.end() == 0


@pytest.mark.long
def test_one_of_several_workers_is_debugged(sessions, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("STOPS", "1")
    (tmp_path / "script.py").write_text(SCRIPT)
    session = sessions("launch", "--workers", "2", "--debug", "1", "script.py")
    session.until(PROMPT)
    session.type("p secret\n")
    assert "41" in session.until(PROMPT)
    session.type("q\n")
    assert session.end() == 1
    assert "BdbQuit" in session.shown


def test_a_task_is_debugged_while_it_is_trained(sessions, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch, unisono\n"
        "stops = [True]\n"
        "def loss(output, batch):\n"
        "    stops and stops.pop() and breakpoint()\n"
        "    return output.square().mean()\n"
        "def task():\n"
        "    return unisono.Task(model=lambda: torch.nn.Linear(2, 1), data=torch.ones(8, 1, 2), loss=loss,\n"
        "                        defaults={'steps': 3, 'global_batch': 4})\n"
    )
    session = sessions("train", "own.py:task", "--workers", "1")
    session.until(PROMPT)
    session.type("p output.shape\n")
    assert "torch.Size([1, 1])" in session.until(PROMPT)
    session.type("c\n")
    assert session.end() == 0
    assert "step 3/3" in session.shown


def launched(at: Path, *words: str, text: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    (at / "script.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "unisono", "launch", *words, "script.py"], cwd=at, input=text, capture_output=True,
        text=True, timeout=SECONDS, check=False, env=os.environ | environ,
    )  # fmt: skip


@pytest.mark.long
def test_what_comes_through_a_pipe_is_read_too(tmp_path: Path) -> None:
    done = launched(tmp_path, text="p secret * 2\nc\nanswer\n")
    assert done.returncode == 0, done.stderr
    assert "82" in done.stdout
    assert done.stdout.endswith("after 41 answer\n")


@pytest.mark.long
def test_without_a_terminal_a_breakpoint_says_what_to_do(tmp_path: Path) -> None:
    done = launched(tmp_path, "--workers", "2", "--no-elastic")
    assert done.returncode == 1
    assert "breakpoint() in worker 0, which has no terminal: start one worker, or add --debug 0" in done.stderr
    done = launched(tmp_path, "--workers", "2", "--debug", "2")
    assert (done.returncode, done.stderr) == (2, "--debug = 2: there are workers 0 to 1; choose one of them.\n")


@pytest.mark.long
def test_breakpoints_can_be_switched_off_as_in_plain_python(tmp_path: Path) -> None:
    done = launched(tmp_path, text="answer\n", PYTHONBREAKPOINT="0")
    assert done.stdout == "before\nafter 41 answer\n"
