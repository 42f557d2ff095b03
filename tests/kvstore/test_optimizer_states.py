"""The state of optimizers is saved, and training continues from it to the bit, on any number of workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kvstore.stores import gradients, normal, on_workers, pulled
from unisono.errors import CheckpointError, UnisonoError
from unisono.kvstore import KVStore, create

STEPS = 3
MAKERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "without state": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}
KEYS = ["w", 'of "letters"']


def steps(kv: KVStore, first: int) -> list[np.ndarray]:
    """The values after some steps. All workers push the same at each, so only their number makes a difference."""
    for step in range(first, first + STEPS):
        kv.push(KEYS, [gradients(i, step)[0] / kv.num_workers for i in range(2)])
    return [pulled(kv, key) for key in KEYS]


def begin(kv: KVStore, maker: str, values: list[np.ndarray], file: Path | None = None) -> None:
    kv.init(KEYS, values)
    kv.set_optimizer(MAKERS[maker])
    if file:
        kv.load_optimizer_states(file)


def saving(kv: KVStore, maker: str, file: Path, dump: bool = False) -> list[list[np.ndarray]]:
    begin(kv, maker, [normal(0), normal(1)])
    middle = steps(kv, 0)
    if kv.rank == kv.num_workers - 1:  # any of them
        kv.save_optimizer_states(file, dump_optimizer=dump)
    kv.barrier()
    return [middle, steps(kv, STEPS)]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("later", [1, 2])
@pytest.mark.parametrize("bound", [1, 1000])
def test_training_continues_on_any_number_of_workers(maker, size, later, bound, tmp_path) -> None:
    def loading(kv: KVStore, middle: list[np.ndarray]) -> list[np.ndarray]:
        begin(kv, maker, middle, tmp_path / "states")
        return steps(kv, STEPS)

    first = on_workers("dist_sync", size, saving, maker, tmp_path / "states", bigarray_bound=bound)
    middle, end = first[0]
    for found in on_workers("dist_sync", later, loading, middle, bigarray_bound=3 - bound if bound == 1 else 1):
        np.testing.assert_array_equal(found, end)


def test_the_file_is_replaced_and_is_plain_safetensors(tmp_path) -> None:
    file = tmp_path / "states"
    for _ in range(2):
        on_workers("local", 1, saving, "adam", file)
    found = load_file(file)
    assert sorted(x.shape for x in found.values() if x.dtype != torch.uint8) == [()] * 2 + [(5, 3)] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


@pytest.mark.parametrize("dump", [False, True])
def test_hyperparameters_are_saved_on_request(dump, tmp_path) -> None:
    saved, kv = create("local"), create("local")
    for store, lr in ((saved, 1.0), (kv, 10.0)):
        store.init("w", np.zeros(1))
        store.set_optimizer(lambda parameters, lr=lr: torch.optim.SGD(parameters, lr=lr))
    saved.save_optimizer_states(str(tmp_path / "states"), dump)
    kv.load_optimizer_states(str(tmp_path / "states"))
    kv.push("w", np.ones(1))
    assert pulled(kv, "w", (1,)).item() == (-1 if dump else -10)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("write", "match"),
    [
        (lambda file: None, "No such file"),
        (lambda file: file.write_bytes(b"of something else"), "it is no safetensors file"),
        (lambda file: save_file({"x": torch.ones(2)}, file), "it is not a file of optimizer states"),
        (lambda file: save_file({"optimizer": torch.tensor([123], dtype=torch.uint8)}, file), "it is not a file of"),
        (lambda file: save_file({"optimizer": torch.tensor([51], dtype=torch.uint8)}, file), "it is not a file of"),
        (lambda file: other_store(file, {"w": (5, 3)}), r"key 'of .*' is nothing in the file and \[5, 3\] here"),
        (lambda file: other_store(file, {KEYS[1]: (5, 3), "w": (3, 5)}), r"'w' is \[3, 5\] in the file and \[5, 3\]"),
        (
            lambda file: other_store(file, dict.fromkeys([*KEYS, "x"], (5, 3))),
            r"'x' is \[5, 3\] in the file and nothing",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_on_all_workers(size, write, match, tmp_path) -> None:
    write(tmp_path / "states")

    def work(kv: KVStore) -> None:
        with pytest.raises(CheckpointError, match=match):
            begin(kv, "sgd", [normal(0), normal(1)], tmp_path / "states")

    on_workers("dist_sync", size, work)


def other_store(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    kv = create("local")
    kv.init(list(shapes), [np.zeros(shape) for shape in shapes.values()])
    kv.set_optimizer(MAKERS["sgd"])
    kv.save_optimizer_states(file)


def test_a_file_that_cannot_be_written() -> None:
    kv = create("local")
    kv.set_optimizer(MAKERS["sgd"])
    with pytest.raises(CheckpointError, match="/nowhere/states: No such file or directory"):
        kv.save_optimizer_states("/nowhere/states")


@pytest.mark.parametrize("verb", ["save", "load"])
def test_without_an_optimizer_there_is_no_state(verb, tmp_path) -> None:
    kv = create("local")
    kv.set_updater(lambda key, received, stored: None)
    with pytest.raises(UnisonoError, match=f"there is no optimizer whose state to {verb}: call set_optimizer"):
        getattr(kv, f"{verb}_optimizer_states")(tmp_path / "states")
