"""A number of workers that would exhaust the host is refused before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono.cli import main
from unisono.errors import InvalidInput
from unisono.launch.limit import MAX_PER_PROCESSOR, check_worker_count

MOST = MAX_PER_PROCESSOR * len(os.sched_getaffinity(0))


def test_as_many_as_fit_are_started() -> None:
    check_worker_count(MOST)
    with pytest.raises(InvalidInput, match=f"workers = {MOST + 1}: this process may use .*, and starts at most 64"):
        check_worker_count(MOST + 1)


@pytest.mark.parametrize(
    "command",
    [
        "train digits --workers 1000000 --global-batch 1000000 --micro-batch 1 --run-dir run",
        "train digits --workers 1000000000000 --global-batch 1000000000000 --micro-batch 1 --run-dir run",
        "launch --workers 1000000 --run-dir run script.py",
        "train digits --workers 9 --run-dir run",
    ],
)
def test_nothing_is_created(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    assert main(command.split()) == 2
    assert "workers = " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_so_is_one_in_the_configuration_of_a_run_that_is_resumed(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.toml").write_text("workers = 1000000\nglobal_batch = 1000000\nmicro_batch = 1\n")
    assert main(["train", "digits", "--run-dir", str(tmp_path), "--resume"]) == 2
    assert "workers = 1000000" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
