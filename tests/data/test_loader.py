"""Loaders: equal batches in every mode, only this worker's samples, no leaks."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from tests.support.processes import context
from unisono.data import Inline, Loader, MicroBatchPlan, Processes, Threads, assign
from unisono.errors import InvalidInput

PLAN = MicroBatchPlan(50, 12, 3, seed=5)
STEPS = 6


class Squares:
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.tensor([index, index**2]), index


class Augmented(Squares):
    """Draws from all three generators."""

    def __getitem__(self, index):
        return torch.rand(2) + index, random.random() + np.random.rand()


class Bulk(Squares):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Slow(Squares):
    def __getitem__(self, index):
        torch.ones(300, 300) @ torch.ones(300, 300)
        return super().__getitem__(index)


class Recording(Squares):
    def __init__(self):
        self.touched = []

    def __getitem__(self, index):
        self.touched.append(index)
        return super().__getitem__(index)


class Broken(Squares):
    def __getitem__(self, index):
        if index == 17:
            raise KeyError("no such file")
        return super().__getitem__(index)


class Unportable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class BrokenBulk(Squares):
    def __getitems__(self, indices):
        raise Unportable("half", "written")


def load(dataset, way, workers=1, rank=0, **more):
    loader = Loader(
        dataset,
        PLAN,
        lambda step: assign(PLAN.micro_batches, [1.0] * workers)[rank],
        load=way,
        seed=9,
        steps=range(STEPS),
        **more,
    )
    try:
        return {(step, m): batch for step in range(STEPS) for m, batch in loader.batches(step)}
    finally:
        loader.close()


def equal(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert type(one[key]) is type(other[key])
        for a, b in zip(one[key], other[key], strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), key


WAYS = [Inline(), Threads(), Threads(ahead=5), Processes(), Processes(count=2, ahead=1), None]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dataset", [Squares(), Bulk(), Slow()], ids=lambda each: type(each).__name__)
def test_every_way_gives_what_the_plan_says(dataset, way):
    batches = load(dataset, way)
    assert list(batches) == [(step, m) for step in range(STEPS) for m in range(4)]
    for (step, m), (pairs, numbers) in batches.items():
        assert numbers.tolist() == PLAN.indices(step, m).tolist()
        assert pairs.tolist() == [[i, i * i] for i in numbers.tolist()]


@pytest.mark.parametrize("way", [Inline(), Processes(count=2), None], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_what_a_dataset_draws_depends_on_neither_way_nor_workers(way, workers):
    together = {}
    for rank in range(workers):
        together |= load(Augmented(), way, workers, rank)
    equal(dict(sorted(together.items())), load(Augmented(), Inline()))


@pytest.mark.parametrize("way", [Inline(), Processes(), Threads(), None], ids=str)
def test_loading_leaves_the_generators_of_the_training_alone(way):
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    load(Squares() if isinstance(way, Threads) else Augmented(), way)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


class Items:
    """A tensor dataset under another name, so that it is not indexed in bulk."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, index):
        return self.dataset[index]


TENSORS = TensorDataset(torch.rand(50, 2, 3), torch.arange(50), torch.rand(50).bfloat16())


@pytest.mark.parametrize("way", [Inline(), Threads(), Processes(), None], ids=str)
@pytest.mark.parametrize(
    "dataset",
    [
        TENSORS,
        Subset(TENSORS, list(range(49, -1, -1))),
        Subset(Subset(TENSORS, list(range(50))[::-1]), range(50)),
    ],
    ids=["tensors", "subset", "subset of subset"],
)
def test_bulk_indexing_gives_the_identical_batch(dataset, way):
    equal(load(dataset, way), load(Items(dataset), Inline()))


def test_a_collate_of_ones_own_is_used_also_for_tensors():
    batches = load(TENSORS, Threads(), collate=lambda samples: [len(samples)])
    assert set(map(tuple, batches.values())) == {(3,)}


@pytest.mark.parametrize("way", [Inline(), Threads(), None], ids=str)
def test_only_ones_own_samples_are_touched_and_each_once_per_epoch(way):
    touched = []
    for rank in range(3):
        dataset = Recording()
        load(dataset, way, 3, rank)
        mine = assign(4, [1.0] * 3)[rank]
        due = [i for step in range(STEPS) for m in mine for i in PLAN.indices(step, m).tolist()]
        assert dataset.touched == due
        touched += due
    assert len(touched) == 72
    assert all(touched.count(index) in (1, 2) for index in range(50))  # 1.44 epochs


@pytest.mark.parametrize("way", [Inline(), Threads(), Processes(count=2)], ids=str)
@pytest.mark.parametrize("asked", [[3, 4, 5], [2, 2, 3], [5, 2, 4]])
def test_steps_may_be_left_out_and_asked_for_again(way, asked):
    loader = Loader(Squares(), PLAN, lambda step: range(1, 3), load=way, steps=range(2, 6))
    try:
        for step in asked:
            for m, (_, numbers) in loader.batches(step):
                assert numbers.tolist() == PLAN.indices(step, m).tolist()
    finally:
        loader.close()


@pytest.mark.parametrize("way", [Inline(), Threads(), Processes(), None], ids=str)
def test_an_exception_of_the_dataset_names_sample_and_micro_batch(way):
    step, m = next((s, m) for s in range(STEPS) for m in range(4) if 17 in PLAN.indices(s, m))
    with pytest.raises(KeyError, match="no such file") as error:
        load(Broken(), way)
    notes = "\n".join(error.value.__notes__)
    assert "sample 17" in notes
    assert f"step {step}, micro-batch {m}" in notes


def test_an_exception_that_cannot_travel_is_told():
    with pytest.raises(RuntimeError, match="Unportable: half written") as error:
        load(BrokenBulk(), Processes())
    assert "step 0, micro-batch 0" in "\n".join(error.value.__notes__)


def test_threads_refuse_a_dataset_that_draws():
    with pytest.raises(InvalidInput) as error:
        load(Augmented(), Threads())
    assert error.value.field == "load"
    assert "Processes()" in str(error.value)


@pytest.mark.parametrize(("dataset", "chosen"), [(TENSORS, Inline()), (Slow(), Threads()), (Augmented(), Inline())])
def test_the_choice_is_by_what_the_first_micro_batch_showed(dataset, chosen, caplog):
    with caplog.at_level(logging.WARNING):
        loader = Loader(dataset, PLAN, lambda step: range(4), steps=range(1))
    loader.close()
    assert loader.load == chosen
    assert ("Processes()" in caplog.text) == isinstance(dataset, Augmented)


def test_nothing_to_load_is_no_error():
    for way in WAYS:
        loader = Loader(Squares(), PLAN, lambda step: range(0), load=way, steps=range(3))
        assert list(loader.batches(0)) == []
        loader.close()


@pytest.mark.parametrize("way", [Threads(), Processes(count=2)], ids=str)
def test_close_leaves_no_thread_and_no_process(way):
    me = psutil.Process()
    threads, children = threading.active_count(), set(me.children())
    loader = Loader(Squares(), PLAN, lambda step: range(4), load=way, steps=range(STEPS))
    next(loader.batches(0))
    assert isinstance(way, Threads) or len(set(me.children()) - children) == 2
    loader.close()
    loader.close()
    assert set(me.children()) == children
    assert threading.active_count() <= threads


def hold(connection):
    loader = Loader(Squares(), PLAN, lambda step: range(4), load=Processes(count=2), steps=range(STEPS))
    next(loader.batches(0))
    connection.send([child.pid for child in psutil.Process().children()])
    connection.recv()


def test_loading_processes_die_with_a_killed_worker():
    here, there = context().Pipe()
    worker = context().Process(target=hold, args=(there,))
    worker.start()
    assert here.poll(60)
    pids = here.recv()
    assert len(pids) == 2
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(30)
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, pids))


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
