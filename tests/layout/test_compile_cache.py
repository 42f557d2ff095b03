"""Where compiled code of a model is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from unisono.errors import InvalidInput
from unisono.layout import compiled

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "")
    return tmp_path


def test_it_is_a_private_directory_in_the_users_cache(home: Path) -> None:
    compiled(len)
    directory = home / "unisono" / "compiled"
    assert os.environ[VARIABLE] == str(directory)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_what_the_user_has_chosen_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/somewhere")
    compiled(len)
    assert os.environ[VARIABLE] == "/somewhere"
    assert not list(home.iterdir())


def test_one_that_others_can_write_to_is_refused(home: Path) -> None:
    directory = home / "unisono" / "compiled"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with pytest.raises(InvalidInput, match="others can write to it; set TORCHINDUCTOR_CACHE_DIR"):
        compiled(len)
    directory.rmdir()
    directory.symlink_to("/tmp")
    with pytest.raises(InvalidInput, match="others can write to it"):
        compiled(len)
