"""Keras' `fit` on several workers computes what it computes in one process on the same global batches."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
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

from tests.frameworks.keras_models import (
    BATCH,
    EPOCHS,
    ROWS,
    Batches,
    Callbacks,
    Stop,
    build,
    close,
    data,
    fit,
    numbers,
    same,
    state,
)
from tests.trainer.small_loops import world_of
from unisono import Exact, World
from unisono.comm import simulate
from unisono.frameworks.keras import Distributed, shard


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
