"""Help, version and the list of tasks; the command line imports no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest

from tests.support.fake_run import CommandOutput
from unisono.cli.config_fields import fields
from unisono.tasks import TASKS

Unisono = Callable[..., CommandOutput]


@pytest.mark.parametrize("line", ["--help", "-h", "", "train --help", "launch --help", "tasks --help", "train -h"])
def test_help_goes_to_stdout(unisono: Unisono, line: str) -> None:
    said = unisono(*line.split())
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("usage: unisono ")


def test_version(unisono: Unisono) -> None:
    assert unisono("--version").out == f"unisono {version('unisono')}\n"


def test_every_field_of_config_is_an_option_with_a_meaning(unisono: Unisono) -> None:
    from unisono.config import FIELDS, Config

    read, shown = fields(), unisono("train", "--help").out
    assert {name: field.kind for name, field in read.items()} == FIELDS
    for name, field in read.items():
        default = getattr(Config(), name)
        assert field.meaning, name
        assert field.option in shown
        if isinstance(default, int | float | None):
            assert field.default == repr(default)


def test_help_of_a_task_shows_its_options(unisono: Unisono) -> None:
    said = unisono("train", "text", "--help")
    assert "options of text:" in said.out
    assert "--model.layers INT" in said.out


def test_tasks_lists_every_built_in_with_its_options(unisono: Unisono) -> None:
    said = unisono("tasks")
    assert said.code == 0
    for name in (*TASKS, "--hidden INT", "--text TEXT…", "--model.dropout NUMBER"):
        assert name in said.out


@pytest.mark.parametrize("line", ["--version", "--help", "train --help", "train digit", "launch --help"])
def test_quick_answers_import_no_torch(line: str) -> None:
    code = f"import sys; from unisono.cli import main; main({line.split()!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("False\n")


def test_it_is_also_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "unisono", "trian"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "command = trian: there is no such command; did you mean train?\n"
