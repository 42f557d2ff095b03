"""Replaces the run behind the command line by a fake that records its arguments."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

from tests.support.fake_run import CommandOutput, FakeRun
from unisono import run as package
from unisono.cli import main


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """Stands in for `unisono.run.start`."""
    made, module = FakeRun(), types.ModuleType("unisono.run.start")
    module.start = made.start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unisono.run.start", module)
    monkeypatch.setattr(package, "start", module, raising=False)
    return made


@pytest.fixture
def unisono(capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandOutput]:
    """Run the command line in this process."""

    def run(*words: str) -> CommandOutput:
        code = main(words)
        return CommandOutput(code, *capsys.readouterr())

    return run
