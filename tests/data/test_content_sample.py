"""Samples of data that two hosts compare: equal for equal data, none where data is random."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from unisono.data import content_sample as content
from unisono.data.content_sample import MOST_ITEMS, decode, encode, indices, sample_of, summarize


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too."""
    monkeypatch.setattr(content, "_SECONDS", 60.0)


def alike(one: Any, other: Any) -> bool:
    """Whether no item that both have is another one."""
    mine, theirs = ({item.index: item for item in sample_of(each)} for each in (one, other))
    assert mine.keys() & theirs.keys(), "there is something to compare"
    return all(mine[index].matches(theirs[index]) for index in mine.keys() & theirs.keys())


def tensors(seed: int = 0, count: int = 100) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 3, 8, generator=random), torch.randint(0, 10, (count,), generator=random))


def changed(dataset: TensorDataset, change: Any) -> TensorDataset:
    return TensorDataset(change(dataset.tensors[0].clone()), dataset.tensors[1])


def test_the_same_data_looks_the_same() -> None:
    assert alike(tensors(), tensors())
    assert [item.index for item in sample_of(tensors())] == indices(100)
    assert alike(tensors(), list(tensors()))
    assert sample_of(Subset(tensors(), range(50))) == sample_of(list(tensors())[:50])


@pytest.mark.parametrize("value", [1.0 + 1e-5, 1.0 - 1e-5])
def test_rounding_is_no_difference(value: float) -> None:
    """Other processors and libraries compute the last digits otherwise."""
    assert alike(tensors(), changed(tensors(), lambda x: x * value))
    assert alike(tensors(), changed(tensors(), lambda x: x.double() + 1e-6))
    assert alike(tensors(), changed(tensors(), lambda x: x.to(torch.bfloat16)))


def test_pixels_may_be_decoded_otherwise() -> None:
    pixels = torch.randint(1, 255, (50, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    noise = torch.randint(-1, 2, pixels.shape, generator=torch.Generator().manual_seed(1))
    assert alike(TensorDataset(pixels), TensorDataset((pixels.int() + noise).to(torch.uint8)))
    assert not alike(TensorDataset(pixels), TensorDataset(pixels.flip(0)))


@pytest.mark.parametrize(
    "other",
    [
        tensors(1),
        changed(tensors(), lambda x: -x),
        changed(tensors(), lambda x: x * 1.1),
        changed(tensors(), lambda x: x + 0.5),
        changed(tensors(), lambda x: x.flip(0)),
        changed(tensors(), lambda x: x.flip(1)),
        changed(tensors(), lambda x: x.view(-1, 8, 3)),
        TensorDataset(tensors().tensors[0], tensors().tensors[1] + 1),
        TensorDataset(tensors().tensors[0]),
        [{"x": x, "y": y} for x, y in zip(*tensors().tensors)],
    ],
)
def test_other_data_looks_otherwise(other: Any) -> None:
    assert not alike(tensors(), other)


def test_items_of_any_kind_are_looked_at() -> None:
    class Thing:
        pass

    kinds = [1, 10**30, True, None, "a", b"a", 1.5, [1, 2], {"a": 1}, np.arange(3), np.float32(2), torch.ones(2) > 0,
             torch.ones(2).to_sparse(), Thing(), float("nan"), [float("inf"), 1.0], torch.zeros(0)]  # fmt: skip
    looked = [summarize(i, kind) for i, kind in enumerate(kinds)]
    assert all(one.matches(again) for one, again in zip(looked, [summarize(i, kind) for i, kind in enumerate(kinds)]))
    assert len({item.exact for item in looked}) >= len(kinds) - 2  # not-a-number and 1.5 are one number each
    assert decode(encode(looked)) == looked


class Random:
    """Draws in one of several ways."""

    def __init__(self, way: str) -> None:
        self.way, self.own = way, np.random.default_rng()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        match self.way:
            case "torch":
                return torch.rand(3)
            case "python":
                return index + random.random()
            case "numpy":
                return index + np.random.rand(2)
            case "its own":
                return index + self.own.random()
            case "sometimes":  # augmented, with a result that seldom differs
                return index if torch.rand(1) < 0.99 else -index
        return os.urandom(4)


@pytest.mark.parametrize("way", ["torch", "python", "numpy", "its own", "sometimes", "the system's"])
def test_random_items_are_left_out(way: str) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert sample_of(Random(way)) == []
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])


class Bad(Random):
    def __getitem__(self, index: int) -> Any:
        match self.way:
            case "raises" if index % 2:
                raise OSError("no such file")
            case "ends" if index:
                os._exit(3)
            case "hangs" if index:
                time.sleep(1000)
            case "reads":
                self.way = "has been read"
            case "has no length":
                raise AssertionError
        return index

    def __len__(self) -> int:
        if self.way == "has no length":
            raise TypeError
        return 20


@pytest.mark.parametrize("way", ["raises", "ends", "hangs", "has no length"])
def test_a_dataset_that_cannot_be_read_is_left_to_the_training(way: str, monkeypatch) -> None:
    if way == "hangs":
        monkeypatch.setattr(content, "_SECONDS", 0.5)
    assert sample_of(Bad(way)) == []


def test_the_dataset_of_the_training_is_not_touched() -> None:
    """Or loading processes would share the files that it opens."""
    dataset = Bad("reads")
    assert len(sample_of(dataset)) == MOST_ITEMS
    assert dataset.way == "reads"


class Loud(Random):
    """Says what it does, and starts a process for each item."""

    def __init__(self, pids: int) -> None:
        self.pids = pids

    def __getitem__(self, index: int) -> Any:
        print("prints")
        logging.getLogger("theirs").error("logs")
        helper = subprocess.Popen(["sleep", "1000"])
        os.write(self.pids, f"{helper.pid} ".encode())
        return index


def test_nothing_is_said_twice_and_no_process_stays(capfd, caplog) -> None:
    there, here = os.pipe()
    print("said before, and not written yet")
    assert len(sample_of(Loud(here))) == MOST_ITEMS
    os.close(here)
    with open(there) as pipe:
        pids = list(map(int, pipe.read().split()))
    assert len(pids) == 2 * MOST_ITEMS
    while any(alive(pid) for pid in pids):  # SIGKILL is on its way
        time.sleep(0.01)
    assert not multiprocessing.active_children()
    assert "".join(capfd.readouterr()) == "said before, and not written yet\n"
    assert not caplog.records


def alive(pid: int) -> bool:
    """Whether that process runs; one that has ended may still be waiting for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("length", [0, 1, 2, 3, 11, 12, 13, 23, 24, 25, 1000, 10**9])
def test_indices_are_the_same_everywhere_and_spread(length: int) -> None:
    found = indices(length)
    assert len(found) == len(set(found)) == min(length, MOST_ITEMS)
    assert all(0 <= index < length for index in found)
    if length >= MOST_ITEMS:
        assert max(b - a for a, b in zip(found, [*found[1:], length])) <= -(-length // MOST_ITEMS)


def test_time_ends_in_any_thread_too(monkeypatch) -> None:
    """Whose signals may be blocked."""
    monkeypatch.setattr(content, "_SECONDS", 0.5)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGALRM]).result()
        assert pool.submit(sample_of, Bad("hangs")).result() == []
