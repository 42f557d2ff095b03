"""What Keras' `fit` on several workers refuses, and how it ends when workers part."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
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
    Batches,
    Stop,
    build,
    close,
    data,
    fit,
    state,
)
from tests.trainer.small_loops import world_of
from unisono.comm import outcomes, simulate
from unisono.errors import InvalidInput, PeerLost, UnisonoError
from unisono.frameworks.keras import Distributed, shard


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


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os

os.environ["KERAS_BACKEND"] = "torch"

import signal
import sys

import unisono
from keras import callbacks

from tests.frameworks.keras_models import build, fit, state


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
