"""Damaged checkpoints are reported by name and never used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.states import numbered, save, unexpected
from tests.support.checkpoints import flip, load, load_newest
from unisono.checkpoint import fingerprint
from unisono.checkpoint.manifest import seal, unseal
from unisono.errors import CheckpointDamaged

OLD, NEW = "step-00000001", "step-00000002"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    for step in (1, 2):
        save(directory, step, numbered(step), size=2, meta={"lr": 0.1})
    return directory


@pytest.fixture
def directory(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


def positions(length: int, count: int) -> list[int]:
    """Both ends, and `count` places between."""
    return sorted({0, 1, 7, 8, 9, length - 1, length - 2, *range(0, length, max(1, length // count))})


def expect_previous(directory: Path, named: str) -> str:
    """The damage is told once and names `named`; the previous checkpoint is used. Gives the words."""
    told: list[str] = []
    found = load_newest(directory, lambda damage: told.append(str(damage)))
    assert found is not None
    assert (found.step, fingerprint(found.tensors)) == (1, fingerprint(numbered(1)))
    assert len(told) == 1
    assert named in told[0]
    return told[0]


@pytest.mark.parametrize("name", ["manifest.json", "part-0.safetensors", "part-1.safetensors"])
def test_a_flipped_byte_is_found_wherever_it_is(sound: Path, name: str) -> None:
    path = sound / NEW / name
    for position in positions(path.stat().st_size, 150):
        flip(path, position)
        with pytest.raises(CheckpointDamaged, match=f"{NEW}/{name}"):
            load(sound / NEW)
        flip(path, position)
    assert fingerprint(load(sound / NEW).tensors) == fingerprint(numbered(2))


def test_a_flipped_byte_of_a_tensor_names_the_tensor(directory: Path) -> None:
    path = directory / NEW / "part-1.safetensors"
    header = json.loads(path.read_bytes()[8:4096])
    name = sorted(header.keys() - {"__metadata__"})[-1]
    flip(path, 4096 + header[name]["data_offsets"][0])
    assert repr(name) in expect_previous(directory, f"{NEW}/part-1.safetensors")


def test_a_flipped_byte_of_latest_is_found_and_costs_nothing(sound: Path) -> None:
    path = sound / "LATEST"
    for position in range(path.stat().st_size):
        told: list[str] = []
        flip(path, position)
        found = load_newest(sound, lambda damage, told=told: told.append(str(damage)))  # type: ignore[misc]
        flip(path, position)
        assert found is not None
        assert found.step == 2
        assert len(told) == 1
        assert "LATEST" in told[0]


@pytest.mark.parametrize("name", ["manifest.json", "part-0.safetensors", "part-1.safetensors"])
def test_a_truncated_or_longer_file_is_found(directory: Path, name: str) -> None:
    path = directory / NEW / name
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        expect_previous(directory, f"{NEW}/{name}")
    path.write_bytes(whole + b"\0")
    expect_previous(directory, f"{NEW}/{name}")


def _link_to_the_same_bytes(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("do", [Path.unlink, _link_to_the_same_bytes, _pipe, _folder])
@pytest.mark.parametrize("name", ["manifest.json", "part-0.safetensors"])
def test_only_a_regular_file_will_do(directory: Path, name: str, do: Callable[[Path], None]) -> None:
    do(directory / NEW / name)
    expect_previous(directory, f"{NEW}/{name}")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"step-00000002\n",
        b"\xff" * 5000,
        seal({"checkpoint": "../step-00000002"}),
        seal({"checkpoint": "step-00000009"}),
        seal({"checkpoint": ["step-00000002"]}),
        seal({"other": 1}),
    ],
)
def test_a_wrong_latest_is_named_and_the_newest_is_used(directory: Path, content: bytes) -> None:
    (directory / "LATEST").write_bytes(content)
    told: list[str] = []
    found = load_newest(directory, lambda damage: told.append(str(damage)))
    assert found is not None
    assert found.step == 2
    assert len(told) == 1
    assert "LATEST" in told[0]


def test_latest_decides_between_sound_checkpoints(directory: Path) -> None:
    (directory / "LATEST").write_bytes(seal({"checkpoint": OLD}))
    found = load_newest(directory, unexpected)
    assert found is not None
    assert found.step == 1


def test_nothing_there_is_none_and_nothing_sound_is_an_error(directory: Path, tmp_path: Path) -> None:
    assert load_newest(tmp_path / "nowhere", unexpected) is None
    told: list[str] = []
    for name in (OLD, NEW):
        (directory / name / "manifest.json").unlink()
    with pytest.raises(CheckpointDamaged, match="not one of its 2 checkpoints"):
        load_newest(directory, lambda damage: told.append(str(damage)))
    assert [NEW in told[0], OLD in told[1]] == [True, True]


def test_a_checkpoint_under_another_name_is_not_taken_for_it(directory: Path) -> None:
    (directory / NEW).rename(directory / "step-00000003")
    with pytest.raises(CheckpointDamaged, match="manifest of step 2"):
        load(directory / "step-00000003")
    (directory / "step-00000003").rename(directory / "best")
    assert load(directory / "best").step == 2


def _set(*keys: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        inner = fields
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to

    return change


def _rename_part(fields: dict[str, Any]) -> None:
    fields["parts"] = {"part-0.safetensors": fields["parts"]["part-0.safetensors"], "../../secret": {}}


def _drop_tensor(fields: dict[str, Any]) -> None:
    del fields["tensors"]["model/0"]


HOSTILE = {
    "another format": _set("format", to=99),
    "negative step": _set("step", to=-1),
    "true for a number": _set("step", to=True),
    "a part outside": _rename_part,
    "parts as a list": _set("parts", to=[]),
    "no parts": _set("parts", to={}),
    "absurd length of a part": _set("parts", "part-0.safetensors", "bytes", to=2**62),
    "no possible length": _set("parts", "part-0.safetensors", "bytes", to=10**30),
    "absurd shape": _set("tensors", "model/0", "shape", to=[2**40, 2**20]),
    "overflowing shape": _set("tensors", "model/0", "shape", to=[2**40, 2**40]),
    "overflow hidden by a zero": _set("tensors", "model/0", "shape", to=[2**62, 2**62, 0]),
    "huge and empty": _set("tensors", "model/0", "shape", to=[2**40, 0]),
    "negative shape": _set("tensors", "model/0", "shape", to=[-1]),
    "thousand dimensions": _set("tensors", "model/0", "shape", to=[1] * 1000),
    "fraction": _set("tensors", "model/0", "shape", to=[1.5]),
    "unknown dtype": _set("tensors", "model/0", "dtype", to="__class__"),
    "part that is not there": _set("tensors", "model/0", "part", to=7),
    "text for a checksum": _set("tensors", "model/0", "xxh3", to="zz"),
    "tensor as text": _set("tensors", "model/0", to="x"),
    "tensors as text": _set("tensors", to="x"),
    "one tensor less": _drop_tensor,
    "one tensor more": _set("tensors", "x", to={"dtype": "float32", "shape": [1], "xxh3": "0", "part": 0}),
    "surrogate in a name": _set("tensors", "\ud800", to={"dtype": "int8", "shape": [1], "xxh3": "0", "part": 0}),
    "reserved name": _set("tensors", "__metadata__", to={"dtype": "int8", "shape": [0], "xxh3": "0", "part": 0}),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest_with_a_good_seal_is_damage(
    directory: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path = directory / NEW / "manifest.json"
    fields = unseal(path.read_bytes())
    change(fields)
    path.write_bytes(seal(fields))
    expect_previous(directory, NEW)


BODIES = [b"[" * 100_000, b'{"a":' * 100_000, b'{"step":1' + b"0" * 10_000, b'{"\xff":1']


@pytest.mark.parametrize("body", BODIES, ids=["deep list", "deep object", "huge number", "no UTF-8"])
def test_hostile_json_with_a_good_seal_is_damage(directory: Path, body: bytes) -> None:
    path = directory / NEW / "manifest.json"
    path.write_bytes(body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n')
    expect_previous(directory, f"{NEW}/manifest.json")


def test_an_absurd_header_length_takes_no_memory(directory: Path) -> None:
    path = directory / NEW / "part-0.safetensors"
    with open(path, "r+b") as file:
        file.write((2**63).to_bytes(8, "little"))
    expect_previous(directory, "part-0.safetensors: its header")


def test_a_file_of_an_absurd_length_takes_no_memory(directory: Path) -> None:
    """A sparse file that claims a terabyte, with a manifest that agrees."""
    count = 2**38
    path = directory / NEW / "manifest.json"
    fields = unseal(path.read_bytes())
    part, length = directory / NEW / "part-0.safetensors", 4096 + 4 * count
    fields["parts"] = {"part-0.safetensors": {"bytes": length}}
    fields["tensors"] = {"x": {"dtype": "float32", "shape": [count], "xxh3": "0", "part": 0}}
    path.write_bytes(seal(fields))
    os.truncate(part, length)
    expect_previous(directory, "part-0.safetensors")


def test_tensors_are_not_shared_with_the_file(directory: Path) -> None:
    loaded = load(directory / NEW)
    for tensor in loaded.tensors.values():
        tensor.add_(1)
    assert not torch.equal(loaded.tensors["model/0"], load(directory / NEW).tensors["model/0"])
