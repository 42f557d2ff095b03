"""A model that Lightning trains by Unisono's strategies is that of plain Lightning in one process."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment, find_free_network_port
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.nn import functional as F

from tests.frameworks.lightning_cells import FEATURES, Net, layers, momentum, share, weights
from tests.trainer.small_loops import world_of
from unisono.comm import simulate
from unisono.elastic.loop_group import LoopGroup
from unisono.errors import InvalidInput
from unisono.frameworks import lightning as frameworks
from unisono.frameworks.lightning import GradientExchange, UnisonoFabricStrategy, UnisonoStrategy
from unisono.launch import WorkerIdentity
from unisono.observe import ThreadTracker

CELLS = Path(__file__).with_name("lightning_cells.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
UNISONO = [sys.executable, "-m", "unisono", "launch", "--workers", "2"]
SYNCS = ("LocalSGD(every=3)", "DiLoCo(every=3)", "Gossip()", "ParameterServer()")
COMPRESSORS = ("PowerSGD(rank=1)", "Cast('bf16')")
OTHERS = [*(f"local:{sync}" for sync in SYNCS), *(f"fabric_resumed:{sync}" for sync in SYNCS),
          *(f"compressed:{compress}" for compress in COMPRESSORS), "refused"]  # fmt: skip
pytestmark = pytest.mark.timeout(600)  # processes that import Lightning, on a machine that may be busy
TOLERANCE = {"bf16": 5e-3, "scaled": 1e-3}  # there each worker rounds its gradient


def start(command: list[str], *arguments: object) -> None:
    line = [*command, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with what all features come to in one process, of plain Lightning and by the strategies."""
    at = tmp_path_factory.mktemp("lightning")
    start([sys.executable], CELLS, at, "plain", 1, *FEATURES)
    return at


@pytest.fixture(scope="module")
def two(plain: Path) -> list[Any]:
    """What all features, and the other synchronizers, come to on each of two workers that Lightning starts."""
    start([sys.executable], CELLS, plain, "two", 2, *FEATURES, *OTHERS)
    return found(plain, "two", 2)


def found(at: Path, name: str, workers: int) -> list[Any]:
    return [json.loads((at / f"{name}-{rank}.json").read_text()) for rank in range(workers)]


def same(mine: Any, expected: Any, tolerance: float = 2e-6) -> None:
    assert mine.keys() == expected.keys()
    for key, numbers in expected.items():
        torch.testing.assert_close(torch.tensor(mine[key]), torch.tensor(numbers), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_of_lightning(feature: str, plain: Path, two: list[Any]) -> None:
    """On one worker and on two: see the method of that name in `Cells`."""
    (expected,) = found(plain, "plain", 1)
    (one,) = found(plain, "one", 1)
    same(one[feature], expected[feature])
    for mine in two:
        same(mine[feature], expected[feature], TOLERANCE.get(feature, 2e-6))


def by_world(comm: Any, sync: str = "AllReduce()", compress: str = "Cast()") -> list[float]:
    """Two epochs in a loop of `World.bind`, which synchronizes between them and at the end."""
    world, model = world_of(comm), layers()
    optimizer = momentum(model)
    world.bind(model, optimizer, sync=sync, compress=compress)
    for _ in range(2):
        for x, y in share(comm.rank, comm.size):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        world.synchronize()
    return weights(model)


@pytest.mark.parametrize("feature", OTHERS[:-1])
def test_a_synchronizer_or_compressor(feature: str, two: list[Any]) -> None:
    """As in a loop of `World.bind`, also where the second epoch starts from a checkpoint of the first."""
    kind, _, value = feature.partition(":")
    (expected, *_) = simulate(2, partial(by_world, **{"compress" if kind == "compressed" else "sync": value}))
    assert max(abs(a - b) for a, b in zip(expected, weights(layers()), strict=True)) > 0.01
    for mine in two:
        same(mine[feature], {"weights": expected})


def test_local_steps_of_two_optimizers_are_refused(two: list[Any]) -> None:
    for mine in two:
        assert "exchanges after the steps of one optimizer of one model" in mine["refused"]["error"]


def continued(at: Path) -> dict[str, list[float]]:
    """By plain Lightning in this process."""
    model = Net()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, enable_checkpointing=False, **quiet)
    trainer.fit(model, ckpt_path=at)
    return {"weights": weights(model)}


def test_plain_lightning_continues_from_a_checkpoint_of_two_workers(plain: Path, two: list[Any]) -> None:
    (expected,) = found(plain, "plain", 1)
    same(continued(plain / "resumed-2-ours.ckpt"), expected["resumed"])


@pytest.mark.long
def test_a_lost_worker_is_named_and_the_last_checkpoint_is_good(plain: Path) -> None:
    """The loss is noticed in a collective of Lightning's, whose error names no worker. Workers are started one by one:
    Lightning's launcher would kill the other one at some time."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port()), "WORLD_SIZE": "2"}
    line = [sys.executable, str(CELLS), str(plain), "killed", "2", "killed"]
    workers = [
        subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=os.environ | store | {"LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=300)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [1, -signal.SIGKILL], said
    assert "worker 1 lost during gather: its process is gone" in said[0]
    (expected,) = found(plain, "plain", 1)
    same(continued(plain / "killed.ckpt"), expected["resumed"])


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_that_multiprocessing_starts(method: str, plain: Path) -> None:
    start([sys.executable], CELLS, plain, method, 2, f"spawned:{method}")
    (mine,), (expected,) = found(plain, method, 1), found(plain, "plain", 1)
    same(mine[f"spawned:{method}"], expected["resumed"])


@pytest.mark.short(1)
@pytest.mark.parametrize("launcher", [UNISONO, TORCHRUN], ids=["unisono launch", "torchrun"])
def test_another_launcher(launcher: list[str], plain: Path) -> None:
    features = ("automatic", "manual", "resumed_from_plain", "fabric_steps")
    start(launcher, CELLS, plain, "launched", 2, *features)
    (expected,) = found(plain, "plain", 1)
    for mine in found(plain, "launched", 2):
        for feature in features:
            same(mine[feature], expected[feature])


# ---- what is refused


@pytest.mark.parametrize("strategy", [UnisonoStrategy, UnisonoFabricStrategy])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ddp_comm_hook": print}, "pass compress= or sync="),
        ({"model_averaging_period": 4}, "pass compress= or sync="),
        ({"sync": "Sometimes()"}, "sync = Sometimes"),
        ({"compress": "PowerSGD(rank=0)"}, "rank"),
    ],
)
def test_arguments_that_are_refused(strategy: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        strategy(**given)


def test_a_gradient_scaler_may_skip_a_step_on_one_worker_alone() -> None:
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    GradientExchange("AllReduce()", "Cast()").check_scaler(precision)
    with pytest.raises(InvalidInput, match='use precision="bf16-mixed", or AllReduce'):
        GradientExchange("LocalSGD()", "Cast()").check_scaler(precision)


def test_the_gpu_of_a_worker_is_that_of_its_local_rank() -> None:
    strategy: Any = UnisonoStrategy(parallel_devices=[torch.device("cuda", 3)])
    strategy.cluster_environment = SimpleNamespace(local_rank=lambda: 0)
    with pytest.raises(InvalidInput, match="choose GPUs by CUDA_VISIBLE_DEVICES"):
        strategy.exchange.wrap(layers(), strategy)


def test_a_worker_of_another_launcher_has_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_RANK", "1")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InvalidInput, match="start all workers by one `unisono launch`, or by torchrun"):
        UnisonoStrategy()


def test_an_environment_with_other_workers_than_those_that_were_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Any) -> None:
        group = LoopGroup(WorkerIdentity(), comm, ThreadTracker())
        monkeypatch.setattr(frameworks, "join_group", lambda *_: (group, torch.device("cpu"), ThreadTracker()))
        strategy: Any = UnisonoStrategy(parallel_devices=[torch.device("cpu")])
        strategy.cluster_environment = LightningEnvironment()
        strategy.cluster_environment.set_world_size(2)
        with pytest.raises(InvalidInput, match="it has 2 workers, and `unisono launch` has started 1; leave it out"):
            strategy.exchange.wrap(layers(), strategy)

    simulate(1, run)


def test_the_other_package_of_lightning_refuses_the_strategy() -> None:
    import pytorch_lightning as other  # comes with Lightning

    with pytest.raises(ValueError, match="invalid strategy name"):
        other.Trainer(strategy=UnisonoStrategy(), accelerator="cpu", logger=False)


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.fabric.plugins", None)
    with pytest.raises(ImportError, match="pip install lightning"):
        importlib.reload(frameworks)
