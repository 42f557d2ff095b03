"""Keras' `fit` on several workers computes what it computes in one process on the same global batches."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import numpy as np
import pytest
import torch
from keras import callbacks, layers, optimizers
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.small_loops import world_of
from unisono import Exact, World
from unisono.comm import outcomes, simulate
from unisono.errors import InvalidInput, PeerLost, UnisonoError
from unisono.frameworks.keras import Distributed, shard

ROOT = Path(__file__).resolve().parents[2]
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


def nothing(world: World | None) -> list[Any]:
    return []


FEATURES: dict[str, tuple[dict[str, Any], Callbacks]] = {
    "sgd": ({}, nothing),
    "adam": ({"optimizer": lambda: optimizers.Adam(0.01)}, nothing),
    "muon": ({"optimizer": lambda: optimizers.Muon(0.01)}, nothing),
    "several": ({"optimizer": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.SGD(0.1), {".*bias": optimizers.Adam(0.01)}))}, nothing),
    "accumulation": ({"optimizer": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2)}, nothing),
    "clipnorm": ({"optimizer": lambda: optimizers.SGD(0.5, clipnorm=0.02)}, nothing),
    "global_clipnorm": ({"optimizer": lambda: optimizers.SGD(0.5, global_clipnorm=0.02)}, nothing),
    "ema": ({"optimizer": lambda: optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)},
            nothing),
    "swapped ema": ({"optimizer": lambda: optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)},
                    lambda world: [callbacks.SwapEMAWeights()]),
    "loss scale": ({"optimizer": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), dynamic_growth_steps=3)},
                   nothing),
    "schedule": ({"optimizer": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 3, 0.5))}, nothing),
    "penalties": ({"inner": lambda: [layers.Dense(8, kernel_regularizer="l2", kernel_constraint="unit_norm")]},
                  nothing),
    "power iteration": ({"inner": lambda: [layers.SpectralNormalization(layers.Dense(8))]}, nothing),
    "module of torch": ({"inner": lambda: [layers.TorchModuleWrapper(torch.nn.Linear(5, 8))]}, nothing),
    "metrics": ({"metrics": ["auc", "accuracy", "precision", keras.metrics.MeanIoU(2), keras.metrics.R2Score(),
                             keras.metrics.F1Score(average=None)]}, nothing),
    "rates": ({}, lambda world: [callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
                                 callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1.0)]),
    "best weights": ({}, lambda world: [callbacks.EarlyStopping("val_mae", patience=0, min_delta=0.05,
                                                                restore_best_weights=True)]),
    "stop within an epoch": ({}, lambda world: [Stop(2)]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), [*((each, 2) for each in FEATURES), ("sgd", 1), ("sgd", 3), ("adam", 3)])
def test_weights_state_and_logs_are_those_of_one_process(name: str, size: int) -> None:
    options, others = FEATURES[name]
    model = build(**options)
    expected, history = model, fit(model, None, others(None))

    def run(comm) -> tuple[Any, Any]:
        world, own = world_of(comm), build(comm.rank, **options)
        return fit(own, world, others(world)), state(own)

    found = simulate(size, run)
    same([each for _, each in found])
    for logs, each in found:
        close(each, state(expected))
        assert logs.keys() == history.keys()
        close(list(logs.values()), list(history.values()))
    assert not np.allclose(state(build(**options))[0], state(expected)[0])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy: str) -> None:
    """Workers have the same bits. One process rounds activations of other batches, to 8 or 11 bits."""

    def run(comm, world: World | None) -> Any:
        model = build(policy=policy)
        fit(model, world)
        return state(model)

    (expected,) = simulate(1, lambda comm: run(comm, None))
    found = simulate(2, lambda comm: run(comm, world_of(comm)))
    same(found)
    close(found[0], expected, rtol=0.05, atol=0.01)


def test_a_gradient_that_is_not_finite_is_skipped_by_all_workers() -> None:
    x, y = data()
    y[BATCH + 1] = 3e38  # of worker 1 alone
    options: Any = {"loss": "mse", "optimizer": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1))}

    def run(comm) -> Any:
        model = build(**options)
        fit(model, world_of(comm), x=(x, y), epochs=1)
        return state(model)

    model = build(**options)
    fit(model, None, x=(x, y), epochs=1)
    assert [float(v) for v in model.optimizer.variables if v.name == "dynamic_scale"] == [2.0**14]
    for found in simulate(2, run):
        close(found, state(model))


def test_low_rank_weights_beside_integers() -> None:
    def run(comm, world: World | None) -> Any:
        model = build()
        model.layers[0].enable_lora(2)
        model.quantize("int8")
        model.compile("adam", "mse")
        fit(model, world)
        assert {v.dtype for v in model.non_trainable_weights} == {"int8", "float32"}
        return state(model)

    (expected,) = simulate(1, lambda comm: run(comm, None))
    for found in simulate(2, lambda comm: run(comm, world_of(comm))):
        close(found, expected)


class Largest(keras.metrics.Metric):
    """A metric of the user's, with a variable that is no sum."""

    def __init__(self, aggregation: str) -> None:
        super().__init__(name=aggregation)
        self.rows = self.add_variable((), "zeros", name="rows", aggregation=aggregation)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign(keras.ops.maximum(self.rows, y_true.shape[0]))

    def result(self) -> Any:
        return self.rows


def test_metrics_of_ones_own_say_how_their_variables_are_combined() -> None:
    def run(comm) -> Any:
        kinds = ["sum", "mean", "only_first_replica"]
        model = build(metrics=[Largest(kind) for kind in kinds])
        history = fit(model, world_of(comm), epochs=1)
        return [history[kind][0] for kind in kinds]

    assert simulate(2, run) == [[BATCH, BATCH / 2, BATCH / 2]] * 2


def test_after_fit_a_worker_evaluates_and_trains_alone() -> None:
    def run(comm) -> Any:
        model = build()
        fit(model, world_of(comm), epochs=1)
        values = model.evaluate(*data(1), verbose=0)
        if comm.rank == 0:
            fit(model, None, epochs=1)
        return values, state(model)

    model = build()
    history = fit(model, None, epochs=1)
    once = state(model)
    fit(model, None, epochs=1)
    (values, first), (_, second) = simulate(2, run)
    close(values, [history["val_loss"][0], history["val_mae"][0]])
    close(first, state(model))
    close(second, once)


def test_models_of_several_inputs_and_outputs() -> None:
    def run(comm, world: World | None) -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        inputs = {"a": layers.Input((5,), name="a"), "b": layers.Input((5,), name="b")}
        both = layers.Concatenate()(list(inputs.values()))
        outputs = {"p": layers.Dense(1, name="p")(both), "q": layers.Dense(2, name="q")(both)}
        model = keras.Model(inputs, outputs)
        model.compile("sgd", loss={"p": "mse", "q": "mae"}, metrics={"p": ["mae"]}, loss_weights={"p": 1.0, "q": 0.5})
        (x, y), (v, _) = data(), data(1)
        given: Any = {"a": x, "b": v}, {"p": y, "q": x[:, :2]}
        return fit(model, world, x=given, validation_data=given), state(model)

    ((history, expected),) = simulate(1, lambda comm: run(comm, None))
    for logs, found in simulate(2, lambda comm: run(comm, world_of(comm))):
        close(found, expected)
        close([logs[name] for name in history], list(history.values()))


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


def forever(batches: Batches) -> Iterator[Any]:
    for index in itertools.count():
        yield batches[index % len(batches)]


@pytest.mark.parametrize("kind", ["loader", "dataset", "generator"])
def test_data_of_other_kinds(kind: str) -> None:
    def run(comm) -> Any:
        model, rank, size = build(), comm.rank, comm.size
        x: Any = Batches(rank, size)
        if kind == "loader":
            rows = TensorDataset(*(torch.from_numpy(each[rank::size]) for each in data()))
            x = DataLoader(rows, batch_size=BATCH // size)
        steps = ROWS // BATCH if kind == "generator" else None
        fit(model, world_of(comm), x=forever(x) if kind == "generator" else x, steps_per_epoch=steps)
        return state(model)

    model = build()
    fit(model, None)
    for found in simulate(2, run):
        close(found, state(model))


def test_a_second_fit_trains_layers_that_were_frozen_or_added() -> None:
    """The way of transfer learning: train a new head, then all, then another model with the same layers."""

    def train(world: World | None) -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        base, head = layers.Dense(8, activation="tanh"), layers.Dense(1)
        first = keras.Sequential([layers.Input((5,)), base, head])
        base.trainable = False
        for _ in range(2):
            first.compile(optimizers.Adam(0.01), loss="mse")
            fit(first, world, epochs=1)
            base.trainable = True
        second = keras.Sequential([layers.Input((5,)), base, layers.Dense(4), layers.Dense(1)])
        second.compile(optimizers.Adam(0.01), loss="mse")
        fit(second, world, epochs=1)
        return state(first), state(second)

    ((first, second),) = simulate(1, lambda comm: train(None))
    for one, other in simulate(2, lambda comm: train(world_of(comm))):
        close([*one, *other], [*first, *second])


def test_a_fit_begins_with_what_worker_0_has() -> None:
    """Weights and optimizer variables, in the first fit and in the second."""

    def train(world: World | None) -> Any:
        model = build(0 if world is None else world.rank, optimizer=lambda: optimizers.Adam(0.01))
        for _ in range(2):
            if world is None or world.rank == 0:  # alone
                weights = model.trainable_variables
                with torch.no_grad():
                    model.optimizer.apply([torch.ones_like(v.value) for v in weights], weights)
            fit(model, world, epochs=1)
        return state(model)

    (expected,) = simulate(1, lambda comm: train(None))
    for found in simulate(2, lambda comm: train(world_of(comm))):
        close(found, expected)


class Pair(keras.Model):
    """Two networks with an optimizer each; the model itself is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.built = True
        self.one = keras.Sequential([layers.Input((5,)), layers.Dense(5)])
        self.two = keras.Sequential([layers.Input((5,)), layers.Dense(4), layers.Dense(1)])

    def compile(self) -> None:
        super().compile()
        self.optimizer_one, self.optimizer_two = optimizers.Adam(0.01), optimizers.SGD(0.1)

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        for part, optimizer in ((self.one, self.optimizer_one), (self.two, self.optimizer_two)):
            self.zero_grad()
            loss = ((self.two(self.one(x)) - y) ** 2).mean()
            loss.backward()
            weights = part.trainable_weights
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss}


def test_two_networks_in_a_train_step_one_of_them_unfrozen_later() -> None:
    def train(world: World | None) -> Any:
        keras.utils.set_random_seed(0)
        model = Pair()
        model.two.layers[0].trainable = False
        for _ in range(2):
            model.compile()
            fit(model, world, epochs=1, validation_data=None)
            model.two.layers[0].trainable = True
        return [*state(model), *numbers(model.optimizer_one.variables)]

    (expected,) = simulate(1, lambda comm: train(None))
    found = simulate(2, lambda comm: train(world_of(comm)))
    same(found)
    close(found[0], expected)


def test_a_fit_may_follow_one_that_has_failed() -> None:
    def train(world: World | None) -> Any:
        model, own = build(), [] if world is None else [Distributed(world)]
        x, y = data() if world is None else shard(data(), world)

        def fail(batch: int, logs: Any) -> None:
            if batch == 2:
                raise KeyboardInterrupt

        for after in (callbacks.LambdaCallback(on_train_batch_end=fail), callbacks.Callback()):
            with suppress(KeyboardInterrupt):
                model.fit(x, y, BATCH // (world.size if world else 1), 2, 0, [*own, after], shuffle=False)
        found = state(model)
        if world is None or world.rank == 0:  # of both, nothing is left
            fit(model, None, epochs=1)
        return found

    (expected,) = simulate(1, lambda comm: train(None))
    for found in simulate(2, lambda comm: train(world_of(comm))):
        close(found, expected)


class Moving(callbacks.Callback):
    """Notes moving statistics after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[np.ndarray] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += [v.numpy().copy() for v in self.model.non_trainable_weights]
        for layer in self.model.layers:
            if isinstance(layer, layers.TorchModuleWrapper):
                self.seen += [layer.module.running_mean.clone().numpy(), layer.module.running_var.clone().numpy()]


@pytest.mark.parametrize("kind", ["keras", "renorm", "torch"])
def test_moving_statistics_are_the_mean_over_workers_after_each_step(kind: str) -> None:
    layer = {
        "keras": lambda: layers.BatchNormalization(momentum=0.5),
        "renorm": lambda: layers.BatchNormalization(momentum=0.5, renorm=True),
        "torch": lambda: layers.TorchModuleWrapper(torch.nn.BatchNorm1d(5, momentum=0.5)),
    }[kind]

    def run(comm) -> list[np.ndarray]:
        moving, model = Moving(), build(inner=lambda: [layer()], optimizer=lambda: optimizers.SGD(0.0))
        fit(model, world_of(comm), [moving], epochs=1)
        return moving.seen

    found = simulate(2, run)
    same(found)
    means, variances = np.zeros(5), np.ones(5)
    unbiased = 6 / 5 if kind == "torch" else 1.0
    for step, seen in enumerate(np.array_split(np.array(found[0]), ROWS // BATCH)):
        batch = data()[0][step * BATCH : (step + 1) * BATCH]
        for total, of in ((means, np.mean), (variances, lambda part, axis: unbiased * np.var(part, axis))):
            once = [np.asarray(of(batch[rank::2], axis=0)) for rank in range(2)]
            if kind == "torch":  # folded as two updates, as one process that computes both micro-batches
                for each in once:
                    total[:] = 0.5 * total + 0.5 * each
            else:
                total[:] = 0.5 * total + 0.25 * (once[0] + once[1])
        known = [means] if kind == "renorm" else [means, variances]  # which has other variables besides
        close(seen[: len(known)], known)


class Noted(layers.Layer):
    """Keeps what goes through it in training."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")
        self.seen: list[np.ndarray] = []

    def call(self, x: Any, training: bool = False) -> Any:
        if training and x.device.type == "cpu":
            self.seen.append(x.detach().numpy().copy())
            self.calls.assign_add(1)
        return x


@pytest.mark.parametrize("seed", [None, 7])
def test_random_layers_draw_other_numbers_on_each_worker_and_are_alike_afterwards(seed: int | None) -> None:
    def run(comm) -> tuple[Any, Any, Any, int]:
        model = build(inner=lambda: [layers.Dropout(0.5, seed=seed), Noted()])
        fit(model, world_of(comm), x=(np.ones((ROWS, 5)), data()[1]), epochs=1)
        return model.layers[1].seen, state(model), torch.rand(3), int(model.layers[1].calls)

    found = simulate(3, run)
    masks = [seen[0].tobytes() for seen, *_ in found]
    assert len(set(masks)) == 3
    same([each for _, each, *_ in found])
    assert all(torch.equal(drawn, found[0][2]) for *_, drawn, _ in found)
    assert [calls for *_, calls in found] == [ROWS // BATCH] * 3


class Own(keras.Model):
    """A train_step of the user's, with logs of its own; two layers have the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = layers.Dense(4, name="same"), layers.Dense(1, name="same")

    def call(self, x: Any) -> Any:
        return self.two(self.one(x))

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        self.zero_grad()
        loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"own": loss, "nested": {"rows": float(len(x)), "first": y[:, 0].mean()}}


def test_a_train_step_of_ones_own() -> None:
    def run(comm, world: World | None) -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        model = Own()
        model.compile("sgd", loss="mse")
        return fit(model, world, validation_data=None), state(model)

    ((history, expected),) = simulate(1, lambda comm: run(comm, None))
    for logs, found in simulate(2, lambda comm: run(comm, world_of(comm))):
        close(found, expected)
        for name, factor in (("own", 1.0), ("first", 1.0), ("rows", 0.5)):
            close(logs[name], factor * np.array(history[name]))


def test_files_are_written_by_worker_0_and_as_one_process_writes_them(tmp_path: Path) -> None:
    def writers(at: Path) -> list[Any]:
        best = callbacks.ModelCheckpoint(str(at / "{epoch}-{val_mae:.4f}.keras"), "val_mae", save_best_only=True)
        each = callbacks.ModelCheckpoint(str(at / "{batch}.weights.h5"), save_weights_only=True, save_freq=2)
        return [best, each, callbacks.CSVLogger(str(at / "log.csv"))]

    def run(comm) -> Any:
        world, model = world_of(comm), build()
        fit(model, world, writers(tmp_path / "two") if world.rank == 0 else [])
        return state(model)

    for each in ("one", "two"):
        (tmp_path / each).mkdir()
    model = build()
    fit(model, None, writers(tmp_path / "one"))
    (found, _) = simulate(2, run)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == names
    last = max(name for name in names if name.endswith(".keras"))
    loaded = [state(keras.models.load_model(tmp_path / each / last)) for each in ("one", "two")]
    close(loaded[1], loaded[0])
    close(found, state(model))
    tables = [np.genfromtxt(tmp_path / each / "log.csv", delimiter=",", skip_header=1) for each in ("one", "two")]
    close(tables[1], tables[0])


def test_training_goes_on_from_a_backup(tmp_path: Path) -> None:
    def run(comm) -> Any:
        world = world_of(comm)
        for epochs in (2, EPOCHS):
            model = build()
            backup = callbacks.BackupAndRestore(str(tmp_path / str(world.rank)), delete_checkpoint=False)
            history = fit(model, world, [backup], epochs=epochs)
        return state(model), len(history["loss"])

    model = build()
    fit(model, None)
    for found, epochs in simulate(2, run):
        close(found, state(model))
        assert epochs == EPOCHS - 2


def test_a_loss_that_is_not_finite_ends_all_workers_after_the_same_step() -> None:
    def run(comm) -> int:
        x, y = data()
        y[2 * BATCH + 1] = np.nan  # of worker 1 alone
        steps = Moving()
        model = build(inner=lambda: [layers.BatchNormalization()], loss="mse")
        fit(model, world_of(comm), [callbacks.TerminateOnNaN(), steps], x=(x, y))
        return len(steps.seen) // 2

    assert simulate(2, run) == [3, 3]


def test_only_worker_0_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def run(comm) -> None:
        fit(build(), world_of(comm), [callbacks.EarlyStopping("loss", min_delta=9.0, verbose=1)], verbose=2)

    simulate(3, run)
    printed = capsys.readouterr().out
    assert printed.count("Epoch 1/3") == printed.count("early stopping") == 1


def test_equal_data_on_all_workers_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def run(comm, x: Any) -> None:
        fit(build(), world_of(comm), x=x)

    simulate(2, run, data())
    assert caplog.text == ""
    simulate(2, run, tuple(np.repeat(each, 2, axis=0) for each in data()))
    assert "workers 0 to 1 computed the same inputs in their first 3 forward passes" in caplog.text


@pytest.mark.parametrize("compress", ["PowerSGD(rank=1)", "Cast('fp16')", "Quantize(bits=8)", "TopK(density=0.5)"])
def test_a_compressor_leaves_all_workers_with_the_same_weights(compress: str) -> None:
    def run(comm) -> tuple[Any, Any]:
        world, model = world_of(comm), build()
        x, y = shard(data(), world)
        history = model.fit(x, y, BATCH // 2, 10, 0, [Distributed(world, compress=compress)], shuffle=False).history
        assert history["loss"][-1] < history["loss"][0]
        return state(model)

    same(simulate(2, run))


def test_exact_sums_do_not_depend_on_which_worker_has_which_data() -> None:
    def run(comm, turns: int) -> Any:
        world, model = world_of(comm), build()
        x, y = (each[(comm.rank + turns) % 3 :: 3] for each in data())
        model.fit(x, y, BATCH // 3, EPOCHS, 0, [Distributed(world, compress=Exact())], shuffle=False)
        return state(model)

    same([*simulate(3, run, 0), *simulate(3, run, 1)])


# --- what is refused


def refused(size: int, run: Callable[..., Any], kind: type[Exception] = InvalidInput) -> str:
    """What all workers say, each of them the same."""
    found = outcomes(size, run)
    assert [type(each) for each in found] == [kind] * size, found
    assert len(set(map(str, found))) == 1
    return str(found[0])


def test_other_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm) -> None:
        world = world_of(comm)
        with pytest.raises(
            InvalidInput, match=r"sync = LocalSGD: its exchange is part .* torch optimizer; use AllReduce"
        ):
            Distributed(world, sync="LocalSGD(every=2)")
        with pytest.raises(InvalidInput, match="compress = "):
            Distributed(world, compress="TopQ()")
        monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
        with pytest.raises(InvalidInput, match="KERAS_BACKEND = jax: its gradients are not torch's; set KERAS_BACKEND"):
            Distributed(world)

    simulate(1, run)


def test_what_the_step_of_a_model_cannot_have_is_refused() -> None:
    said = refused(2, lambda comm: fit(build(jit_compile=True), world_of(comm)))
    assert said.startswith("jit_compile = True: the exchange of gradients would be compiled with the step; write comp")

    def quantized(comm) -> None:
        model = build()
        model.quantize("float8")
        model.compile("sgd", "binary_crossentropy")
        fit(model, world_of(comm))

    assert "its gradient is its new value, for which a mean is wrong; train in mixed_float16" in refused(2, quantized)


def test_the_order_of_callbacks_and_who_writes_are_checked(tmp_path: Path) -> None:
    def second(comm) -> None:
        x, y = shard(data(), world := world_of(comm))
        build().fit(x, y, verbose=0, callbacks=[callbacks.EarlyStopping("loss"), Distributed(world)])

    assert refused(2, second) == (
        "callbacks = EarlyStopping: it comes before Distributed, and would see logs of this worker's data alone; put "
        "Distributed first."
    )

    def writes(comm) -> None:
        fit(build(), world_of(comm), [callbacks.ModelCheckpoint(str(tmp_path / "a.keras"))])

    assert refused(2, writes) == (
        f"ModelCheckpoint = {tmp_path / 'a.keras'}: workers 0 and 1 would write it at the same time; give this "
        "callback to worker 0 alone, or put world.rank into the path."
    )

    def alone(comm) -> None:
        x, y = shard(data(), world := world_of(comm))
        build().fit(x, y, verbose=0, callbacks=Distributed(world))

    assert "outside of a list Keras calls a callback in another thread; write callbacks=[" in refused(2, alone)


def test_workers_that_fit_otherwise_are_refused_before_the_first_step() -> None:
    def steps(comm) -> None:
        fit(build(), world_of(comm), x=DataLoader(TensorDataset(torch.ones(9, 5), torch.ones(9, 1)), 3 - comm.rank))

    assert refused(2, steps) == (
        "fit = the number of steps in an epoch: 3 on worker 0, and 5 on worker 1; compile and fit alike on all "
        "workers, with equally many samples each; see shard."
    )

    def optimizer(comm) -> None:
        fit(build(optimizer=lambda: optimizers.SGD(0.1, clipnorm=1.0 + comm.rank)), world_of(comm))

    assert "fit = clipnorm of optimizer 0: 1.0 on worker 0, and 2.0 on worker 1" in refused(2, optimizer)

    def model(comm) -> None:
        fit(build(inner=lambda: [layers.Dense(4 + comm.rank)]), world_of(comm))

    assert refused(2, model).startswith(
        "model = KerasVariables: sequential/dense/bias is (4,) x float32 on worker 0 and (5,) x float32 on worker 1; "
        "build the same model on every worker"
    )


def test_workers_that_part_later_end_with_an_error() -> None:
    """Instead of waiting for each other until the timeout."""

    def stops(comm) -> None:
        fit(build(), world_of(comm), [Stop(2)] if comm.rank else [])

    assert refused(2, stops, UnisonoError) == (
        "worker 0 begins step 4 of epoch 1, and worker 1 has ended epoch 1: give all workers equally many steps and "
        "the same initial epoch, and let a callback stop all of them alike"
    )

    def runs_out(comm) -> None:
        batches = Batches(comm.rank, 2)
        fit(build(), world_of(comm), x=(batches[i] for i in range(3 + comm.rank)), validation_data=None)

    with pytest.warns(UserWarning, match="Your input ran out of data"):
        assert "worker 0 has ended epoch 1, and worker 1 begins step 4 of epoch 1" in refused(2, runs_out, UnisonoError)

    def restored(comm) -> None:
        fit(build(), world_of(comm), initial_epoch=comm.rank)

    assert "worker 0 begins epoch 1, and worker 1 begins epoch 2" in refused(2, restored, UnisonoError)

    def ends(comm) -> None:
        stop = callbacks.LambdaCallback(on_epoch_end=lambda *_: setattr(model, "stop_training", comm.rank == 1))
        model = build()
        fit(model, world_of(comm), [stop])

    assert "worker 0 begins epoch 2, and worker 1 ends training" in refused(2, ends, UnisonoError)

    def rate(comm) -> None:
        fit(build(), world_of(comm), [callbacks.LearningRateScheduler(lambda epoch, _: 1.0 + epoch * comm.rank)])

    assert "the learning rate is 1 on worker 0, and 2 on worker 1: change it on all" in refused(2, rate, UnisonoError)


def test_a_lost_worker_is_named() -> None:
    def run(comm) -> None:
        def fail(batch: int, logs: Any) -> None:
            if comm.rank == 1 and batch == 3:
                raise ZeroDivisionError

        fit(build(), world_of(comm), [callbacks.LambdaCallback(on_train_batch_end=fail)])

    first, second, third = outcomes(3, run)
    assert isinstance(second, ZeroDivisionError)
    assert isinstance(first, PeerLost)
    assert first.ranks == (1,)
    assert isinstance(third, PeerLost)
    assert 1 in third.ranks  # and 0, which had ended by then


def test_shards_have_equally_many_rows_and_fewer_rows_than_workers_are_refused() -> None:
    def run(comm) -> Any:
        world = world_of(comm)
        with pytest.raises(InvalidInput, match="data = 2 rows: fewer than the 3 workers; start fewer workers"):
            shard(np.zeros(2), world)
        return shard({"x": np.arange(8), "y": (torch.arange(7), None)}, world)

    found = simulate(3, run)
    assert [each["x"].tolist() for each in found] == [[0, 3], [1, 4], [2, 5]]
    assert [each["y"][0].tolist() for each in found] == [[0, 3], [1, 4], [2, 5]]
    assert found[0]["y"][1] is None


def test_without_keras_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)
    monkeypatch.delitem(sys.modules, "unisono.frameworks.keras")
    with pytest.raises(ImportError, match=r"unisono.frameworks.keras needs Keras: pip install keras"):
        importlib.import_module("unisono.frameworks.keras")


# --- real processes


SCRIPT = """
import os

os.environ["KERAS_BACKEND"] = "torch"

import signal
import sys

import unisono
from tests.frameworks.test_keras import build, callbacks, fit, state


def end(epoch, logs):
    if "lose" in sys.argv and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


world = unisono.join(threads=1)
model = build(world.rank)
logs = fit(model, world, [callbacks.LambdaCallback(on_epoch_end=end)])
if world.rank == 0:
    print([float(each.sum()) for each in state(model)], logs["val_loss"])
world.close()
"""


def launched(at: Path, launcher: Sequence[str], *words: str) -> subprocess.CompletedProcess[str]:
    (at / "script.py").write_text(SCRIPT)
    line = [sys.executable, "-m", *launcher, "script.py", *words]
    found = os.environ | {"PYTHONPATH": str(ROOT)}  # where the script's imports are
    return subprocess.run(line, cwd=at, env=found, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    [["unisono", "launch", "--workers", "2"], ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]],
)
def test_processes_compute_what_one_does(launcher: list[str], tmp_path: Path) -> None:
    done = launched(tmp_path, launcher)
    assert done.returncode == 0, done.stderr
    model = build()
    history = fit(model, None)
    (line,) = done.stdout.splitlines()
    sums, losses = (json.loads(f"[{part}]") for part in line[1:-1].split("] ["))
    close(sums, [each.sum() for each in state(model)], atol=1e-5)
    close(losses, history["val_loss"])


@pytest.mark.long
def test_a_process_that_is_killed_is_named(tmp_path: Path) -> None:
    done = launched(tmp_path, ["unisono", "launch", "--workers", "2"], "lose")
    assert done.returncode == 1
    assert done.stderr.startswith("worker 1 failed: killed by SIGKILL"), done.stderr
