"""What one worker trains, from view to view, and what undoes steps that are not committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.elastic.agreement import start_alike
from unisono.elastic.extra_state import ExtraState
from unisono.elastic.snapshot import Snapshot
from unisono.elastic.state_transfer import Progress, digest_of, named_state
from unisono.layout import LocalModel


class TrainingState:
    """Model, optimizer and progress of one worker.

    Args:
        local_steps: replicas take local steps, which are committed at the next synchronization.
        extra: further state that a custom loop has registered.

    Attributes:
        progress: the steps that are in model and optimizer.
        joined: whether this is a state of the run: received, loaded or agreed on in a view.
        snapshot: of the state of the last commit, where a step changes the state before it is committed.
    """

    def __init__(
        self,
        local: LocalModel | None = None,
        optimizer: Optimizer | None = None,
        *,
        local_steps: bool = False,
        extra: ExtraState | None = None,
    ) -> None:
        self._local, self._optimizer = local, optimizer
        self.local_steps, self.extra = local_steps, extra
        self.progress, self.joined = Progress(), False
        self.snapshot: Snapshot | None = None
        self._extra_before: dict[str, Tensor] | None = None

    @property
    def built(self) -> bool:
        """Whether there are a model and an optimizer."""
        return self._local is not None

    @property
    def local(self) -> LocalModel:
        """This worker's part of the model. Raises `AssertionError` before `build`."""
        assert self._local is not None
        return self._local

    @property
    def model(self) -> nn.Module:
        """A module with the tensors of `local`."""
        return self.local.local

    @property
    def optimizer(self) -> Optimizer:
        """Of `model`. Raises `AssertionError` before `build`."""
        assert self._optimizer is not None
        return self._optimizer

    def build(self, local: LocalModel, optimizer: Optimizer) -> None:
        """Train `local` by `optimizer` from now on."""
        self._local, self._optimizer = local, optimizer

    def drop_model(self) -> None:
        """Drop the model, whose process groups belong to a view that has ended."""
        self._local = self._optimizer = self.snapshot = None

    def allow_roll_back(self) -> None:
        """Steps may be lost with a worker: with local steps, each `commit` takes a snapshot from now on."""
        if self.local_steps:
            self.take_snapshots(True)

    def take_snapshots(self, wanted: bool) -> None:
        """Whether each `commit` takes a snapshot from now on, since a step may change the state before it counts."""
        self.snapshot = (self.snapshot or Snapshot()) if wanted else None

    def broadcast_initial(self, comm: Communicator) -> None:
        """Collective: all workers of `comm` start from the weights and the optimizer state of the first.

        Raises:
            InvalidInput: they have built different models or optimizers.
        """
        start_alike(comm, self.model, self.optimizer)

    def begin_step(self) -> None:
        """Before a step that may not be committed: remember the extra state, if that of the last commit is not."""
        if self.extra is not None and self._extra_before is None:
            self._extra_before = self.extra.state_dict()

    def set_steps(self, steps: int) -> None:
        """So many steps are in model and optimizer, committed or not."""
        self.progress = replace(self.progress, steps=steps)

    def commit(self, shared: Mapping[str, Tensor] | None = None, *, progress: Progress | None = None) -> None:
        """Commit all steps that are in model and optimizer.

        Args:
            shared: the synchronizer's state, if that is new.
            progress: replaces `progress`, which is otherwise kept.
        """
        self._extra_before = None
        self.progress = progress or self.progress
        if shared is not None:
            self.progress = replace(self.progress, shared=shared)
        if self.snapshot is not None:
            self.progress = self.snapshot.take(self.model, self.optimizer, self.progress)

    def roll_back(self) -> None:
        """Undo the steps since the last commit. Without local steps, a step changes nothing before it is committed."""
        if self.snapshot is not None and self.built:
            self.progress = self.snapshot.restore(self.model, self.optimizer) or self.progress
        if self.extra is not None and self._extra_before is not None:
            self.extra.load_state_dict(self._extra_before)
            self._extra_before = None

    def digest(self) -> str:
        """Digest of the replicated state, without extra state, which may differ between workers.

        Empty before this worker has joined a view, and for a sharded replica between two views: its shards are matched
        by `ShardVersion` instead.
        """
        if not self.joined or not self.built:
            return ""
        return digest_of(*named_state(self.model, self.optimizer, self.progress), local_steps=self.local_steps)
