"""Strategies for Lightning: its Trainer and Fabric keep their loops, and this library exchanges the gradients.

    Trainer(strategy=UnisonoStrategy(compress="PowerSGD(rank=2)"), devices=2)

Lightning starts the workers, or finds those that torchrun, Slurm or ``unisono launch`` has started. Its own
collectives, for example for logged metrics, stay on torch's process group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

try:
    from lightning.fabric.plugins import ClusterEnvironment
except ImportError as error:
    raise ImportError("unisono.frameworks.lightning needs Lightning: pip install lightning") from error
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricStrategy
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy as TrainerStrategy
from lightning.pytorch.strategies import StrategyRegistry

from unisono.compress import Cast, Compressor
from unisono.config import checked
from unisono.ddp import DistributedDataParallel
from unisono.errors import CommunicationError, InvalidInput
from unisono.launch import WorkerIdentity, identify
from unisono.launch.claim import unclaimed
from unisono.notation import show
from unisono.sync import AllReduce, Synchronizer
from unisono.world import World, join_group, load_synchronizer_state, synchronizer_state

_STATE = "unisono"  # the key of checkpoints under which the synchronizer's state is
_TIMEOUT_SECONDS = 1800.0  # torch's own, where Lightning's argument is None
_NOTICE_SECONDS = 2.0  # in which a worker notices that another one has exited
_REPLACED = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class GradientExchange:
    """The workers of a strategy, and how they agree.

    Args:
        sync, compress: as in `Config`.

    Attributes:
        world: None unless the workers are connected.
    """

    def __init__(self, sync: Synchronizer | str, compress: Compressor | str) -> None:
        given = checked(sync=sync, compress=compress)
        self.sync, self.compress = given["sync"], given["compress"]
        self.world: World | None = None
        self._final: dict[str, Any] = {}

    @property
    def binds_optimizers(self) -> bool:
        """Whether the steps of every optimizer are the synchronizer's."""
        return not isinstance(self.sync, AllReduce)

    def binds(self, optimizer: Optimizer) -> bool:
        """Whether a step of `optimizer` needs more than the mean gradient: LBFGS decides by the loss, too."""
        return self.binds_optimizers or isinstance(optimizer, LBFGS)

    def wrap(self, module: nn.Module, strategy: TrainerStrategy | FabricStrategy) -> DistributedDataParallel:
        """Collective: `module`, whose gradients are exchanged. Connects the workers of `strategy` if needed."""
        if self.world is None:
            self.world, self._final = _join(strategy), {}
        return DistributedDataParallel(
            module, world=self.world, sync=self.sync, compress=self.compress, **strategy._ddp_kwargs
        )

    def bind(self, optimizer: Optimizer) -> None:
        """Collective: bind `optimizer`, of models that are bound."""
        assert self.world is not None
        self.world.bind(optimizer, sync=self.sync, compress=self.compress)

    def check_scaler(self, precision: Any) -> None:
        """Raise `InvalidInput` if workers may skip different steps."""
        if self.binds_optimizers and getattr(precision, "scaler", None) is not None:
            raise InvalidInput(
                "precision", precision.precision, f"a worker skips a step whose gradients overflow, but with "
                f"{show(self.sync)} all take equally many", 'use precision="bf16-mixed", or AllReduce()')  # fmt: skip

    def synchronize(self) -> None:
        """Collective, between two steps: the weights of all workers become equal."""
        if self.world is not None and self.binds_optimizers:
            self.world.synchronize()

    def state(self) -> dict[str, Any]:
        """Collective, between two steps: what a checkpoint has besides the model and its optimizer."""
        if self.world is None or not self.binds_optimizers:
            return self._final
        return {_STATE: {"sync": show(self.sync), "state": synchronizer_state(self.world)}}

    def finish(self) -> None:
        """Collective, after the last step: synchronize, and keep `state` for a checkpoint that is saved later."""
        self._final = self.state()

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from `state` of an equal synchronizer; another one begins anew."""
        saved = checkpoint.get(_STATE)
        if self.world is not None and saved is not None and saved["sync"] == show(self.sync):
            load_synchronizer_state(self.world, saved["state"])

    def lost_worker(self) -> str:
        """Which worker is lost, and how that was noticed, as far as this one notices it in a short time; else empty."""
        if self.world is None:
            return ""
        until = time.monotonic() + _NOTICE_SECONDS
        try:
            work = self.world.comm.gather(torch.zeros(1))
            while not work.poll():
                if time.monotonic() > until:
                    return ""
                time.sleep(0.01)
            work.wait()
        except CommunicationError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Leave the workers; they can be connected again."""
        if self.world is not None:
            self.world.close()
            self.world = None


class _Exchanging:
    """What both strategies have in common, before Lightning's class."""

    def __init__(
        self,
        *,
        sync: Synchronizer | str = AllReduce(),
        compress: Compressor | str = Cast(),
        cluster_environment: ClusterEnvironment | None = None,
        **given: Any,
    ) -> None:
        _check(given)
        super().__init__(cluster_environment=_environment(cluster_environment), **given)  # type: ignore[call-arg]
        self.exchange = GradientExchange(sync, compress)


class UnisonoStrategy(_Exchanging, TrainerStrategy):
    """For Lightning's Trainer: the mean gradient over all workers, or local steps, by this library.

    Also ``Trainer(strategy="unisono")``, once this module is imported.

    Args:
        sync, compress: as in `Config`. Other synchronizers than `AllReduce` take exactly one optimizer.
        cluster_environment: default: that which Lightning finds, or that of ``unisono launch``.
        timeout: of waiting for another worker, here and in torch's process group.
        given: further arguments of Lightning's ``DDPStrategy`` and of `DistributedDataParallel`.

    Attributes:
        exchange: has the `World` of the workers during ``fit``.

    Raises:
        InvalidInput: `sync` or `compress` cannot be read, or another argument has one of them as its successor here.
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return self.exchange.wrap(model, self)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        self.exchange.check_scaler(self.precision_plugin)
        assert isinstance(self.model, DistributedDataParallel)
        self.model.bind(*filter(self.exchange.binds, self.optimizers))

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing: hooks on the parameters find out what a backward pass reaches."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing."""

    def on_validation_start(self) -> None:
        """What is validated is equal on all workers."""
        self.exchange.synchronize()

    def on_train_end(self) -> None:
        """What was trained is equal on all workers."""
        self.exchange.finish()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.exchange.synchronize()
        return super().lightning_module_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        super().save_checkpoint(checkpoint | self.exchange.state(), filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self.exchange.load(checkpoint)

    def on_exception(self, exception: BaseException) -> None:
        """Name a lost worker where a collective of Lightning's has failed, whose errors name none."""
        if isinstance(exception, RuntimeError) and (lost := self.exchange.lost_worker()):
            exception.add_note(lost)
        super().on_exception(exception)

    def teardown(self) -> None:
        self.exchange.close()
        self.model = self.lightning_module  # Lightning's own method would ask torch's reducer
        super().teardown()


class UnisonoFabricStrategy(_Exchanging, FabricStrategy):
    """For Lightning Fabric, where ``fabric.setup(model, optimizer)`` begins the exchange.

    Also ``Fabric(strategy="unisono")``, once this module is imported.

    Args:
        sync, compress: as in `Config`. Other synchronizers than `AllReduce` take one optimizer for each model.
        cluster_environment, timeout, given: as for `UnisonoStrategy`.

    Attributes:
        exchange: has the `World` of the workers, from the first ``fabric.setup`` on.

    Raises:
        InvalidInput: as for `UnisonoStrategy`.
    """

    def __init__(
        self,
        *,
        sync: Synchronizer | str = AllReduce(),
        compress: Compressor | str = Cast(),
        cluster_environment: ClusterEnvironment | None = None,
        **given: Any,
    ) -> None:
        _check(given)
        super().__init__(cluster_environment=_environment(cluster_environment), **given)
        self.exchange = GradientExchange(sync, compress)
        self._unbound: list[DistributedDataParallel] = []

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        model = self.exchange.wrap(module, self)
        if self.exchange.binds_optimizers:
            self._unbound.append(model)
        else:
            model.bind()
        return model

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Bind `optimizer` to its model, where the synchronizer takes its steps.

        Raises:
            InvalidInput: it is not that of a model that was set up and has none yet.
        """
        if not self.exchange.binds_optimizers:
            if self.exchange.binds(optimizer):
                self.exchange.bind(optimizer)
            return optimizer
        self.exchange.check_scaler(self.precision)
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self._unbound:
            if any(id(p) in own for p in model.parameters()):
                model.bind(optimizer)
                self._unbound.remove(model)
                return optimizer
        raise InvalidInput("optimizer", type(optimizer).__name__, "no model that was set up waits for it: with "
                           f"{show(self.exchange.sync)} each model has one optimizer",
                           "call fabric.setup(model, optimizer) with one of each, or use AllReduce()")  # fmt: skip

    def save_checkpoint(self, path: str | Path, state: dict[str, Any], *more: Any, **named: Any) -> None:
        super().save_checkpoint(path, state | self.exchange.state(), *more, **named)

    def load_checkpoint(self, path: str | Path, state: Any = None, *more: Any, **named: Any) -> dict[str, Any]:
        rest = super().load_checkpoint(path, state, *more, **named)
        if isinstance(state, dict) and state:
            self.exchange.load(rest)
            rest.pop(_STATE, None)
        return rest

    def teardown(self) -> None:
        self.exchange.close()
        super().teardown()


def _launched() -> bool:
    """Whether ``unisono launch`` has started this process."""
    return "UNISONO_RANK" in unclaimed(os.environ, os.getpid())


def _environment(given: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """``unisono launch`` sets torchrun's variables, but not the one by which Lightning recognizes torchrun."""
    if given is not None or not _launched():
        return given
    if "RANK" not in os.environ:
        raise InvalidInput("strategy", "unisono", "this worker joined the run of another launcher, and is not in "
                           "torch's process group",
                           "start all workers by one `unisono launch`, or by torchrun")  # fmt: skip
    return TorchElasticEnvironment()


def _check(given: Mapping[str, Any]) -> None:
    for name in _REPLACED:
        if given.get(name) is not None:
            raise InvalidInput(name, given[name], "gradients are not exchanged by torch's DistributedDataParallel",
                               "pass compress= or sync=")  # fmt: skip


def _join(strategy: TrainerStrategy | FabricStrategy) -> World:
    """Collective: the workers of `strategy`, whose process group of torch's is there already."""
    device, environment, timeout = strategy.root_device, strategy.cluster_environment, strategy._timeout
    assert environment is not None
    if device.type == "cuda" and device.index != strategy.local_rank:
        raise InvalidInput("devices", str(device), f"worker {strategy.local_rank} of a host has the GPU of that number",
                           "choose GPUs by CUDA_VISIBLE_DEVICES")  # fmt: skip
    identity = None if _launched() else _identity(strategy, environment)
    seconds = timeout.total_seconds() if timeout is not None else _TIMEOUT_SECONDS
    world = World(*join_group(device.type, "auto", torch.get_num_threads(), seconds, identity))
    if (world.rank, world.size) != (strategy.global_rank, strategy.world_size):
        world.close()
        raise InvalidInput("cluster_environment", type(environment).__name__, f"it has {strategy.world_size} workers, "
                           f"and `unisono launch` has started {world.size}", "leave it out")  # fmt: skip
    return world


def _identity(strategy: TrainerStrategy | FabricStrategy, environment: ClusterEnvironment) -> WorkerIdentity:
    """This worker's, as Lightning has found it. The workers meet in the store of torch's process group."""
    return identify({
        "RANK": str(strategy.global_rank),
        "WORLD_SIZE": str(strategy.world_size),
        "LOCAL_RANK": str(strategy.local_rank),
        "LOCAL_WORLD_SIZE": str(strategy.num_processes),
        "MASTER_ADDR": environment.main_address,
        "MASTER_PORT": str(environment.main_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    })  # fmt: skip


StrategyRegistry.register("unisono", UnisonoStrategy, description="Gradients are exchanged by Unisono.")
STRATEGY_REGISTRY.register("unisono", UnisonoFabricStrategy, description="Gradients are exchanged by Unisono.")
