"""A small Keras model, its data and a `fit` of it, for the tests of Keras on several workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import numpy as np
from keras import callbacks, layers, optimizers

from unisono import World
from unisono.frameworks.keras import Distributed, shard

ROWS, BATCH, EPOCHS = 60, 12, 3
Callbacks = Callable[[World | None], list[Any]]


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(ROWS, 5)).astype("float32")
    return x, (x[:, :1] + random.normal(size=(ROWS, 1)) > 0).astype("float32")


def hidden() -> list[Any]:
    return [layers.Dense(8, activation="tanh")]


def build(
    seed: int = 0,
    optimizer: Callable[[], Any] = lambda: optimizers.SGD(0.1, momentum=0.9),
    inner: Callable[[], list[Any]] = hidden,
    policy: str = "float32",
    **compiles: Any,
) -> keras.Model:
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(policy)  # of this thread
    model = keras.Sequential([layers.Input((5,)), *inner(), layers.Dense(1, activation="sigmoid")])
    model.compile(optimizer(), **{"loss": "binary_crossentropy", "metrics": ["mae"]} | compiles)
    return model


def fit(model: keras.Model, world: World | None, after: Sequence[Any] = (), **chosen: Any) -> dict[str, list[float]]:
    """On all rows, or on this worker's, in their order."""
    own: list[Any] = [] if world is None else [Distributed(world)]
    given: dict[str, Any] = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, "validation_data": data(1)} | chosen
    x, y = given.pop("x", data()), None
    if isinstance(x, tuple):
        x, y = x
        given["batch_size"] = BATCH
        if world is not None:
            x, y = shard((x, y), world)
            given |= {"batch_size": BATCH // world.size, "validation_data": shard(given["validation_data"], world)}
    history: dict[str, list[float]] = model.fit(x, y, callbacks=[*own, *after], **given).history
    return history


def numbers(variables: Sequence[Any]) -> list[np.ndarray]:
    return [variable.value.detach().cpu().numpy().copy() for variable in variables]


def state(model: keras.Model) -> list[np.ndarray]:
    return numbers([*model.variables, *model.optimizer.variables])


def close(found: Sequence[Any], expected: Sequence[Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def same(states: Sequence[Sequence[np.ndarray]]) -> None:
    """All workers have the same bits."""
    for each in states:
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(each, states[0], strict=True))


class Stop(callbacks.Callback):
    """Ends training after a batch."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch >= self._after


class Batches(keras.utils.PyDataset):
    """The batches of one worker."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._x, self._y = (each[rank::size] for each in data())
        self._share = BATCH // size

    def __len__(self) -> int:
        return len(self._x) // self._share

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(index * self._share, (index + 1) * self._share)
        return self._x[part], self._y[part]
