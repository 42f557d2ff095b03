"""Initial agreement of all workers on model, optimizer, weights and optimizer state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.comm.text import broadcast_text, gather_text
from unisono.elastic.model_state import load_state, state_of, weights_of
from unisono.errors import InvalidInput


def start_alike(comm: Communicator, model: nn.Module, optimizer: Optimizer, known: Container[Tensor] = ()) -> None:
    """Collective: give all workers of `comm` the weights and the optimizer state of worker 0.

    Args:
        known: tensors, by identity, that are equal on all workers already, and are not written.

    Raises:
        InvalidInput: the workers' models, or the groups of their optimizers, differ.
    """
    check_models(comm, model)
    check_optimizers(comm, model, optimizer)
    with torch.no_grad():
        for _, tensor in sorted(weights_of(model).items()):
            if tensor not in known:
                tensor.copy_(comm.broadcast(tensor.detach().clone()).wait())
    _share_state(comm, model, optimizer)


def check_models(comm: Communicator, model: nn.Module) -> None:
    """Collective: compare the models of all workers.

    Raises:
        InvalidInput: the models differ; the message names the first tensor that differs, and the worker.
    """
    found = _first_difference(comm, {name: _kind(tensor) for name, tensor in weights_of(model).items()})
    if found:
        raise InvalidInput(
            "model", type(model).__name__, found,
            "build the same model on every worker: nothing about it may depend on the worker or its host")  # fmt: skip


def check_optimizers(comm: Communicator, model: nn.Module, optimizer: Optimizer) -> None:
    """Collective: compare the optimizers of all workers.

    Raises:
        InvalidInput: the optimizers differ in class, parameters of groups or a hyperparameter; the message names the
            first difference, and the worker.
    """
    if found := _first_difference(comm, _hyperparameters(model, optimizer)):
        raise InvalidInput(
            "optimizer", type(optimizer).__name__, found,
            "build the same optimizer on every worker, and load its saved state on every worker")  # fmt: skip


def broadcast_tensors(comm: Communicator, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Collective: send the `tensors` of worker 0 to all workers; returns copies in host memory."""
    kinds = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    received = {}
    for name, (kind, shape) in json.loads(broadcast_text(comm, json.dumps(kinds))).items():
        mine = tensors[name].detach() if comm.rank == 0 else torch.empty(shape, dtype=getattr(torch, kind))
        received[name] = comm.broadcast(mine.to("cpu", copy=True).contiguous()).wait()
    return received


def _first_difference(comm: Communicator, values: Mapping[str, str]) -> str:
    """Collective: the first difference of `values` between workers, as a sentence; empty if all have the same."""
    mine = json.dumps(dict(sorted(values.items())))
    digest = torch.frombuffer(bytearray(hashlib.sha256(mine.encode()).digest()), dtype=torch.uint8)
    if (comm.gather(digest).wait() == digest).all():
        return ""
    first, *others = (json.loads(text) for text in gather_text(comm, mine))
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    name = min(name for name in {**first, **other} if first.get(name) != other.get(name))
    return f"{name} is {first.get(name, 'none')} on worker 0 and {other.get(name, 'none')} on worker {rank}"


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} x {str(tensor.dtype).removeprefix('torch.')}"


def _hyperparameters(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    names = {id(p): name for name, p in model.named_parameters()}
    found = {"the class": type(optimizer).__name__}
    for i, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            text = ", ".join(names[id(p)] for p in value) if key == "params" else shown(value)
            found[f"{key} of group {i}"] = text
    return found


def shown(value: Any) -> str:
    """`value` as a text that is equal on all workers if `value` is. (The `repr` of an object may show an address.)"""
    if isinstance(value, Tensor):
        return repr(value.tolist())
    if isinstance(value, list | tuple):
        return f"({', '.join(map(shown, value))})"
    plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if plain else type(value).__name__


def _share_state(comm: Communicator, model: nn.Module, optimizer: Optimizer) -> None:
    """Collective: give all workers the optimizer state of worker 0, the only one that may have loaded a checkpoint."""
    tensors, numbers = state_of(optimizer, model)
    received = broadcast_tensors(comm, tensors)
    numbers_there = json.loads(broadcast_text(comm, json.dumps(numbers)))
    if received or numbers_there or tensors or numbers:
        load_state(optimizer, model, received, numbers_there)
