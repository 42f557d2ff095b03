"""What is written is read back bit for bit, from any number of workers."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.checkpoint.states import every_kind, numbered, save, unexpected
from tests.support.checkpoints import load, load_newest
from tests.support.processes import run
from unisono.checkpoint import Event, Writer, WriteStatus, checkpoints, compare, fingerprint
from unisono.checkpoint.fingerprint import raw_bytes
from unisono.errors import CheckpointMismatch

META = {"config": {"lr": 1e-3, "betas": [0.9, 0.999]}, "nothing": None, "text": "ё", "infinite": float("inf")}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_kind_of_tensor_returns_bit_for_bit(tmp_path: Path, size: int) -> None:
    tensors = every_kind()
    events = save(tmp_path, 100, tensors, size=size, meta=META)
    assert [(e.kind, e.step) for e in events] == [("committed", 100)]
    found = load_newest(tmp_path, unexpected)
    assert found is not None
    assert (found.step, found.meta, found.path) == (100, META, tmp_path / "step-00000100")
    compare({name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}, found.tensors)
    assert fingerprint(found.tensors) == fingerprint(tensors)


@pytest.mark.parametrize("tensors", [every_kind(), numbered(5, 1_000_000), {}], ids=["every kind", "large", "nothing"])
def test_what_stays_as_it_is_is_written_as_its_copy_is(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    writer = Writer(tmp_path, 0, 1, 2, unexpected_event)
    for step, write in ((1, writer.stage), (2, writer.write)):
        write(step, tensors, META)
        writer.finish()
        writer.commit(step)
        writer.finish()
    writer.close()
    copied, still = (tmp_path / f"step-0000000{step}" / "part-0.safetensors" for step in (1, 2))
    assert still.read_bytes() == copied.read_bytes()
    assert fingerprint(load(tmp_path / "step-00000002").tensors) == fingerprint(tensors)


def unexpected_event(event: Event) -> None:
    assert event.kind == "committed", event.words


def _write(rank: int, size: int, directory: str) -> str:
    tensors = numbered(5, 100_000)
    writer = Writer(directory, rank, size, 2, lambda event: None)
    writer.stage(5, tensors)
    writer.finish()
    writer.close()
    return writer.state.phase


def test_processes_write_together(tmp_path: Path) -> None:
    first = Writer(tmp_path, 0, 3, 2, lambda event: None)
    first.stage(5, numbered(5, 100_000))
    first.finish()
    assert run(2, _write_rest, str(tmp_path)) == [WriteStatus.WRITTEN, WriteStatus.WRITTEN]
    first.commit(5)
    first.finish()
    first.close()
    assert fingerprint(load(tmp_path / "step-00000005").tensors) == fingerprint(numbered(5, 100_000))


def _write_rest(rank: int, size: int, directory: str) -> str:
    return _write(rank + 1, size + 1, directory)


def test_the_safetensors_library_reads_the_parts(tmp_path: Path) -> None:
    tensors = every_kind()
    save(tmp_path, 1, tensors, size=2)
    names = set()
    for rank in range(2):
        with safe_open(tmp_path / "step-00000001" / f"part-{rank}.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                names.add(name)
                assert bytes(raw_bytes(file.get_tensor(name))) == bytes(raw_bytes(tensors[name])), name
    assert names == set(tensors)


def test_nothing_at_all_can_be_written(tmp_path: Path) -> None:
    save(tmp_path, 0, {}, size=2)
    assert load(tmp_path / "step-00000000").tensors == {}


def test_everything_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        save(tmp_path / "new", 1, numbered(1), size=2)
    finally:
        os.umask(old)
    modes = {p.relative_to(tmp_path): stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "new").rglob("*")}
    assert {m for p, m in modes.items() if (tmp_path / p).is_dir()} == {0o700}
    assert {m for p, m in modes.items() if (tmp_path / p).is_file()} == {0o600}
    assert {p.name for p in modes} == {
        "LATEST",
        "step-00000001",
        "manifest.json",
        "part-0.safetensors",
        "part-1.safetensors",
    }


def test_training_may_change_tensors_once_they_are_staged(tmp_path: Path) -> None:
    tensors = numbered(1, 300_000)
    before = fingerprint(tensors)
    writer = Writer(tmp_path, 0, 1, 2, lambda event: None)
    for step in (1, 2):  # the second time into memory that has been used
        writer.stage(step, tensors)
        writer.staged()
        for tensor in tensors.values():
            tensor.mul_(-1)
        writer.finish()
        writer.commit(step)
        writer.finish()
    writer.close()
    assert fingerprint(load(tmp_path / "step-00000001").tensors) == before
    assert fingerprint(load(tmp_path / "step-00000002").tensors) == fingerprint(
        {name: -x for name, x in tensors.items()}
    )


def test_another_set_of_tensors_takes_other_memory(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0, 1, 9, lambda event: None)
    writer.prepare(numbered(1))
    for step, tensors in enumerate([numbered(1), every_kind(), numbered(2, 5)]):
        writer.stage(step, tensors)
        writer.finish()
        writer.commit(step)
        writer.finish()
        assert fingerprint(load(tmp_path / f"step-{step:08d}").tensors) == fingerprint(tensors)
    writer.close()


def test_meta_is_taken_over_at_once(tmp_path: Path) -> None:
    meta = {"losses": [1.0]}
    writer = Writer(tmp_path, 0, 1, 2, lambda event: None)
    writer.stage(1, numbered(1), meta)
    meta["losses"].append(2.0)
    writer.finish()
    writer.commit(1)
    writer.finish()
    writer.close()
    assert load(tmp_path / "step-00000001").meta == {"losses": [1.0]}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, numbered(step), keep=2)
    assert [step for step, _ in checkpoints(tmp_path)] == [30, 40]
    # A run that went back to step 30 counts its own: those after it are the first to go.
    save(tmp_path, 35, numbered(35), keep=2)
    assert [step for step, _ in checkpoints(tmp_path)] == [30, 35]
    found = load_newest(tmp_path, unexpected)
    assert found is not None
    assert found.step == 35
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step-00000030", "step-00000035"]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 7, numbered(1))
    save(tmp_path, 7, numbered(2), size=2)
    assert fingerprint(load(tmp_path / "step-00000007").tensors) == fingerprint(numbered(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step-00000007"]


def test_a_replacement_that_stopped_half_way_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 7, numbered(1))
    (tmp_path / "step-00000007").rename(tmp_path / ".step-00000007.replaced")
    found = load_newest(tmp_path, unexpected)
    assert found is not None
    assert fingerprint(found.tensors) == fingerprint(numbered(1))
    Writer(tmp_path, 0, 1, 2, lambda event: None).close()  # the next life puts it back
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step-00000007"]


def test_worker_0_sweeps_up_what_earlier_lives_left(tmp_path: Path) -> None:
    save(tmp_path, 7, numbered(1))
    leftovers = [".step-00000008.1.tmp", ".step-00000007.replaced", ".step-00000003.removed.tmp"]
    for name in [*leftovers, "mine", ".mine.tmp"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-0.safetensors").write_bytes(b"x")
    Writer(tmp_path, 1, 2, 2, lambda event: None).close()
    assert all((tmp_path / name).exists() for name in leftovers)
    Writer(tmp_path, 0, 2, 2, lambda event: None).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine.tmp", "LATEST", "mine", "step-00000007"]


def test_what_was_abandoned_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    events: list[Event] = []
    writer = Writer(tmp_path, 0, 1, 2, events.append)
    writer.stage(3, numbered(3))
    writer.finish()
    writer.abandon(3)
    writer.finish()
    assert list(tmp_path.iterdir()) == []
    writer.stage(3, numbered(3))
    writer.finish()
    writer.commit(3)
    writer.finish()
    writer.close()
    assert [event.kind for event in events] == ["committed"]


def test_progress_tells_each_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gates = {"copy": threading.Event(), "write": threading.Event()}
    reached = {"copy": threading.Event(), "write": threading.Event()}

    def gated(name: str, function: object) -> object:
        def wait(*args: object, **kwargs: object) -> object:
            reached[name].set()
            assert gates[name].wait(30)
            return function(*args, **kwargs)  # type: ignore[operator]

        return wait

    monkeypatch.setattr(np, "copyto", gated("copy", np.copyto))
    monkeypatch.setattr(os, "posix_fallocate", gated("write", os.posix_fallocate))
    writer = Writer(tmp_path, 0, 1, 2, lambda event: None)
    assert (writer.state.phase, writer.state.written, writer.busy) == (WriteStatus.IDLE, -1, False)
    writer.staged()
    writer.stage(4, {"x": torch.zeros(5)})
    assert reached["copy"].wait(30)
    assert (writer.state.step, writer.state.phase, writer.busy) == (4, WriteStatus.STAGING, True)
    gates["copy"].set()
    writer.staged()
    assert reached["write"].wait(30)
    assert (writer.state.phase, writer.state.written, writer.busy) == (WriteStatus.WRITING, -1, True)
    gates["write"].set()
    writer.finish()
    assert (writer.state.phase, writer.state.written, writer.busy) == (WriteStatus.WRITTEN, 4, False)
    writer.close()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"a": torch.zeros(2)}, "'b' (int64 []) is not in the checkpoint"),
        ({"a": torch.zeros(2), "b": torch.tensor(1), "c": torch.zeros(1)}, "has a tensor 'c' (float32 [1])"),
        ({"a": torch.zeros(3), "b": torch.tensor(1)}, "'a' is float32 [2] here and float32 [3] in"),
        ({"a": torch.zeros(2).half(), "z": torch.tensor(1)}, "'a' is float32 [2] here and float16"),
    ],
)
def test_another_model_is_named_by_its_first_difference(found: dict[str, torch.Tensor], words: str) -> None:
    expected = {"b": (torch.int64, ()), "a": (torch.float32, (2,))}
    with pytest.raises(CheckpointMismatch) as caught:
        compare(expected, found)
    assert words in str(caught.value)
    compare(expected, {"a": torch.ones(2), "b": torch.tensor(9)})
