"""When checkpoints are taken, and how the workers agree that one is complete.

Every worker writes its share in the background. What became of it travels in the control word of later steps; when all
shares are on disk worker 0 commits the checkpoint, when one failed it is abandoned, and training goes on either way.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.bad_steps import AnomalyDetector, Stop
from unisono.checkpoint import (
    OpenedCheckpoint,
    Spec,
    TensorShard,
    Writer,
    compare,
    decode_shards,
    encode_shards,
    open_checkpoint,
    shards_of,
)
from unisono.comm import Communicator
from unisono.comm.text import broadcast_text, gather_text
from unisono.config import current
from unisono.elastic.agreement import start_alike
from unisono.elastic.model_state import load_state, names_of, state_of, weights_of
from unisono.elastic.state_transfer import Parts, Progress
from unisono.errors import CheckpointMismatch
from unisono.tensors.box import Box
from unisono.trainer.replica import Replica

LOG = logging.getLogger("unisono")
KEPT = "kept/"  # before the names of what a loop of the user's own keeps
Receive = Callable[[str, Tensor], Tensor]  # of a checkpoint's tensor by name, and what it is like here


class Checkpointer:
    """One worker's part in the run's checkpoints.

    Args:
        writer: writes this worker's share; None on a host from where the run's directory is not seen.
        every: steps between checkpoints; 0 writes one at the end only.
        meta: JSON that goes into every checkpoint's manifest.
        comm: a lane of its own, of all workers.
        parts: where a replica lies on several workers, the boxes that what lies here is of the whole.
        replicas: one of the workers at the same place of all replicas, where that is not all of them.
        judge: whose memory of bad steps goes into checkpoints.
        beside: further tensors that go into them, the same on all workers.
        newest: on worker 0, the checkpoint that `go_back` is to go back to.
    """

    def __init__(
        self,
        writer: Writer | None,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Communicator,
        every: int,
        meta: Mapping[str, Any],
        parts: Parts | None = None,
        replicas: Communicator | None = None,
        *,
        judge: AnomalyDetector | None = None,
        beside: Mapping[str, Tensor] | None = None,
        newest: Callable[[], OpenedCheckpoint | None] = lambda: None,
    ) -> None:
        self._writer, self._model, self._optimizer, self._comm = writer, model, optimizer, comm
        self.every, self.meta = every, meta
        self.judge, self._newest = judge or AnomalyDetector(Stop()), newest
        self._parts, self._replicas, self._beside = parts, replicas or comm, beside or {}
        self._holders: list[dict[str, TensorShard]] | None = None  # what each worker has of a checkpoint's tensors
        self._shared: dict[str, Tensor] = {}
        self._owed: dict[str, Tensor] = {}  # what this worker owed, as a checkpoint had it
        self._keeps_debts = False
        self._replica: Replica | None = None
        self._pending = 0  # the step whose checkpoint is not yet committed or abandoned; 0: none
        self._last = 0  # the step of the checkpoint taken last
        self.committed = 0  # that of the one that lies on disk
        self._prepared = False

    @property
    def share_status(self) -> float:
        """What became of this worker's share: 0: under way, or nothing; the step: it is on disk; minus the step: it
        could not be written."""
        if self._writer is None or not self._pending:
            return float(self._pending)
        progress = self._writer.state
        return float(
            self._pending * (progress.written == self._pending) - self._pending * (progress.failed == self._pending)
        )

    def wait_staged(self) -> None:
        """Right before weights change: a checkpoint that is being taken must have its copy first."""
        if self._writer and self._pending:
            self._writer.staged()

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written; all workers know the same of it."""
        return self._pending > 0

    def after_step(self, done: int, outcomes: Sequence[float], take: bool = True) -> None:
        """After `done` steps in all: hear what became of everybody's shares; `take` the checkpoint that is due."""
        self._hear(outcomes)
        if self._writer and self.every and not self._prepared:
            tensors = self._tensors()
            self._writer.prepare(
                tensors, self._agreed_holders(tensors)
            )  # the optimizer's state is there from the first step on
            self._prepared = True
        if take and self.due(done):
            self._take(done)

    def due(self, done: int) -> bool:
        """Whether a checkpoint is to be taken after `done` steps in all, if all workers are together there."""
        return bool(self.every) and done // self.every > self._last // self.every

    def bind(self, replica: Replica) -> None:
        """From now on, what `replica` shares with the others is part of the checkpoints; it takes up what was found
        by `resume`."""
        self._replica = replica
        if self._shared:
            replica.sync.load_state_dict(self._shared)
        if self._owed:
            replica.sync.load_residuals(self._owed)
        if replica.has_residuals:  # each worker writes its own
            self._keeps_debts = bool(self._comm.gather(torch.tensor([self._writer is not None])).wait().all())

    def finish(self, done: int) -> None:
        """After the last step: take the last checkpoint and wait until it lies on disk."""
        if self._last != done:
            self._take(done, still=True)
        self._conclude()

    def resume(self, found: OpenedCheckpoint | None) -> int:
        """Take over the state that worker 0 has `found` on all workers; returns the steps done so far. No memory is
        taken before what the checkpoint claims was compared with the model. Where a replica lies on several workers,
        each reads its own boxes.

        Raises:
            CheckpointMismatch: on worker 0, another model's checkpoint, or one with far more state than belongs to
                such a model; names the first tensor that differs.
        """
        return self._restore(found) or 0

    @property
    def shared(self) -> Mapping[str, Tensor]:
        """What the synchronizer had in the state that was taken over."""
        return self._shared

    @property
    def owed(self) -> Mapping[str, Tensor]:
        """What this worker owed in the state that was taken over; nothing, if other workers wrote it."""
        return self._owed

    @property
    def last(self) -> int:
        """The steps that were done when the last checkpoint was taken."""
        return self._last

    def abandon(self, done: int) -> None:
        """All workers call it alike: a checkpoint that was taken after `done` steps is not to be committed."""
        if self._pending != done:
            return
        if self._writer:
            self._writer.finish()
        self._comm.gather(torch.zeros(1)).wait()  # nobody writes any more
        if self._writer:
            self._writer.abandon(done)
            self._writer.finish()
        self._comm.gather(torch.zeros(1)).wait()  # and nobody writes it anew before it is gone
        self._pending, self._last = 0, done - 1

    def roll_back(self) -> int | None:
        """All workers call it alike, when a step was dropped: they have the state of the newest checkpoint then.
        Returns the steps done by then; None, and nothing has changed, if there is none."""
        assert self._replica is not None
        self._conclude()
        if self._writer:
            self._writer.finish()  # what has been committed is there
        done = self._restore(self._newest() if self._comm.rank == 0 else None)
        if done is not None:
            self._replica.sync.load_residuals(self._owed)
            self._replica.begin()
        return done

    def _restore(self, found: OpenedCheckpoint | None) -> int | None:
        plan = json.loads(broadcast_text(self._comm, json.dumps(self._inventory(found, *self._everything()))))
        if not plan:
            return None
        if self._parts is not None:
            opened = found or open_checkpoint(plan["path"])
            receive: Receive = lambda name, like: self._read(opened, name)
        else:
            receive = lambda name, like: self._receive(found, name, like)
        weights = weights_of(self._model)
        received = {
            name: receive(f"model/{name}", weights[name]) for name in sorted(weights.keys() - set(plan["kept"]))
        }
        state = {
            name: receive(f"optimizer/{name}", torch.empty(shape, dtype=getattr(torch, kind)))
            for name, (kind, shape) in plan["tensors"].items()
            if self._is_here(f"optimizer/{name}")
        }
        numbers = {name: n for name, n in plan["numbers"].items() if self._is_here(f"optimizer/{name}")}
        shared = {
            name: receive(f"sync/{name}", torch.empty(shape, dtype=getattr(torch, kind)))
            for name, (kind, shape) in plan["shared"].items()
            if self._is_here(f"sync/{name}")
        }
        mine, owed = f"{self._comm.rank}/", dict[str, Tensor]()
        for name, (kind, shape) in sorted(plan["owed"].items()):
            if self._parts is None or name.startswith(mine):
                tensor = receive(f"owed/{name}", torch.empty(shape, dtype=getattr(torch, kind)))
                owed |= {name.removeprefix(mine): tensor} if name.startswith(mine) else {}
        # All of it is here: whoever is lost now takes nothing along.
        with torch.no_grad():
            for name, tensor in received.items():
                weights[name].copy_(tensor)
        load_state(self._optimizer, self._model, state, numbers)
        self._shared, self._owed = shared, owed
        self._last = self.committed = int(plan["step"])
        self.judge.load(plan["judged"])
        return self._last

    def set_progress(self, reached: Progress) -> None:
        """The state of all workers is what they have `reached`, in another view of the same run."""
        self._shared, self._last, self.committed = dict(reached.shared), reached.committed, reached.committed

    def broadcast_initial_weights(self) -> None:
        """All replicas start from the weights and the optimizer state of the first.

        Raises:
            InvalidInput: workers have built different models or optimizers.
        """
        start_alike(self._replicas, self._model, self._optimizer)

    def _everything(self) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], set[str]]:
        """Dtype and shape of all that the workers of a replica hold of the model, by a checkpoint's names, and which
        of it are buffers."""
        mine = {f"model/{name}": (t.dtype, self._shape(name, t)) for name, t in weights_of(self._model).items()}
        buffers = {f"model/{name}" for name, _ in self._model.named_buffers()}
        if self._parts is None:
            return mine, buffers
        said = {n: [str(dtype).removeprefix("torch."), shape, n in buffers] for n, (dtype, shape) in mine.items()}
        told = [json.loads(text) for text in gather_text(self._comm, json.dumps(said))]
        all_ = {name: each for one in told for name, each in one.items()}
        kinds = {name: (getattr(torch, kind), tuple(shape)) for name, (kind, shape, _) in all_.items()}
        return kinds, {name for name, (_, _, is_buffer) in all_.items() if is_buffer}

    def _inventory(
        self,
        found: OpenedCheckpoint | None,
        here: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        buffers: Collection[str],
    ) -> dict[str, Any]:
        if found is None:
            return {}
        specs, before = found.specs, history(found)
        # Files of weights leave out buffers that the model makes itself.
        kept = set() if before else buffers - specs.keys()
        compare(
            {name: kind for name, kind in here.items() if name not in kept},
            {name: t for name, t in specs.items() if name.startswith("model/")},
        )
        _check_size(specs)
        # Another synchronizer would not know what to do with it.
        same = self._alike(before, "sync")
        alike, owed = self._alike(before, "sync", "layout", "workers"), _kinds(specs, "owed/")
        if owed and not alike:
            LOG.info(
                "what compressed messages had left out is forgotten: workers, sync or layout are others than before"
            )
        return {
            "step": found.step,
            "path": str(found.path),
            "kept": sorted(name.removeprefix("model/") for name in kept),
            "numbers": before.get("numbers", {}),
            "judged": before.get("judged", {}),
            "tensors": _kinds(specs, "optimizer/") if before else {},
            "shared": _kinds(specs, "sync/") if same else {},
            "owed": owed if alike else {},
        }

    def _alike(self, before: Mapping[str, Any], *fields: str) -> bool:
        return bool(before) and all(before["config"].get(f) == self.meta["config"].get(f) for f in fields)

    def _shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        part = self._part(f"model/{name}")
        return part.shape if part else tuple(tensor.shape)

    def _part(self, name: str) -> Box | None:
        """The part that belongs to a checkpoint's tensor `name`: that of its parameter."""
        return self._parts.of(name) if self._parts else None

    def _is_here(self, name: str) -> bool:
        """Whether this worker has a part in the checkpoint's tensor `name`, which is a parameter's."""
        return self._parts is None or self._part(name) is not None or "/" not in name.partition("/")[2]

    def _read(self, opened: OpenedCheckpoint, name: str) -> Tensor:
        part = self._part(name)
        fits = part is not None and opened.specs[name].shape == part.shape
        return opened.read(name, part if fits else None)

    def _agreed_holders(self, tensors: Mapping[str, Tensor]) -> list[dict[str, TensorShard]] | None:
        """What each worker has; all call it alike."""
        if self._parts is None and not self._keeps_debts:
            return None
        boxes = {}
        for name, tensor in tensors.items():
            part = self._part(name)
            if part is not None and tuple(tensor.shape) == part.size:
                boxes[name] = part
        told = gather_text(self._comm, encode_shards(shards_of(tensors, boxes)))
        holders = [decode_shards(text) for text in told]
        if holders != self._holders:
            self._holders = holders
        return self._holders

    def _everybodys(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """What the workers of a replica keep beside tensors, all in one; all call it alike."""
        if self._parts is None:
            return dict(numbers)
        told = gather_text(self._comm, json.dumps(numbers))
        return {name: number for text in reversed(told) for name, number in json.loads(text).items()}

    def _receive(self, found: OpenedCheckpoint | None, name: str, like: Tensor) -> Tensor:
        mine = found.read(name).to(like.device) if found else torch.empty_like(like.detach())
        return self._comm.broadcast(mine.contiguous()).wait()

    def _take(self, done: int, still: bool = False) -> None:
        """`still`: nothing changes before `_conclude`."""
        self._conclude()
        if self._writer:
            _, numbers = state_of(self._optimizer, self._model)
            tensors = self._tensors()
            holders = self._agreed_holders(tensors)
            write = self._writer.write if still else self._writer.stage
            meta = {**self.meta, "numbers": self._everybodys(numbers), "judged": self.judge.state()}
            meta |= names_of(self._model)
            write(done, tensors, meta, holders)
        self._pending = self._last = done

    def _tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by name."""
        state, _ = state_of(self._optimizer, self._model)
        tensors = {f"model/{name}": t.detach() for name, t in self._model.named_parameters()}
        # The next forward pass writes into buffers before weights change, while the copy may still be under way.
        tensors |= {f"model/{name}": t.clone() for name, t in self._model.named_buffers()}
        tensors |= {f"optimizer/{name}": t for name, t in state.items()}
        shared = self._replica.sync.state_dict() if self._replica else {}
        owed = self._replica.sync.residual_state() if self._replica and self._keeps_debts else {}
        tensors |= {f"owed/{self._comm.rank}/{name}": t for name, t in owed.items()}
        tensors |= {f"{KEPT}{name}": t for name, t in self._beside.items()}
        return tensors | {f"sync/{name}": t for name, t in shared.items()}

    def _conclude(self) -> None:
        """Wait until the pending checkpoint is committed or abandoned everywhere."""
        if not self._pending:
            return
        if self._writer:
            self._writer.finish()
        mine = torch.tensor([self.share_status], dtype=torch.float64)
        self._hear(self._comm.gather(mine).wait().view(-1).tolist())
        if self._writer:
            self._writer.finish()
        self._comm.gather(mine).wait()  # nobody goes on before worker 0 has committed

    def _hear(self, outcomes: Sequence[float]) -> None:
        if not self._pending or not all(abs(o) == self._pending for o in outcomes):
            return
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome < 0]
        if self._writer and self._comm.rank == 0:
            if failed:
                self._writer.abandon(self._pending, failed)
            else:
                self._writer.commit(self._pending)
        self.committed = self.committed if failed else self._pending
        self._pending = 0


def history(found: OpenedCheckpoint) -> Mapping[str, Any]:
    """What the run that wrote a checkpoint said about itself; nothing where weights were made into a checkpoint."""
    meta = found.meta
    return {**meta, "config": current(meta["config"])} if isinstance(meta, Mapping) and "config" in meta else {}


def _check_size(specs: Mapping[str, Spec]) -> None:
    """Raise `CheckpointMismatch` if there is more beside the weights than any optimizer or synchronizer keeps."""
    weights = sum(spec.nbytes for name, spec in specs.items() if name.startswith("model/"))
    beside = sum(spec.nbytes for spec in specs.values()) - weights
    if beside > _MOST_BESIDE * weights + _FREE_BYTES:
        raise CheckpointMismatch(
            f"the checkpoint has {beside:,} bytes beside weights of {weights:,}: more than {_MOST_BESIDE} times as "
            "much is not taken for the state of an optimizer or synchronizer"
        )


_MOST_BESIDE = 256  # times the bytes of the weights: Shampoo keeps some of their squares, each worker may owe as much
_FREE_BYTES = 64 << 20


def _kinds(specs: Mapping[str, Spec], prefix: str) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of the tensors under `prefix`."""
    found = {name.removeprefix(prefix): t for name, t in specs.items() if name.startswith(prefix)}
    return {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in found.items()}
