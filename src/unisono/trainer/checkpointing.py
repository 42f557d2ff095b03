"""Decides when checkpoints are taken, and lets the workers agree that a checkpoint is complete.

Every worker writes its part in the background. The status of each part travels in the control word of later steps. When
all parts are on disk, worker 0 commits the checkpoint; when a part has failed, the checkpoint is abandoned. Training
continues either way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from unisono.bad_steps import AnomalyDetector
from unisono.checkpoint import OpenedCheckpoint, TensorShard, Writer, decode_shards, encode_shards, shards_of
from unisono.comm import Communicator
from unisono.comm.text import gather_text
from unisono.elastic.agreement import start_alike
from unisono.elastic.model_state import names_of, state_of
from unisono.elastic.state_transfer import Progress
from unisono.trainer.checkpoint_restorer import RESIDUAL, CheckpointRestorer, CheckpointScope, RestoredState
from unisono.trainer.loop_models import LoopModels
from unisono.trainer.replica import Replica

EXTRA = "kept/"
"""The prefix of the names of a custom loop's registered state in a checkpoint."""


class Checkpointer:
    """Takes and loads the run's checkpoints, as far as one worker takes part in them.

    Args:
        writer: writes this worker's part; None on a host that does not see the run's directory.
        every: the number of steps between two checkpoints; 0: one checkpoint, at the end.
        dp_replicate: the communicator of the workers that have the same shard in all replicas; None: of all workers.
        extra: further tensors of checkpoints, the same on all workers.
        newest: on worker 0, returns the checkpoint that `roll_back` restores.

    Attributes:
        committed: the step of the newest complete checkpoint; 0: there is none.
        last: the step of the checkpoint that was taken last; 0: none was taken.
        restored: the state that was loaded besides model and optimizer.
    """

    def __init__(
        self,
        scope: CheckpointScope,
        writer: Writer | None = None,
        every: int = 0,
        *,
        dp_replicate: Communicator | None = None,
        extra: Mapping[str, Tensor] | None = None,
        newest: Callable[[], OpenedCheckpoint | None] = lambda: None,
    ) -> None:
        self.scope, self._writer, self.every = scope, writer, every
        self._comm, self._dp_replicate = scope.comm, dp_replicate or scope.comm
        self._extra, self._newest = extra or {}, newest
        self._restorer = CheckpointRestorer(scope)
        self.restored = RestoredState(0, {}, {})
        self._holders: list[dict[str, TensorShard]] | None = None  # the shards of each worker
        self._writes_residuals = False
        self._replica: Replica | LoopModels | None = None
        self._pending = 0  # the step whose checkpoint is not yet committed or abandoned; 0: none
        self.last = self.committed = 0
        self._prepared = False

    @property
    def detector(self) -> AnomalyDetector:
        """See `CheckpointScope`."""
        return self.scope.detector

    # ---- restore ----

    def broadcast_initial_weights(self) -> None:
        """Collective: give all replicas the weights and the optimizer state of the first replica.

        Raises:
            InvalidInput: workers have built different models or optimizers.
        """
        start_alike(self._dp_replicate, self.scope.model, self.scope.optimizer)

    def resume(self, found: OpenedCheckpoint | None) -> int:
        """Collective: load the checkpoint that worker 0 has `found`. Returns its steps, or 0 if there is none.

        Raises:
            CheckpointMismatch: see `CheckpointRestorer.restore`.
        """
        return self._restore(found) or 0

    def set_progress(self, progress: Progress) -> None:
        """Continue from the state of `progress`, which all workers have from an earlier view of the run."""
        self.restored = RestoredState(progress.steps, dict(progress.shared), {})
        self.last = self.committed = progress.committed

    def roll_back(self) -> int | None:
        """Collective, when a step was dropped: load the newest checkpoint, and return its steps.

        Returns None, and changes nothing, if there is no checkpoint.
        """
        assert self._replica is not None
        self._conclude()
        if self._writer:
            self._writer.finish()  # what has been committed is on disk
        done = self._restore(self._newest() if self._comm.rank == 0 else None)
        if done is not None:
            self._replica.sync.load_residuals(self.restored.residuals)
            self._replica.begin()
        return done

    def _restore(self, found: OpenedCheckpoint | None) -> int | None:
        restored = self._restorer.restore(found)
        if restored is None:
            return None
        self.restored = restored
        self.last = self.committed = restored.step
        return restored.step

    def bind(self, replica: Replica | LoopModels) -> None:
        """Collective: checkpoints contain the state of `replica` from now on, which continues from `restored`."""
        self._replica = replica
        if self.restored.shared:
            replica.sync.load_state_dict(self.restored.shared)
        if self.restored.residuals:
            replica.sync.load_residuals(self.restored.residuals)
        if replica.has_residuals:  # each worker writes its own
            writes = torch.tensor([self._writer is not None])
            self._writes_residuals = bool(self._comm.gather(writes).wait().all())

    # ---- take ----

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written; the same on all workers."""
        return self._pending > 0

    @property
    def share_status(self) -> float:
        """The status of this worker's part of the pending checkpoint, which was taken after step s.

        s: the part is on disk, or there is none to write; -s: it has failed; 0: it is being written, or no checkpoint
        is pending.
        """
        if self._writer is None or not self._pending:
            return float(self._pending)
        status = self._writer.state
        return float(self._pending * ((status.written == self._pending) - (status.failed == self._pending)))

    def due(self, done: int) -> bool:
        """Whether a checkpoint is to be taken after `done` steps in all, if replicas are synchronized."""
        return bool(self.every) and done // self.every > self.last // self.every

    def wait_staged(self) -> None:
        """Wait until the pending checkpoint has its copy of the weights; called right before these change."""
        if self._writer and self._pending:
            self._writer.staged()

    def after_step(self, done: int, statuses: Sequence[float], take: bool = True) -> None:
        """Collective, after `done` steps in all: commit or abandon the pending checkpoint, and take the next one.

        Args:
            statuses: the `share_status` of all workers.
            take: whether to take a checkpoint that is due.
        """
        self._act_on(statuses)
        if self._writer and self.every and not self._prepared:  # the optimizer has its state from the first step on
            tensors = self._tensors()
            self._writer.prepare(tensors, self._agreed_holders(tensors))
            self._prepared = True
        if take and self.due(done):
            self._take(done)

    def abandon(self, done: int) -> None:
        """Collective: abandon the pending checkpoint if it was taken after `done` steps."""
        if self._pending != done:
            return
        if self._writer:
            self._writer.finish()
        self._comm.gather(torch.zeros(1)).wait()  # no worker writes any more
        if self._writer:
            self._writer.abandon(done)
            self._writer.finish()
        self._comm.gather(torch.zeros(1)).wait()  # no worker writes this step's checkpoint again before it is removed
        self._pending, self.last = 0, done - 1

    def finish(self, done: int) -> None:
        """Collective, after the last step: take the last checkpoint and wait until it is complete."""
        if self.last != done:
            self._take(done, unchanging=True)
        self._conclude()

    def _take(self, done: int, unchanging: bool = False) -> None:
        """Collective: take a checkpoint. `unchanging`: whether no tensor changes before `_conclude`."""
        self._conclude()
        if self._writer:
            _, numbers = state_of(self.scope.optimizer, self.scope.model)
            tensors = self._tensors()
            holders = self._agreed_holders(tensors)
            write = self._writer.write if unchanging else self._writer.stage
            meta = {**self.scope.meta, "numbers": self._all_numbers(numbers), "judged": self.detector.state()}
            write(done, tensors, meta | names_of(self.scope.model), holders)
        self._pending = self.last = done

    def _conclude(self) -> None:
        """Collective: wait until the pending checkpoint is committed or abandoned."""
        if not self._pending:
            return
        if self._writer:
            self._writer.finish()
        status = torch.tensor([self.share_status], dtype=torch.float64)
        self._act_on(self._comm.gather(status).wait().view(-1).tolist())
        if self._writer:
            self._writer.finish()
        self._comm.gather(status).wait()  # no worker continues before worker 0 has committed

    def _act_on(self, statuses: Sequence[float]) -> None:
        """Commit or abandon the pending checkpoint, once all parts are written or have failed."""
        if not self._pending or not all(abs(status) == self._pending for status in statuses):
            return
        failed = [rank for rank, status in enumerate(statuses) if status < 0]
        if self._writer and self._comm.rank == 0:
            if failed:
                self._writer.abandon(self._pending, failed)
            else:
                self._writer.commit(self._pending)
        self.committed = self.committed if failed else self._pending
        self._pending = 0

    # ---- what a checkpoint holds ----

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint, by name."""
        model, replica = self.scope.model, self._replica
        state, _ = state_of(self.scope.optimizer, model)
        tensors = {f"model/{name}": t.detach() for name, t in model.named_parameters()}
        # The next forward pass writes into buffers before weights change, while the copy may still be in progress.
        tensors |= {f"model/{name}": t.clone() for name, t in model.named_buffers()}
        tensors |= {f"optimizer/{name}": t for name, t in state.items()}
        residuals = replica.sync.residual_state() if replica and self._writes_residuals else {}
        tensors |= {f"{RESIDUAL}{self._comm.rank}/{name}": t for name, t in residuals.items()}
        tensors |= {f"{EXTRA}{name}": t for name, t in self._extra.items()}
        shared = replica.sync.state_dict() if replica else {}
        return tensors | {f"sync/{name}": t for name, t in shared.items()}

    def _agreed_holders(self, tensors: Mapping[str, Tensor]) -> list[dict[str, TensorShard]] | None:
        """Collective: the shards that each worker has; None if all workers have all tensors."""
        if self.scope.parts is None and not self._writes_residuals:
            return None
        boxes = {}
        for name, tensor in tensors.items():
            box = self.scope.box(name)
            if box is not None and tuple(tensor.shape) == box.size:
                boxes[name] = box
        reports = gather_text(self._comm, encode_shards(shards_of(tensors, boxes)))
        holders = [decode_shards(text) for text in reports]
        if holders != self._holders:  # the writer compares by identity
            self._holders = holders
        return self._holders

    def _all_numbers(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Collective in a sharded replica: the plain numbers in the optimizer states of all its workers."""
        if self.scope.parts is None:
            return dict(numbers)
        reports = gather_text(self._comm, json.dumps(numbers))
        return {name: number for text in reversed(reports) for name, number in json.loads(text).items()}
