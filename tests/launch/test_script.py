"""A user's script runs under the launcher as under plain Python, in every worker."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.errors import InvalidInput, WorkerFailed
from unisono.launch import Interrupted, LaunchOptions, ScriptExited, launch_script, start_fork_server

TELL = """\
import os, sys, beside
print(sys.argv, sys.path[0], __name__, os.path.basename(__file__), beside.name, os.environ["UNISONO_RANK"])
"""


def run(script: Path, *arguments: str, workers: int = 3) -> str:
    """The output of worker 0 on the launcher's terminal."""
    shown = io.BytesIO()
    logs = script.parent / "logs"
    launch_script(script, arguments, LaunchOptions(logs, workers, echo=shown), fork_server=start_fork_server(()))
    return shown.getvalue().decode()


def test_three_workers_see_what_plain_python_shows(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("name = 'beside'")
    script = tmp_path / "script.py"
    script.write_text(TELL)
    shown = run(script, "--flag", "x")
    assert shown == f"['{script}', '--flag', 'x'] {tmp_path} __main__ script.py beside 0\n"
    for rank in (1, 2):
        assert (tmp_path / "logs" / f"worker-{rank}.log").read_text() == shown.replace("beside 0", f"beside {rank}")


def test_worker_0_is_shown_while_it_runs(tmp_path: Path) -> None:
    """The script waits for a file that appears only once its first words are seen."""
    seen, script = tmp_path / "seen", tmp_path / "script.py"
    script.write_text(
        f"import os, time\nprint('first')\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)\nprint('second')"
    )

    class Screen(io.BytesIO):
        def write(self, text: object) -> int:
            seen.touch()
            return super().write(text)  # type: ignore[arg-type]

    screen = Screen()
    launch_script(script, (), LaunchOptions(tmp_path / "logs", echo=screen), fork_server=start_fork_server(()))
    assert screen.getvalue() == b"first\nsecond\n"


def test_a_traceback_has_the_lines_of_the_script_and_no_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def work():\n    return 1 / 0\n\nwork()\n")
    with pytest.raises(WorkerFailed) as caught:
        run(script, workers=1)
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert caught.value.traceback == plain.stderr
    assert caught.value.reason == "ZeroDivisionError: division by zero"


def test_a_script_that_cannot_be_read_says_where(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("x = = 1\n")
    with pytest.raises(WorkerFailed, match="SyntaxError") as caught:
        run(script, workers=1)
    assert f'File "{script}", line 1' in caught.value.traceback


def test_the_exit_code_of_the_script_is_kept(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit(7)")
    with pytest.raises(ScriptExited) as caught:
        run(script)
    assert caught.value.exit_code == 7


def test_a_script_that_is_asked_to_end_was_interrupted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    with pytest.raises(Interrupted, match=r"interrupted by SIGTERM: the script was at .*script\.py:2 ") as caught:
        run(script, workers=1)
    assert caught.value.exit_code == 143


def test_a_script_that_trains_ends_as_its_run_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from unisono.launch import Interrupted\nraise Interrupted(15, [{'steps': 3}], 'after 3 steps')\n"
    )
    with pytest.raises(Interrupted, match="interrupted by SIGTERM: after 3 steps"):
        run(script)


def test_exit_functions_and_threads_end_as_in_plain_python(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, threading, time\natexit.register(print, 'exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('main')"
    )
    assert run(script, workers=1) == "main\nthread\nexit\n"


def test_a_missing_script_is_invalid_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no such file"):
        run(tmp_path / "none.py")
