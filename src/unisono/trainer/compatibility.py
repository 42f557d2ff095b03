"""What cannot be combined, refused before training begins with what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.bad_steps import RollBack, Stop
from unisono.config import Config
from unisono.data import MicroBatchPlan
from unisono.errors import InvalidInput
from unisono.layout import RankMesh
from unisono.notation import show
from unisono.sync import AllReduce, Synchronizer
from unisono.tasks.checks import check_optimizer


def check_fit(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `InvalidInput` if `optimizer` has parameters that `model` lacks, or its steps need more than gradients."""
    check_optimizer(type(optimizer))
    own = {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise foreign_parameter(parameter)


def check_loop(
    models: Sequence[nn.Module],
    new_models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    new_optimizers: Sequence[Optimizer],
    sync: Synchronizer,
) -> None:
    """Raise `InvalidInput` if the models and optimizers of a custom loop do not fit each other or `sync`.

    Args:
        models: all, with the new ones.
        optimizers: those that were bound before.
    """
    for model in new_models:
        check_trainable(model)
    for optimizer in new_optimizers:
        if any(optimizer is each for each in optimizers):
            raise InvalidInput("bind", type(optimizer).__name__, "this optimizer is bound already", "leave it out")
        own = {id(p) for model in models for p in model.parameters()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in own:
                raise foreign_parameter(parameter)
    if not isinstance(sync, AllReduce) and (len(new_models), len(new_optimizers)) != (1, 1):
        raise InvalidInput(
            "bind", f"{len(new_models)} new models and {len(new_optimizers)} optimizers",
            f"{show(sync)} exchanges after the steps of one optimizer of one model",
            "bind one of each in a call, or use AllReduce()")  # fmt: skip
    if not isinstance(sync, AllReduce):
        check_optimizer(type(new_optimizers[0]))


def foreign_parameter(parameter: Tensor) -> InvalidInput:
    """The error for a parameter of the optimizer that the model does not have."""
    return InvalidInput(
        "optimizer", tuple(parameter.shape), "a parameter of this shape is not one of the model's, so its gradient "
        "would not reach other workers", "make it part of the model")  # fmt: skip


def check_trainable(model: nn.Module) -> None:
    """Raise `InvalidInput` if `model` has no parameter to train, or one that cannot be trained."""
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidInput("model", type(model).__name__, "no parameter requires a gradient", "unfreeze some of it")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise InvalidInput("model", name, "a lazy parameter that has no shape yet",
                               "run one forward pass where the model is built")  # fmt: skip
        if parameter.is_complex() and parameter.requires_grad:
            raise InvalidInput("model", name, "complex numbers cannot be averaged yet",
                               "hold it as real numbers and use torch.view_as_complex")  # fmt: skip


def check_combination(
    config: Config, plan: MicroBatchPlan, mesh: RankMesh, device: torch.device, *, synchronous: bool
) -> None:
    """Raise `InvalidInput` if options of a run exclude each other.

    Args:
        synchronous: whether replicas are equal after every step; always so for a single one.
    """
    _check_sync_batchnorm(config, plan, mesh.data_parallel_size, synchronous)
    _check_dropping(config, synchronous)
    if config.layout.offload and device.type != "cpu" and mesh.replicas > 1:
        raise InvalidInput(
            "layout", show(config.layout), f"gradients are in host memory, and {mesh.replicas} replicas exchange "
            "them on the device",
            f"write --workers {config.layout.workers}, or use replicate in place of replicas")  # fmt: skip


def may_drop_steps(config: Config) -> bool:
    """Whether steps of such a run may be dropped."""
    return not isinstance(config.bad_step, Stop) or config.compare_replicas_every > 0


def why_equal_work(config: Config, *, synchronous: bool) -> str:
    """Why all workers have to compute equally many micro-batches, or lease their work; empty if neither."""
    if config.layout.workers > 1:
        return "workers compute a micro-batch together, or equally many in parallel"
    if config.sync_batchnorm:
        return "with sync_batchnorm all workers compute equally many micro-batches in parallel"
    if not synchronous:
        return f"with {show(config.sync)} each worker takes local steps, as fast as it can"
    if getattr(config.sync, "reduce", "mean") != "mean":
        return f"with {show(config.sync)} a worker's micro-batches count as one, however many they are"
    return ""


def _check_dropping(config: Config, synchronous: bool) -> None:
    sync = show(config.sync)
    if may_drop_steps(config) and not synchronous:
        field = "compare_replicas_every" if isinstance(config.bad_step, Stop) else "bad_step"
        raise InvalidInput(
            field, show(getattr(config, field)), f"with {sync} replicas take local steps, and no step is one of all "
            "workers", "leave it out, or use AllReduce()")  # fmt: skip
    all_reduce = isinstance(config.sync, AllReduce)
    if config.compare_replicas_every and not all_reduce:
        raise InvalidInput("compare_replicas_every", config.compare_replicas_every,
                           f"with {sync} workers do not keep the state",
                           "leave it out, or use AllReduce()")  # fmt: skip
    if isinstance(config.bad_step, RollBack) and not (all_reduce and config.layout.workers == 1):
        raise InvalidInput(
            "bad_step", show(config.bad_step), "only unsharded replicas that keep their state themselves can be "
            "rolled back during a run", "write Skip(), or use AllReduce() without a layout")  # fmt: skip


def _check_sync_batchnorm(config: Config, plan: MicroBatchPlan, workers: int, synchronous: bool) -> None:
    if not config.sync_batchnorm:
        return
    if not synchronous:
        raise InvalidInput(
            "sync_batchnorm", True, f"with {show(config.sync)} workers do not compute micro-batches in parallel",
            "leave it out, or use AllReduce()")  # fmt: skip
    if plan.micro_batches % workers:
        raise InvalidInput(
            "sync_batchnorm", True, f"{workers} workers cannot compute the {plan.micro_batches} micro-batches of a "
            "step in parallel",
            f"choose global_batch and micro_batch so that their number divides by {workers}")  # fmt: skip
