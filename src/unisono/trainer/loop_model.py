"""One model of a custom loop: each backward pass of the user's ends with the mean over all workers in ``grad``.

Three moments of a backward pass are seen, without a change to the model:

    before a gradient is added ──► set aside the ``grad`` that is there
    after it was added ──────────► take the gradient, and give it to the synchronizer; full buckets leave meanwhile
    at the end of the pass ──────► wait for the means, and add what was set aside

So ``grad`` has the meaning that it has under torch's DistributedDataParallel (Li et al. 2020): a user may change it
before the optimizer's step, on all workers alike, or discard it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.comm.process_groups import ProcessGroups
from unisono.compress import Compressor
from unisono.errors import CommunicationError, InvalidInput
from unisono.layout import LocalModel
from unisono.sync import BoundSynchronizer, LocalGradients, Loop, PendingUpdate, Synchronizer
from unisono.sync.server.local_push import PushAtStep
from unisono.trainer.gradient_arrivals import GradientArrivals
from unisono.trainer.loop_buffers import LoopBuffers
from unisono.trainer.replica import synchronize_replicas
from unisono.trainer.step_control import StepControl


@dataclass(frozen=True)
class LoopShape:
    """What the steps of a loop have in common.

    Args:
        micro_batches: of one step, over all workers.
        reference_weight: the usual sum of a step's weights, by which weights are divided before gradients are summed.
        control_width: the count of the caller's numbers in the control word.
        planned: `World.steps` assigns the data, so that a step may be repeated.
        group_may_grow: a group of one goes through the synchronizer as any other group, since workers may join it.
    """

    micro_batches: int
    reference_weight: float
    control_width: int
    planned: bool
    group_may_grow: bool


@dataclass(frozen=True)
class LoopOptions:
    """How a loop takes its steps: the arguments of `World.bind`."""

    sync: Synchronizer
    compress: Compressor
    clip: float | None
    overlap: bool
    backward_passes: int


class LoopModel:
    """A model in a custom loop, bound to the other workers of one view after the other.

    A *round* is one exchange of gradients. Per step: `begin_pass`; per micro-batch of this worker `begin_micro_batch`
    and the user's forward and backward passes; `close_round` before the gradients of the last micro-batch and
    `finish_round` after them; `take_step`, and `fold_buffers`.

    Args:
        parameters: of `local`, by name, without those of models that were bound before.
        optimizer: of these parameters, where the synchronizer needs to know it.
        exchanges: whether gradients that arrive now are exchanged.
        on_gradient: called before each gradient that is exchanged.

    Attributes:
        local: the model.
        rounds: how many have been finished.
        closed: whether this round's gradients are those of this worker's last micro-batch.
        update: the update of the last round, whose step has not been taken yet.
    """

    def __init__(
        self,
        local: LocalModel,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        options: LoopOptions,
        exchanges: Callable[[], bool],
        on_gradient: Callable[[LoopModel], None],
    ) -> None:
        self.local, self._optimizer, self._options = local, optimizer, options
        self._exchanges, self._on_gradient = exchanges, on_gradient
        self.parameters = dict(parameters)
        self.rounds = 0
        self.update: PendingUpdate | None = None
        self._written: dict[str, weakref.ref[Tensor]] = {}  # what the last round left in ``grad``
        self._bound: BoundSynchronizer | None = None
        self._open = self.closed = self._prepared = False
        self._arrivals = GradientArrivals(self.parameters, exchanges, self._arrived)

    # ---- a view ----

    @property
    def bound(self) -> bool:
        """Whether the model is bound to the workers of a view."""
        return self._bound is not None

    @property
    def lossless(self) -> bool:
        """Whether the compressor changes no gradient."""
        return all(self._options.compress.is_lossless(p.dtype) for p in self.parameters.values())

    @property
    def sync(self) -> BoundSynchronizer:
        """The synchronizer of this view."""
        assert self._bound is not None
        return self._bound

    def bind(self, comm: Communicator, shape: LoopShape) -> None:
        """Collective: exchange gradients with the workers of `comm` from now on."""
        self._shape, self._comm, groups = shape, comm, ProcessGroups.replicated(comm)
        self._meeting = comm.channel("meeting")
        self._bound = self._synchronizer(comm)
        self.has_residuals = comm.size > 1 and not self._is_lossless_sum()
        self._control = StepControl(groups, self.sync, shape.micro_batches)
        self._buffers = LoopBuffers(
            self.local, shape.micro_batches, groups, self.sync.synchronous, may_undo=shape.planned
        )
        self._micro_batch, self._weight = -1, 0.0
        self._failed: CommunicationError | None = None
        self.update, self._prepared = None, False
        self._begin_round()
        self.begin_pass()
        self._arrivals.attach()

    def train(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Collective in a view, between two rounds: train these `parameters` of the model from now on.

        Residuals of error feedback begin anew.
        """
        bound = self.bound
        self._arrivals.release()
        self.local, self.parameters = LocalModel.whole(self.local.model), dict(parameters)
        self._arrivals = GradientArrivals(self.parameters, self._exchanges, self._arrived)
        if bound:
            pass_, buffers = (self._micro_batch, self._weight), self._buffers
            self.bind(self._comm, self._shape)
            buffers.close()  # only now: if a worker is lost in `bind`, the step is void, and its buffers are undone
            self.begin_micro_batch(*pass_)
        else:
            self.attach()

    def attach(self) -> None:
        """Put hooks on the parameters, unless they are there."""
        self._arrivals.attach()

    def release(self) -> None:
        """Give the model back without hooks. May be called twice."""
        self._arrivals.release()
        self.unbind()

    def unbind(self) -> None:
        """The view has ended. May be called twice."""
        if self._bound is not None:
            self._buffers.close()
            self._bound = None

    def _is_lossless_sum(self) -> bool:
        chosen = {self._options.compress.choose(name, p.shape) for name, p in self.parameters.items()}
        return all(each.is_additive and not each.keeps_residual for each in chosen)

    def _synchronizer(self, comm: Communicator) -> BoundSynchronizer:
        shape, options = self._shape, self._options
        if comm.size == 1 and not shape.group_may_grow and self.lossless:
            return LocalGradients(self.parameters)  # with no other worker and nothing to round
        loop = Loop(
            self._optimizer, shape.micro_batches, 2 * shape.micro_batches + shape.control_width, options.overlap,
            self.local.sparse, shape.group_may_grow, shape.reference_weight, visible=True)  # fmt: skip
        compress = options.compress.for_sums_of(shape.micro_batches)
        bound = options.sync.bind(self.parameters, comm.channel("gradients"), compress, loop)
        if bound.optimizer_on_server:
            return PushAtStep(bound, self.parameters, shape.reference_weight, options.clip)
        return bound

    # ---- a pass through this worker's micro-batches ----

    def begin_pass(self) -> None:
        """Before the first micro-batch."""
        self._control.begin()
        self._scale: float | None = None
        self._buffers.begin()

    def begin_micro_batch(self, micro_batch: int, weight: float) -> None:
        """Before the forward pass of `micro_batch`, whose weight in the mean is `weight`."""
        self._buffers.end_forward(ran=self._arrivals.any)
        if self.open:
            self._give(self.sync.fold)
        self._micro_batch, self._weight = micro_batch, weight
        self._control.set_weight(micro_batch, weight)
        self._arrivals.begin_micro_batch()
        self._buffers.begin_micro_batch(micro_batch)

    def fold_buffers(self) -> None:
        """Collective: fold the buffers, once this worker has computed all of its micro-batches."""
        self._buffers.end_forward(ran=self._arrivals.any)
        self._buffers.send()
        self._buffers.fold()

    def drop(self) -> None:
        """In place of the optimizer's step: discard gradients, changes of buffers, and what the compressor left out."""
        self._buffers.undo()
        self.clear_gradients()
        self._prepared = False

    # ---- a round ----

    @property
    def open(self) -> bool:
        """Whether gradients have arrived since the last round."""
        return self._open

    @property
    def holds_step(self) -> bool:
        """Whether gradients have been exchanged whose step was not taken."""
        return self.update is not None and any(p.grad is not None for p in self.parameters.values())

    def _begin_round(self) -> None:
        self._open = self.closed = False

    def _prepare(self) -> None:
        """Before the first gradient of a round. Gradients of the round before, if they are still there, add up."""
        if not self._prepared:
            if self.update is not None and self.sync.gradients_only:
                self.update.apply(lambda: None)
            self.update = None
            self.sync.begin()
            self._prepared = True

    def close_round(self, extra: list[float]) -> None:
        """The gradients that follow are those of this worker's last micro-batch.

        Args:
            extra: this worker's numbers for the control word.
        """
        self._prepare()
        self.closed = True
        if not self._shape.planned:  # overlap the exchange of buffers with backward
            self._buffers.end_forward(ran=True)
            self._give(self._buffers.send)
        self._give(self._control.send, extra)

    def finish_round(self) -> list[float] | None:
        """Collective: wait for the mean gradient, and add it to ``grad``.

        Returns:
            The callers' numbers of all workers; None if they were not exchanged in this round.

        Raises:
            PeerLost, MessageMismatch: also the first of those that occurred in a backward pass.
        """
        for name, gradient in self._arrivals.take_accumulated():
            self._offer(name, gradient)
        self._give(self.sync.fold)
        if self._failed is not None:
            raise self._failed
        self._control.finish()
        update = self.sync.settle()
        self._arrivals.restore()
        update.write(self._scale_of(update))
        self._written = {name: weakref.ref(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        self.update, self.rounds, self._prepared = update, self.rounds + 1, False
        self._begin_round()
        return self._extra(update)

    def take_step(self, step: Callable[[], Any]) -> list[float] | None:
        """Take the optimizer's `step` of the gradients as they are, and exchange what is due after it.

        Returns:
            As `finish_round`.
        """
        update, self.update = self.update, None
        if update is None:
            step()
            return None
        update.apply(step)
        self._prepare()
        return self._extra(update)

    def clear_gradients(self) -> None:
        """The step has no gradient, and what was computed for it is dropped."""
        self._arrivals.clear()
        self._begin_round()
        self.update, self._prepared = None, False

    def synchronize(self) -> None:
        """Collective, between two steps: make the model, its buffers and optimizer state equal on all workers."""
        synchronize_replicas(self.sync, self._meeting, self.local.model, self._optimizer)
        if not self.sync.synchronous:
            self._buffers.begin()

    def _scale_of(self, update: PendingUpdate) -> float:
        """The factor for a step whose weights do not add up to the usual sum; it is that of the pass's first round."""
        if self._scale is None or not self._shape.planned:
            count = self._shape.micro_batches
            total = math.fsum(update.control[count : 2 * count])
            self._scale = self._shape.reference_weight / total if total else 1.0
        return self._scale

    def _extra(self, update: PendingUpdate) -> list[float] | None:
        return update.control[2 * self._shape.micro_batches :] if update.agreed else None

    # ---- gradients that the user writes ----

    def check_gradients(self) -> None:
        """Raise `InvalidInput` if a ``grad`` was set without a backward pass, so that it is this worker's own."""
        for name, p in self.parameters.items():
            written = self._written.get(name)
            if p.grad is not None and (written is None or written() is not p.grad):
                raise InvalidInput(
                    "grad", name, "it was set without a backward pass, so it is that of this worker's data alone",
                    "call world.average_gradients() after setting the gradients")  # fmt: skip

    def take_gradients(self, weight: float) -> None:
        """Every ``grad`` as it is now is this worker's part of the mean, with that `weight`."""
        self._weight = weight
        self._arrivals.accumulate_all()
        self._open = True

    def _arrived(self, name: str, gradient: Tensor) -> None:
        self._open = True
        if not self.closed:
            self._on_gradient(self)
        self._offer(name, gradient)

    def _offer(self, name: str, gradient: Tensor) -> None:
        if self._failed is None:
            self._prepare()
            self._give(self.sync.offer, name, gradient, self._weight / self._shape.reference_weight)

    def _give(self, give: Callable[..., None], *arguments: Any) -> None:
        """Call ``give(*arguments)``. A worker that is lost in it is reported by `finish_round`: autograd would wrap the
        error, and other workers still wait for this one's gradients."""
        try:
            give(*arguments)
        except CommunicationError as error:
            self._failed = self._failed or error
