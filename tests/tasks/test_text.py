"""The text task: which bytes are read, how they are split into windows, and messages for unreadable text."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from unisono.errors import InvalidInput
from unisono.tasks.builtin.gpt import GPT
from unisono.tasks.builtin.text import (
    EVALUATED_WINDOWS,
    HELD_OUT,
    Corpus,
    Windows,
    collate,
    held_out_windows,
    standard_library,
    text,
    text_files,
    training_windows,
)
from unisono.tasks.task import build_dataset


def corpus(tmp_path: Path, size: int) -> Corpus:
    file = tmp_path / "bytes"
    file.write_bytes(bytes(i % 251 for i in range(size)))
    return Corpus([file])


@pytest.mark.parametrize(("size", "context"), [(1000, 8), (1000, 7), (12_345, 16), (200_000, 32)])
def test_training_and_held_out_windows_share_no_byte(tmp_path: Path, size: int, context: int) -> None:
    whole = corpus(tmp_path, size)
    training, held_out = training_windows(whole, context), held_out_windows(whole, context)
    assert whole.cut == size - round(size * HELD_OUT)
    assert len(training) == (whole.cut - 1) // context
    assert 1 <= len(held_out) <= EVALUATED_WINDOWS
    assert torch.equal(training[0], whole.bytes[: context + 1])
    last = len(training) - 1
    assert torch.equal(training[last], whole.bytes[last * context :][: context + 1])
    assert torch.equal(held_out[0], whole.bytes[whole.cut :][: context + 1])


def test_windows_are_views_of_one_tensor() -> None:
    content = torch.arange(100, dtype=torch.uint8)
    windows = Windows(content, 9, 9)
    assert windows[3].data_ptr() == content.data_ptr() + 27
    assert windows[3].tolist() == list(range(27, 37))


def test_one_by_one_and_in_bulk_are_the_same_batch() -> None:
    windows = Windows(torch.arange(200, dtype=torch.uint8), 9, 9)
    x, y = collate(windows.__getitems__([4, 0, 4]))
    assert all(torch.equal(a, b) for a, b in zip((x, y), collate([windows[i] for i in (4, 0, 4)])))
    assert x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    (loaded,) = DataLoader(windows, batch_sampler=[[4, 0, 4]], collate_fn=collate)
    assert torch.equal(loaded[0], x)


def test_bytes_are_read_once_and_not_before_they_are_needed(tmp_path: Path) -> None:
    whole = corpus(tmp_path, 500)
    assert whole.size == 500
    assert "bytes" not in vars(whole)
    assert whole.bytes is whole.bytes


def test_a_directory_gives_its_text_files_in_order(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"b",
        "a/z.txt": b"z",
        "a/y.md": b"y",
        ".hidden": b"h",
        ".git/config": b"g",
        "image": b"\x89PNG\0",
        "__pycache__/a.pyc": b"c",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert [str(p.relative_to(tmp_path)) for p in text_files(str(tmp_path))] == ["a/y.md", "a/z.txt", "b.txt"]


def test_files_keep_the_order_that_they_are_given_in(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"1" * 500)
    (tmp_path / "2").write_bytes(b"2" * 500)
    task = text(text=(str(tmp_path / "2"), str(tmp_path / "1")), model=GPT(context=8, width=8))
    assert bytes(build_dataset(task.data)[0].tolist()) == b"2" * 9


def test_the_default_is_the_standard_library_without_its_tests() -> None:
    files = standard_library()
    assert files == tuple(sorted(files))
    assert {"argparse.py", "ast.py"} <= {f.name for f in files}
    assert not {"test", "site-packages", "__pycache__"} & {part for f in files for part in f.parts}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: "missing.txt", r"cannot be read \(No such file or directory\); check the path"),
        (lambda p: p.mkdir(), "a directory without text files"),
        (lambda p: os.mkfifo(p), "neither a file nor a directory"),
        (
            lambda p: p.write_bytes(b"too short"),
            r"9 bytes are too few for windows of 128 bytes \(2580 are needed\)",
        ),
        (lambda p: p.write_bytes(b""), "0 bytes are too few"),
    ],
)
def test_unreadable_text_is_one_sentence_about_the_option(tmp_path: Path, make: object, says: str) -> None:
    path = tmp_path / "it"
    make(path)  # type: ignore[operator]
    with pytest.raises(InvalidInput, match=says) as raised:
        text(text=(str(path),))
    assert raised.value.field == "--text"
    assert str(path) in str(raised.value)


def test_a_file_that_may_not_be_read_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"x" * 9000)

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InvalidInput, match=r"cannot be read \(Permission denied\); name files that you may read"):
        text(text=(str(file),))


def test_a_file_that_goes_away_before_it_is_read_is_named(tmp_path: Path) -> None:
    whole = corpus(tmp_path, 500)
    whole.files[0].unlink()
    with pytest.raises(InvalidInput, match="No such file"):
        _ = whole.bytes


def test_the_least_text_trains_and_is_measured(tmp_path: Path) -> None:
    shape = GPT(layers=1, width=16, heads=2, context=8)
    file = tmp_path / "it"
    file.write_bytes(b"ab" * math.ceil((shape.context + 1) / HELD_OUT / 2))
    task = text(text=(str(file),), model=shape)
    batch = task.collate(build_dataset(task.evaluate.data).__getitems__([0]))
    assert batch[0].shape == (1, 8)


def test_bits_per_byte_is_the_loss_in_bits_one_value_a_sample() -> None:
    task = text()
    batch = task.collate(build_dataset(task.evaluate.data).__getitems__([0, 1, 2]))
    output = torch.randn(3, 128, 256)
    bits = task.evaluate.metrics["bits_per_byte"](output, batch)
    assert bits.shape == (3,)
    assert bits.mean().item() * math.log(2) == pytest.approx(task.loss(output, batch).item(), rel=1e-5)


def test_the_model_learns_and_travels_to_workers(tmp_path: Path) -> None:
    file = tmp_path / "it"
    file.write_bytes(b"the cat sat on the mat. " * 200)
    made = text(text=(str(file),), model=GPT(layers=1, width=32, heads=2, context=16))
    task = pickle.loads(pickle.dumps(made))  # noqa: S301
    torch.manual_seed(0)
    model, data = task.model(), build_dataset(task.data)
    optimizer = task.optimizer(model.parameters())
    losses = []
    for step in range(40):
        batch = task.collate(data.__getitems__(list(range(step, step + 8))))
        loss = task.loss(model(task.inputs(batch)), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1] < 0.6 * losses[0]
