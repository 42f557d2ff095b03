"""Signals before workers exist, and commands without a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_run import CommandOutput, FakeRun, Result
from tests.support.processes import ignoring

Unisono = Callable[..., CommandOutput]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_there_are_workers_is_one_sentence(
    unisono: Unisono, played: FakeRun, number: signal.Signals
) -> None:
    def asked(on_message: object) -> Result:
        for _ in range(2):  # as timeout does, and a terminal that closes
            os.kill(os.getpid(), number)
        raise AssertionError

    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    played.act = asked
    said = unisono("train", "digits")
    assert (said.code, said.err) == (128 + number, f"interrupted by {number.name}\n")


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_is_ignored_stays_so(unisono: Unisono, played: FakeRun, number: signal.Signals) -> None:
    def asked(on_message: object) -> Result:
        os.kill(os.getpid(), number)
        return Result()

    signal.signal(number, signal.SIG_IGN)
    played.act = asked
    assert unisono("train", "digits").code == 0


@pytest.mark.usefixtures("restored")
def test_sigterm_ends_chaos_in_words_and_leaves_no_directory(
    unisono: Unisono, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = []

    def asked(*_: object) -> None:
        there.extend(tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("unisono.cli.chaos._trials", asked)
    said = unisono("chaos", "digits")
    assert (said.code, said.err) == (143, "interrupted by SIGTERM\n")
    assert len(there) == 1
    assert not list(tmp_path.iterdir())


IMPORTING = """
import os, runpy, signal, sys

class Asks:
    def find_spec(name, *_):
        if name == "unisono.cli.main":
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Asks)
runpy.run_module("unisono", run_name="__main__")
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_the_command_is_imported_is_one_sentence(number: signal.Signals) -> None:
    line = [sys.executable, "-c", IMPORTING, number.name]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (128 + number, f"interrupted by {number.name}\n")


OPENS = """
import os, sys
from unisono.cli.terminal import ignoring_output_errors

with ignoring_output_errors():
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
    print("not for the file", flush=True)
    print("nor this", file=sys.stderr, flush=True)
    os.write(file, b"for the file")
"""


def test_a_closed_standard_stream_is_not_taken_for_a_file_that_is_opened_later(tmp_path: Path) -> None:
    line = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", OPENS, str(tmp_path / "file")]
    subprocess.run(line, check=True, timeout=60)
    assert (tmp_path / "file").read_text() == "for the file"


INHERITED = """
import multiprocessing, signal, subprocess, sys, tests.conftest
from concurrent.futures import ProcessPoolExecutor

for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
    code = f"import signal; print(signal.getsignal({number}) is signal.SIG_IGN)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as workers:
        print(workers.submit(signal.getsignal, number).result() is signal.SIG_IGN, flush=True)
"""


def test_processes_that_tests_start_do_not_inherit_what_the_caller_of_the_tests_ignores() -> None:
    started = [sys.executable, "-c", INHERITED]
    done = subprocess.run(
        started, preexec_fn=ignoring(*SIGNALS), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\nFalse\n" * len(SIGNALS)
