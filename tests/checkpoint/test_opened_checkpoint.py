"""Partial reads of a checkpoint: only what is needed, only what is verified, errors that name the tensor."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.sharded_states import LAYOUTS, save_parts, tensors, wrong
from tests.checkpoint.states import unexpected
from tests.support.checkpoints import flip, load
from unisono.checkpoint import (
    Box,
    OpenedCheckpoint,
    compare,
    damages,
    fingerprint_of,
    newest,
    open_checkpoint,
    open_newest,
)
from unisono.errors import CheckpointDamaged, CheckpointMismatch

OLD, NEW = "step-00000001", "step-00000002"
ROWS = LAYOUTS["rows over 4"](tensors())
MATRIX = Box.whole((8, 6))
REGION = r"tensor 'model/matrix' \[4:6, 0:6\] of \[8, 6\]"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    for step in (1, 2):
        save_parts(directory, step, tensors(), ROWS)
    return directory


@pytest.fixture
def directory(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read."""
    found: list[int] = []
    original = os.preadv

    def preadv(descriptor: int, buffers: list[Any], position: int) -> int:
        found.append(original(descriptor, buffers, position))
        return found[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    return found


def harm(directory: Path) -> None:
    """One bit of the third quarter of ``model/matrix``."""
    stored = open_checkpoint(directory / NEW).stored["model/matrix"][2]
    flip(stored.file, stored.begin + 5)


# --- only what is needed


def test_only_boxes_that_are_needed_are_read(directory: Path, counted: list[int]) -> None:
    opened = open_checkpoint(directory / NEW)
    assert counted == []
    opened.read("model/matrix", MATRIX.cut(0, 2, 4))
    assert sum(counted) == 2 * 6 * 4
    counted.clear()
    # In two boxes: of the one that was verified only what is asked for, the other to be verified.
    opened.read("model/matrix", MATRIX.cut(0, 3, 5).cut(1, 0, 2))
    assert sum(counted) == 2 * 4 + 2 * 6 * 4
    counted.clear()
    opened.read("model/matrix", MATRIX.cut(0, 3, 4))
    assert sum(counted) == 6 * 4


def test_a_box_of_a_row_is_read_alone_once_it_is_verified(
    tmp_path: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"x": torch.arange(5000).view(5, 1000)}
    save_parts(tmp_path, 2, found, LAYOUTS["whole on 1"](found))
    opened, whole = open_checkpoint(tmp_path / NEW), Box.whole((5, 1000))
    part = whole.cut(0, 1, 2).cut(1, 100, 200)
    for nbytes in (5 * 1000 * 8, 100 * 8):
        counted.clear()
        assert torch.equal(opened.read("x", part), found["x"][1:2, 100:200])
        assert sum(counted) == nbytes
    counted.clear()
    monkeypatch.setattr("unisono.checkpoint.opened_checkpoint.CHUNK", 800)
    opened.read("x", whole.cut(1, 100, 200))  # a column of every row: what lies between is passed over
    assert sum(counted) == 5 * 100 * 8


def test_what_is_read_is_ones_own(directory: Path) -> None:
    opened = open_checkpoint(directory / NEW)
    for name in opened.specs:
        opened.read(name).zero_()
    assert wrong(opened, tensors(), ROWS) == []
    assert all(opened.read(name).is_contiguous() for name in opened.specs)


# --- what is wrong has a name


def test_a_flipped_byte_is_named_and_all_else_can_be_read(directory: Path) -> None:
    harm(directory)
    opened = open_checkpoint(directory / NEW)
    sound = [boxes if rank != 2 else {n: b for n, b in boxes.items() if n != "model/matrix"}
             for rank, boxes in enumerate(ROWS)]  # fmt: skip
    assert wrong(opened, tensors(), sound) == []
    for box in (MATRIX, MATRIX.cut(0, 5, 6), MATRIX.cut(1, 0, 1), ROWS[2]["model/matrix"]):
        with pytest.raises(CheckpointDamaged, match=rf"{NEW}/part-2.safetensors: the bytes of {REGION} are not"):
            opened.read("model/matrix", box)
    with pytest.raises(CheckpointDamaged, match=REGION):
        fingerprint_of(opened)
    with pytest.raises(CheckpointDamaged, match=REGION):
        load(directory / NEW)


def test_nothing_damaged_gets_into_a_model(directory: Path) -> None:
    """What one worker reads is complete or comes from the checkpoint before, never from both."""
    harm(directory)
    told: list[str] = []

    def read_all(path: Path) -> tuple[OpenedCheckpoint, dict[str, torch.Tensor]]:
        opened = open_checkpoint(path)
        return opened, {name: opened.read(name, MATRIX if name == "model/matrix" else None) for name in opened.specs}

    found = newest(directory, lambda damage: told.append(str(damage)), read_all)
    assert found is not None
    assert (found[0].step, found[0].path, len(told)) == (1, directory / OLD, 1)
    assert "part-2" in told[0]


@pytest.mark.parametrize("length", [None, 0, 4096, -1])
def test_a_part_that_is_missing_or_too_short_is_passed_over(directory: Path, length: int | None) -> None:
    path = directory / NEW / "part-1.safetensors"
    if length is None:
        path.unlink()
    else:
        os.truncate(path, length if length >= 0 else path.stat().st_size - 1)
    told: list[str] = []
    found = open_newest(directory, lambda damage: told.append(str(damage)))
    assert found is not None
    assert (found.step, len(told)) == (1, 1)
    assert told[0].startswith(f"{path}: ")


def test_a_part_that_shrinks_while_it_is_read_is_damage(directory: Path) -> None:
    opened = open_checkpoint(directory / NEW)
    os.truncate(directory / NEW / "part-1.safetensors", 4096)
    with pytest.raises(CheckpointDamaged, match=r"part-1.safetensors: it became shorter"):
        opened.read("model/matrix")


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert open_newest(tmp_path / "nowhere", unexpected) is None


def test_another_model_is_named_before_anything_is_read(directory: Path, counted: list[int]) -> None:
    opened = open_checkpoint(directory / NEW)
    with pytest.raises(CheckpointMismatch, match="'model/other' is not in the checkpoint"):
        opened.read("model/other")
    with pytest.raises(CheckpointMismatch, match=r"'model/bias' is \[8\] here and float64 \[7\] in the checkpoint"):
        opened.read("model/bias", Box.whole((8,)))
    expected = {name: (x.dtype, tuple(x.shape)) for name, x in tensors().items()}
    compare(expected, opened.specs)
    with pytest.raises(CheckpointMismatch, match=r"'model/bias' \(float64 \[7\]\), which this model does not have"):
        compare({name: spec for name, spec in expected.items() if name != "model/bias"}, opened.specs)
    assert counted == []


def test_verifying_names_every_damaged_file_and_what_it_held(directory: Path) -> None:
    assert list(damages(directory / NEW)) == []
    harm(directory)
    (directory / NEW / "part-3.safetensors").unlink()
    found = list(damages(directory / NEW))
    assert len(found) == 2
    assert "part-2.safetensors: the bytes of tensor 'model/matrix' [4:6, 0:6] of [8, 6] are not" in found[0]
    assert "part-3.safetensors: No such file or directory (it held " in found[1]
    assert "'model/matrix'" in found[1]
    flip(directory / NEW / "manifest.json", 100)
    assert [words.partition(": ")[2] for words in damages(directory / NEW)] == [
        "its checksum does not match its content"
    ]
