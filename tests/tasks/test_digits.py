"""The digits task: its data, its errors, and that it learns."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest
import torch

from unisono.errors import InvalidInput
from unisono.tasks.builtin.digits import HELD_OUT, digits, images, network
from unisono.tasks.task import build_dataset, call_model


def test_every_image_is_in_exactly_one_part_and_the_split_is_always_the_same() -> None:
    training, held_out = images(held_out=False), images(held_out=True)
    again = images(held_out=True)
    assert len(training) + len(held_out) == 1797
    assert len(held_out) == round(1797 * HELD_OUT)
    assert all(torch.equal(a, b) for a, b in zip(held_out.tensors, again.tensors))
    assert set(held_out.tensors[1].tolist()) == set(range(10))
    rows = {tuple(x.flatten().tolist()) for x in training.tensors[0]}
    assert not any(tuple(x.flatten().tolist()) in rows for x in held_out.tensors[0])


def test_pixels_and_labels_are_what_the_network_takes() -> None:
    x, y = images(held_out=True)[:5]
    assert x.shape == (5, 1, 8, 8)
    assert x.dtype == torch.float32
    assert 0 <= x.min() < x.max() <= 1
    assert y.dtype == torch.int64
    assert network(8)(x).shape == (5, 10)


def test_four_workers_find_a_micro_batch_each() -> None:
    defaults = digits().defaults
    assert defaults["global_batch"] % defaults["micro_batch"] == 0
    assert defaults["global_batch"] // defaults["micro_batch"] >= 4


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [0, 1])
def test_a_third_of_its_steps_reaches_97_percent(seed: int) -> None:
    task, steps = digits(), 80
    batch, micro = task.defaults["global_batch"], task.defaults["micro_batch"]
    torch.manual_seed(seed)
    model, data = task.model(), build_dataset(task.data)
    optimizer = task.optimizer(model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    order = torch.cat([torch.randperm(len(data)) for _ in range(-(-steps * batch // len(data)))])
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * task.schedule(step, steps)
        optimizer.zero_grad()
        for chosen in order[step * batch : (step + 1) * batch].split(micro):
            sample = data[chosen]
            (task.loss(call_model(model, task.inputs(sample)), sample) * micro / batch).backward()
        optimizer.step()
    model.eval()
    held_out = build_dataset(task.evaluate.data)[:]
    with torch.no_grad():
        accuracy = task.evaluate.metrics["accuracy"](model(held_out[0]), held_out).mean()
    assert accuracy >= 0.97


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        sys.modules["unisono.tasks.builtin.digits"],
        "find_spec",
        lambda name: None if name == "sklearn" else real(name),
    )
    with pytest.raises(InvalidInput, match=r"pip install 'unisono\[digits\]'"):
        digits()


def test_a_network_without_channels_is_refused() -> None:
    with pytest.raises(InvalidInput, match="--hidden = 0: below 1"):
        digits(hidden=0)
