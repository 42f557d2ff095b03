"""Loads the state of a checkpoint on all workers, after comparing it with the model that they have built."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.bad_steps import AnomalyDetector, Stop
from unisono.checkpoint import OpenedCheckpoint, Spec, compare, open_checkpoint
from unisono.comm import Communicator
from unisono.comm.text import broadcast_text, gather_text
from unisono.config import current
from unisono.elastic.model_state import load_state, weights_of
from unisono.elastic.state_transfer import Parts
from unisono.errors import CheckpointMismatch
from unisono.tensors.box import Box

LOG = logging.getLogger("unisono")
RESIDUAL = "owed/"
"""The prefix of the names of error-feedback residuals in a checkpoint; the worker's rank follows it."""

TensorKind = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class CheckpointScope:
    """What one worker contributes to the checkpoints of a run, and loads from them.

    Args:
        comm: a channel of all workers that nothing else uses.
        meta: JSON values that go into every manifest; ``config`` among them says which state belongs to this run.
        detector: the detector of bad steps, whose history goes into checkpoints.
        parts: the boxes of the whole tensors that this worker has; None: replicas are not sharded.
    """

    model: nn.Module
    optimizer: Optimizer
    comm: Communicator
    meta: Mapping[str, Any] = field(default_factory=dict)
    detector: AnomalyDetector = field(default_factory=lambda: AnomalyDetector(Stop()))
    parts: Parts | None = None

    def box(self, name: str) -> Box | None:
        """The box that this worker has of a checkpoint's tensor `name`, which is the box of its parameter.

        None: the worker has the whole tensor, or none of it.
        """
        return self.parts.of(name) if self.parts else None


@dataclass(frozen=True)
class RestoredState:
    """The state in a checkpoint besides model and optimizer.

    Args:
        step: the number of steps that are in the state.
        shared: the synchronizer's state.
        residuals: this worker's error-feedback residuals; empty if other workers wrote the checkpoint.
    """

    step: int
    shared: Mapping[str, Tensor]
    residuals: Mapping[str, Tensor]


class CheckpointRestorer:
    """Loads a checkpoint, as far as one worker takes part in that."""

    def __init__(self, scope: CheckpointScope) -> None:
        self._scope, self._comm = scope, scope.comm

    def restore(self, found: OpenedCheckpoint | None) -> RestoredState | None:
        """Collective: load the checkpoint that worker 0 has `found`. Returns None, and changes nothing, if it has none.

        No memory is allocated before the tensors of the checkpoint are compared with those of the model. If replicas
        are sharded, each worker reads its own boxes; otherwise worker 0 broadcasts what it reads.

        Raises:
            CheckpointMismatch: on worker 0, the checkpoint is that of another model, or has far more state than belongs
                to such a model. The message names the first tensor that differs.
            PeerLost: a worker was lost meanwhile; the state is as before.
        """
        scope, model = self._scope, self._scope.model
        inventory = json.loads(broadcast_text(self._comm, json.dumps(self._inventory(found, *self._built()))))
        if not inventory:
            return None
        receive = self._receiver(found, inventory["path"])
        weights = weights_of(model)
        received = {
            name: receive(f"model/{name}", weights[name]) for name in sorted(weights.keys() - set(inventory["own"]))
        }
        optimizer = self._received(receive, "optimizer/", inventory["optimizer"])
        numbers = {name: n for name, n in inventory["numbers"].items() if self._has(f"optimizer/{name}")}
        shared = self._received(receive, "sync/", inventory["shared"])
        residuals = self._residuals(receive, inventory["residuals"])
        with torch.no_grad():  # only now, so that the loss of a worker during the transfer changes no state
            for name, tensor in received.items():
                weights[name].copy_(tensor)
        load_state(scope.optimizer, model, optimizer, numbers)
        scope.detector.load(inventory["history"])
        return RestoredState(int(inventory["step"]), shared, residuals)

    def _receiver(self, found: OpenedCheckpoint | None, path: str) -> Callable[[str, Tensor], Tensor]:
        """A function ``receive(name, like)``, which returns a tensor of the checkpoint, or this worker's box of it.

        The function is collective if replicas are not sharded.
        """
        if self._scope.parts is None:
            return lambda name, like: self._broadcast(found, name, like)
        opened = found or open_checkpoint(path)
        return lambda name, like: self._read(opened, name)

    def _read(self, opened: OpenedCheckpoint, name: str) -> Tensor:
        box = self._scope.box(name)
        sharded = box is not None and opened.specs[name].shape == box.shape
        return opened.read(name, box if sharded else None)

    def _broadcast(self, found: OpenedCheckpoint | None, name: str, like: Tensor) -> Tensor:
        mine = found.read(name).to(like.device) if found else torch.empty_like(like.detach())
        return self._comm.broadcast(mine.contiguous()).wait()

    def _received(
        self, receive: Callable[[str, Tensor], Tensor], prefix: str, kinds: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        return {
            name: receive(f"{prefix}{name}", torch.empty(shape, dtype=getattr(torch, kind)))
            for name, (kind, shape) in kinds.items()
            if self._has(f"{prefix}{name}")
        }

    def _residuals(self, receive: Callable[[str, Tensor], Tensor], kinds: Mapping[str, Any]) -> dict[str, Tensor]:
        own, residuals = f"{self._comm.rank}/", dict[str, Tensor]()
        for name, (kind, shape) in sorted(kinds.items()):
            if self._scope.parts is None or name.startswith(own):
                tensor = receive(f"{RESIDUAL}{name}", torch.empty(shape, dtype=getattr(torch, kind)))
                residuals |= {name.removeprefix(own): tensor} if name.startswith(own) else {}
        return residuals

    def _built(self) -> tuple[dict[str, TensorKind], set[str]]:
        """Collective in a sharded replica: dtype and shape of all tensors of the model by their names in a checkpoint,
        and the names of its buffers."""
        model = self._scope.model
        mine = {f"model/{name}": (t.dtype, self._whole_shape(name, t)) for name, t in weights_of(model).items()}
        buffers = {f"model/{name}" for name, _ in model.named_buffers()}
        if self._scope.parts is None:
            return mine, buffers
        report = {n: [str(dtype).removeprefix("torch."), shape, n in buffers] for n, (dtype, shape) in mine.items()}
        reports = [json.loads(text) for text in gather_text(self._comm, json.dumps(report))]
        every = {name: each for one in reports for name, each in one.items()}
        kinds = {name: (getattr(torch, kind), tuple(shape)) for name, (kind, shape, _) in every.items()}
        return kinds, {name for name, (_, _, is_buffer) in every.items() if is_buffer}

    def _whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        box = self._scope.box(f"model/{name}")
        return box.shape if box else tuple(tensor.shape)

    def _has(self, name: str) -> bool:
        """Whether this worker has a part of the checkpoint's tensor `name`, which belongs to a parameter."""
        scope = self._scope
        return scope.parts is None or scope.box(name) is not None or "/" not in name.partition("/")[2]

    def _inventory(
        self, found: OpenedCheckpoint | None, built: Mapping[str, TensorKind], buffers: Collection[str]
    ) -> dict[str, Any]:
        """What is to be loaded from the checkpoint, as JSON values; empty if there is no checkpoint."""
        if found is None:
            return {}
        specs, before = found.specs, history(found)
        # Files of weights leave out buffers that the model makes itself.
        own = set() if before else buffers - specs.keys()
        compare(
            {name: kind for name, kind in built.items() if name not in own},
            {name: spec for name, spec in specs.items() if name.startswith("model/")},
        )
        _check_size(specs)
        same_workers, residuals = self._same(before, "sync", "layout", "workers"), _kinds(specs, RESIDUAL)
        if residuals and not same_workers:
            LOG.info("the compressors' residuals are dropped: the number of workers, sync or layout has changed")
        return {
            "step": found.step,
            "path": str(found.path),
            "own": sorted(name.removeprefix("model/") for name in own),
            "numbers": before.get("numbers", {}),
            "history": before.get("judged", {}),
            "optimizer": _kinds(specs, "optimizer/") if before else {},
            "shared": _kinds(specs, "sync/") if self._same(before, "sync") else {},  # another sync could not load it
            "residuals": residuals if same_workers else {},
        }

    def _same(self, before: Mapping[str, Any], *fields: str) -> bool:
        now = self._scope.meta
        return bool(before) and all(before["config"].get(f) == now["config"].get(f) for f in fields)


def history(found: OpenedCheckpoint) -> Mapping[str, Any]:
    """What the run that wrote a checkpoint says of itself in the manifest; empty if weights were converted."""
    meta = found.meta
    return {**meta, "config": current(meta["config"])} if isinstance(meta, Mapping) and "config" in meta else {}


def _check_size(specs: Mapping[str, Spec]) -> None:
    """Raise `CheckpointMismatch` if there is more state than any optimizer or synchronizer keeps."""
    weights = sum(spec.nbytes for name, spec in specs.items() if name.startswith("model/"))
    state = sum(spec.nbytes for spec in specs.values()) - weights
    if state > _MOST_STATE * weights + _FREE_BYTES:
        raise CheckpointMismatch(
            f"the checkpoint has {state:,} bytes of optimizer and synchronizer state for {weights:,} bytes of weights; "
            f"more than {_MOST_STATE} times as much is refused"
        )


_MOST_STATE = 256  # times the bytes of the weights: Shampoo keeps some of their squares, each worker has residuals
_FREE_BYTES = 64 << 20


def _kinds(specs: Mapping[str, Spec], prefix: str) -> dict[str, tuple[str, list[int]]]:
    """The dtype and shape of each tensor whose name begins with `prefix`, by the rest of the name."""
    found = {name.removeprefix(prefix): spec for name, spec in specs.items() if name.startswith(prefix)}
    return {name: (str(spec.dtype).removeprefix("torch."), list(spec.shape)) for name, spec in found.items()}
