"""Conversion to plain safetensors and back; the safetensors library checks the files."""

from __future__ import annotations

import json
import resource
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from tests.checkpoint.sharded_states import LAYOUTS, save_parts, tensors
from tests.checkpoint.states import every_kind, save
from tests.support.checkpoints import flip, load
from tests.support.processes import run
from unisono.checkpoint import fingerprint, open_checkpoint, open_plain, save_plain, store
from unisono.errors import CheckpointDamaged, CheckpointError

STEP = "step-00000003"
MEGABYTE = 1 << 20


def contents(file: Path) -> dict[str, torch.Tensor]:
    """As the library reads it."""
    with safe_open(file, "pt") as found:
        return {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118 (it is no mapping)


@pytest.mark.parametrize("wrote", LAYOUTS)
def test_the_library_reads_what_any_layout_wrote(tmp_path: Path, wrote: str) -> None:
    save_parts(tmp_path, 3, tensors(), LAYOUTS[wrote](tensors()))
    file = tmp_path / "model.safetensors"
    assert save_plain(open_checkpoint(tmp_path / STEP), file) == [file]
    assert fingerprint(contents(file)) == fingerprint(tensors())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_every_kind_of_tensor_there_and_back(tmp_path: Path) -> None:
    save(tmp_path / "one", 3, every_kind(), size=2)
    save_plain(open_checkpoint(tmp_path / "one" / STEP), tmp_path / "x.safetensors", metadata={"a": "б"})
    plain = open_plain(tmp_path / "x.safetensors")
    assert plain.metadata == {"format": "pt", "a": "б"}
    path = store(plain, tmp_path / "two", 7, {"lr": 0.1})
    assert path == tmp_path / "two" / "step-00000007"
    loaded = load(path)
    assert (loaded.step, loaded.meta) == (7, {"lr": 0.1})
    assert fingerprint(loaded.tensors) == fingerprint(every_kind())
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["LATEST", "step-00000007"]


def test_what_the_library_wrote_becomes_a_checkpoint(tmp_path: Path) -> None:
    safetensors.torch.save_file(tensors(), tmp_path / "model.safetensors")
    path = store(open_plain(tmp_path), tmp_path / "run", 0, None)
    assert fingerprint(load(path).tensors) == fingerprint(tensors())


@pytest.mark.parametrize("most", [1, 100, 200, 300, 10_000])
def test_several_files_with_an_index(tmp_path: Path, most: int) -> None:
    save_parts(tmp_path, 3, tensors(), LAYOUTS["grid of 2 x 2"](tensors()))
    files = save_plain(open_checkpoint(tmp_path / STEP), tmp_path / "model.safetensors", most)
    shards = files[:-1] if len(files) > 1 else files
    found = [contents(file) for file in shards]
    assert all(sum(x.nbytes for x in held.values()) <= most or len(held) == 1 for held in found)
    assert fingerprint({name: x for held in found for name, x in held.items()}) == fingerprint(tensors())
    assert fingerprint(load(store(open_plain(tmp_path), tmp_path / "back", 0, None)).tensors) == fingerprint(tensors())
    if len(files) == 1:
        assert files == [tmp_path / "model.safetensors"]
        return
    assert [f.name for f in shards] == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    index = json.loads(files[-1].read_text())
    assert files[-1].name == "model.safetensors.index.json"
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors().values())
    assert index["weight_map"] == {name: file.name for file, held in zip(shards, found) for name in held}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    save(tmp_path, 3, tensors())
    opened = open_checkpoint(tmp_path / STEP)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        save_plain(opened, tmp_path / "model.safetensors", 480)
    assert sorted(p.name for p in tmp_path.glob("model*")) == ["model-00002-of-00002.safetensors"]


@pytest.mark.parametrize("most", [None, 100])
def test_a_damaged_checkpoint_leaves_no_file(tmp_path: Path, most: int | None) -> None:
    save_parts(tmp_path, 3, tensors(), LAYOUTS["rows over 4"](tensors()))
    opened = open_checkpoint(tmp_path / STEP)
    flip(opened.stored["optimizer/matrix/exp_avg"][1].file, opened.stored["optimizer/matrix/exp_avg"][1].begin)
    for convert in (
        lambda: save_plain(opened, tmp_path / "model.safetensors", most),
        lambda: store(opened, tmp_path / "other", 3, None),
    ):
        with pytest.raises(CheckpointDamaged, match=r"'optimizer/matrix/exp_avg' \[2:4, 0:6\] of \[8, 6\]"):
            convert()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "other", STEP]
    assert list((tmp_path / "other").iterdir()) == []


# --- memory


def _convert(rank: int, size: int, directory: str) -> list[float]:
    """How much the most memory ever used grows, in MB, by each of the conversions."""
    peak, path = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, Path(directory)
    small = path / "small"
    save_plain(open_checkpoint(small / STEP), small / "model.safetensors")  # whatever is loaded once
    peaks = [peak()]
    opened = open_checkpoint(path / STEP)
    save_plain(opened, path / "model.safetensors")
    peaks.append(peak())
    store(open_plain(path), path / "back", 0, None)
    peaks.append(peak())
    return [after - before for before, after in zip(peaks, peaks[1:])]  # noqa: RUF007 (two at a time)


@pytest.mark.long
def test_converting_takes_a_few_megabytes_whatever_the_model(tmp_path: Path) -> None:
    """By columns, so that no row of the tensor lies in one run."""
    large = {"model/x": torch.arange(40 * MEGABYTE, dtype=torch.float32).view(5120, 8192)}  # 160 MB
    save_parts(tmp_path, 3, large, LAYOUTS["columns over 2"](large))
    save(tmp_path / "small", 3, tensors())
    grown = run(1, _convert, str(tmp_path))[0]
    assert max(grown) < 40
    with safe_open(tmp_path / "model.safetensors", "pt") as found:
        assert torch.equal(found.get_tensor("model/x"), large["model/x"])
    assert torch.equal(load(tmp_path / "back" / "step-00000000").tensors["model/x"], large["model/x"])


# --- files of others


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "empty": b"",
    "a header longer than the file": struct.pack("<Q", 100) + b"{}",
    "an absurd header": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"oops",
    "no object": struct.pack("<Q", 4) + b"[1]  "[:4],
    "nested too deeply": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "no UTF-8": struct.pack("<Q", 9) + b'{"\xff": 1}',
    "a tensor as text": header(x="y"),
    "another dtype": header(x=entry("F4")) + bytes(8),
    "a dtype as a list": header(x=entry(["F32"])) + bytes(8),
    "negative shape": header(x=entry(shape=[-2])) + bytes(8),
    "fraction": header(x=entry(shape=[2.0])) + bytes(8),
    "more bytes than numbers": header(x=entry(offsets=[0, 12])) + bytes(12),
    "one offset": header(x=entry(offsets=[0])) + bytes(8),
    "beyond the end": header(x=entry()) + bytes(4),
    "something behind": header(x=entry()) + bytes(9),
    "a gap": header(x=entry(), y=entry(offsets=[12, 20])) + bytes(20),
    "one over the other": header(x=entry(), y=entry(offsets=[4, 12])) + bytes(12),
    "metadata as text": header(x=entry(), __metadata__="a") + bytes(8),
    "overflowing shape": header(x=entry(shape=[2**40, 2**40], offsets=[0, 8])) + bytes(8),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_safetensors_file_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model.safetensors: \w"):
        open_plain(file)


def _index(**places: Any) -> str:
    return json.dumps({"weight_map": places})


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("", "index.json: "),
        ("[" * 100_000, "index.json: "),
        ("{}", "no weight_map"),
        (_index(x=3), "no weight_map"),
        (_index(x="../a.safetensors"), "a file in another directory"),
        (_index(x="b.safetensors"), "b.safetensors: No such file"),
        (_index(y="a.safetensors"), "a.safetensors: it has no tensor 'y'"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, index: str, words: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(header(x=entry()) + bytes(8))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointDamaged, match=words):
        open_plain(tmp_path)


@pytest.mark.parametrize("do", [lambda file: file.write_bytes(b""), Path.unlink])
def test_a_file_that_goes_while_it_is_read_is_named(tmp_path: Path, do: Callable[[Path], object]) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(header(x=entry()) + bytes(8))
    plain = open_plain(file)
    do(file)
    with pytest.raises(CheckpointDamaged, match=r"model.safetensors: "):
        store(plain, tmp_path / "run", 0, None)
