"""Loader processes that exit are replaced, and their exceptions are raised in the trainer."""

from __future__ import annotations

import faulthandler
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.support.processes import run
from unisono.data import Inline, Loader, MicroBatchPlan, Processes
from unisono.data.remote_exception import RemoteException
from unisono.errors import InvalidInput, LoadingFailed

PLAN = MicroBatchPlan(50, 12, 3, seed=5)
STEPS = 6
FATAL = 17
STEP, MICRO_BATCH = next((s, m) for s in range(STEPS) for m in range(4) if FATAL in PLAN.indices(s, m))
LOADER = re.compile(r" loader \d+\s*$")
WAYS = [Processes(), Processes(count=2), Processes(count=3, ahead=1)]


class Augmented:
    """Draws from all three generators."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2) + index, random.random() + np.random.rand()


class Deadly(Augmented):
    """Its process dies of one sample, `times` times, which a directory counts."""

    def __init__(self, directory: Path, blow: Any, times: int = 1) -> None:
        self.directory, self.blow, self.times = directory, blow, times

    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)
        deaths = len(list(self.directory.iterdir()))
        if index == FATAL and deaths < self.times:
            (self.directory / str(deaths)).touch()
            self.blow()
        return found


class DeadlyBulk(Deadly):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def leave() -> None:
    os._exit(3)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fault() -> None:
    faulthandler.disable()  # or the log of the tests has tracebacks that are not failures
    os.kill(os.getpid(), signal.SIGSEGV)


def exit_in_order() -> None:
    sys.exit(0)


BLOWS = {
    leave: "ended with exit code 3",
    kill: "was killed by SIGKILL (out of memory?)",
    fault: "was killed by SIGSEGV (a fault in native code; the worker's log has the stack)",
    exit_in_order: "ended with exit code 0",
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not loading()


def loading() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if LOADER.search(" ".join(child.cmdline()))]


def load(dataset: Any, way: Any, notices: list[str], **more: Any) -> dict[tuple[int, int], Any]:
    loader = Loader(
        dataset, PLAN, lambda step: range(4), load=way, seed=9, steps=range(STEPS), notice=notices.append, **more
    )
    try:
        return {(step, m): batch for step in range(STEPS) for m, batch in loader.batches(step)}
    finally:
        loader.close()


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(a, b) for k in one for a, b in zip(one[k], other[k]))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("blow", BLOWS, ids=lambda blow: blow.__name__)
def test_a_process_that_dies_is_replaced_and_no_bit_changes(way, blow, tmp_path) -> None:
    notices: list[str] = []
    batches = load(Deadly(tmp_path, blow), way, notices)
    assert same(batches, load(Augmented(), Inline(), []))
    (said,) = notices
    where = f"while fetching sample {FATAL} (step {STEP}, micro-batch {MICRO_BATCH})"
    assert f"{BLOWS[blow]} {where}: it is replaced" in said


def load_with_a_death(rank: int, size: int, deaths: Path, temporary: Path) -> None:
    tempfile.tempdir = str(temporary)
    load(Deadly(deaths, kill), Processes(), [])


def test_a_process_that_is_killed_leaves_no_directory(tmp_path) -> None:
    deaths, temporary = tmp_path / "deaths", tmp_path / "temporary"
    deaths.mkdir(), temporary.mkdir()
    run(1, load_with_a_death, deaths, temporary)
    assert list(deaths.iterdir())
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_a_sample_that_kills_each_process_is_named_in_one_sentence(way, tmp_path) -> None:
    notices: list[str] = []
    with pytest.raises(LoadingFailed) as raised:
        load(Deadly(tmp_path, kill, times=99), way, notices)
    said = str(raised.value)
    assert f"every loading process exits while fetching sample {FATAL} (step {STEP}, micro-batch {MICRO_BATCH})" in said
    assert said.count("was killed by SIGKILL") == 2
    assert len(notices) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_where_samples_are_fetched_many_at_once_all_of_them_are_named(tmp_path) -> None:
    notices: list[str] = []
    with pytest.raises(LoadingFailed):
        load(DeadlyBulk(tmp_path, leave, times=2), Processes(), notices)
    samples = ", ".join(map(str, PLAN.indices(STEP, MICRO_BATCH)))
    assert f"while fetching one of the samples {samples} (step {STEP}" in notices[0]


@pytest.mark.parametrize("taken", [0, os.WNOWAIT], ids=["exit code taken", "exit code left"])
def test_a_process_that_is_killed_while_it_waits_is_replaced_again_and_again(taken) -> None:
    notices: list[str] = []
    loader = Loader(
        Augmented(), PLAN, lambda step: range(4), load=Processes(ahead=1), seed=9, steps=range(2),
        notice=notices.append)  # fmt: skip
    found = {}
    try:
        for step in range(2):
            for m, batch in loader.batches(step):
                found[step, m] = batch
                for child in loading():
                    child.kill()
                    os.waitid(os.P_PID, child.pid, os.WEXITED | taken)
    finally:
        loader.close()
    expected = load(Augmented(), Inline(), [])
    assert same(found, {key: expected[key] for key in found})
    assert len(notices) == 4 * 2 - 1
    assert all(("was killed by SIGKILL" if taken else "loading process 0 ended while") in said for said in notices)


def test_a_process_that_dies_at_its_start_is_not_started_for_ever(monkeypatch) -> None:
    monkeypatch.setattr("unisono.data.fork_setup.setproctitle", lambda title: os._exit(5))
    with pytest.raises(
        LoadingFailed, match="every loading process exits at its start: the first ended with exit code 5"
    ):
        load(Augmented(), Processes(), [])


def test_large_messages_do_not_hold_up_what_comes_after_them() -> None:
    """More than a pipe holds, and not of tensors."""
    batches = load(Augmented(), Processes(ahead=3), [], collate=lambda samples: "x" * 1_000_000)
    assert all(len(batch) == 1_000_000 for batch in batches.values())


def test_a_batch_that_cannot_be_sent_is_an_error_of_its_own() -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        load(Augmented(), Processes(), [], collate=lambda samples: lambda: samples)


def test_ctrl_c_and_sigterm_are_the_workers() -> None:
    loader = Loader(Augmented(), PLAN, lambda step: range(4), load=Processes(), seed=9, steps=range(STEPS))
    try:
        next(loader.batches(0))
        (child,) = loading()
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
        assert len(list(loader.batches(1))) == 4
        assert child.is_running()
    finally:
        loader.close()


# What is raised there.


class Broken(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == FATAL:
            try:
                self.lookup(index)
            except LookupError as error:
                raise OSError("no such file") from error
        return super().__getitem__(index)

    def lookup(self, index: int) -> Any:
        return {}[index]


def test_there_is_one_traceback_which_ends_in_the_lines_of_the_dataset() -> None:
    with pytest.raises(OSError, match="no such file") as raised:
        load(Broken(), Processes(), [])
    told = "".join(traceback.format_exception(raised.value))
    assert told.count("Traceback (most recent call last)") == 2, "of the error and of its own cause"
    cause, _, error = told.partition("The above exception was the direct cause of the following exception")
    assert "in lookup\n    return {}[index]\n" in cause
    assert cause.rstrip().endswith(f"KeyError: {FATAL}")
    assert 'in __getitem__\n    raise OSError("no such file") from error\n' in error
    assert error.index("in load\n") < error.index("in __getitem__\n"), "from the outside inwards"
    assert error.rstrip().endswith(f"OSError: no such file\nsample {FATAL}\nof step {STEP}, micro-batch {MICRO_BATCH}")
    assert traceback.extract_tb(raised.tb)[-1].filename == __file__


def test_what_is_raised_again_is_as_it_was() -> None:
    with pytest.raises(InvalidInput) as first:
        raise InvalidInput("data", 3, "it is wrong", "correct it")
    first.value.add_note("a note")
    again = RemoteException.of(first.value).rebuild()
    assert isinstance(again, InvalidInput)
    assert (again.field, again.__notes__, str(again)) == ("data", ["a note"], str(first.value))
    lines = traceback.extract_tb(again.__traceback__)
    assert [(line.filename, line.name) for line in lines][-1] == (__file__, "test_what_is_raised_again_is_as_it_was")
    assert [line.lineno for line in lines] == [line.lineno for line in traceback.extract_tb(first.tb)]


def test_the_interpreter_prints_it_too(tmp_path) -> None:
    """Whose own printer is written in C."""
    (tmp_path / "broken.py").write_text("def fetch():\n    x = 1\n    raise KeyError('no such file')\n")
    script = (
        "import sys; sys.path.insert(0, '.')\nimport broken\n"
        "from unisono.data.remote_exception import RemoteException\n"
        "try:\n    broken.fetch()\nexcept KeyError as error:\n    raised = RemoteException.of(error)\n"
        "raise raised.rebuild()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert "broken.py\", line 3, in fetch\n    raise KeyError('no such file')\n" in done.stderr
    assert done.stderr.count("Traceback") == 1
