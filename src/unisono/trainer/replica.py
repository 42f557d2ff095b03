"""One copy of the model, or this worker's shard of one, bound to the other replicas."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.comm.process_groups import ProcessGroups
from unisono.compress import Compressor
from unisono.elastic.model_state import state_of, weights_of
from unisono.elastic.transfer import state_digest
from unisono.layout import LocalModel
from unisono.sync import BoundSynchronizer, LocalGradients, Loop, PendingUpdate, Synchronizer
from unisono.sync.flat_weights import relative
from unisono.trainer.buffer_sync import StageBuffers
from unisono.trainer.compatibility import check_fit
from unisono.trainer.gradient_hooks import GradientHooks
from unisono.trainer.lazy_parameters import LazyParameters
from unisono.trainer.step_control import StepControl

LOG = logging.getLogger("unisono")


@dataclass(frozen=True)
class ReplicaOptions:
    """How a replica takes its steps.

    Args:
        micro_batches: of one step, over all workers.
        reference_weight: the usual sum of a step's weights. Weights are divided by it before gradients are summed, so
            that the sum usually is the mean.
        clip: largest 2-norm of the mean gradient; None does not clip.
        overlap: exchange gradients during backward.
        control_width: how many numbers of the caller the control word has.
        lazy: weights may arrive during the forward pass, module by module, if the synchronizer can do so.
        may_drop: steps may be dropped. A gradient that the compressor cannot represent then sets the loss of its
            micro-batch to `NOT_REPRESENTABLE` instead of raising an error.
        may_repeat: a step is computed again after a worker was lost in it.
        group_may_grow: a group of one goes through the synchronizer as any other group, since workers may join it.
    """

    micro_batches: int
    reference_weight: float
    clip: float | None = None
    overlap: bool = True
    control_width: int = 0
    lazy: bool = True
    may_drop: bool = False
    may_repeat: bool = False
    group_may_grow: bool = False


class Replica:
    """A model and its optimizer, bound to the other replicas.

    Per step: `begin`; per micro-batch of this worker `begin_micro_batch`, the forward pass, `end_forward`, `backward`;
    then `settle` and `apply`. The control word travels with the gradients: the losses of micro-batches ``0..n-1``,
    their weights, then further numbers of the caller.

    Attributes:
        local: this worker's part of the model.
        sync: its bound synchronizer.
        buffers: what forward passes write into, stage by stage.
        has_residuals: whether compressed messages may leave out what ``sync.residual_state()`` then has; the same on
            all workers.
        finite: whether the compressor refuses what is not finite, so that it never enters a mean.
        waited_seconds: the time for which forward passes have waited for weights in flight.
    """

    def __init__(
        self,
        local: LocalModel,
        optimizer: Optimizer,
        groups: ProcessGroups,
        sync: Synchronizer,
        compress: Compressor,
        options: ReplicaOptions,
    ) -> None:
        self.local, self.model, self.optimizer = local, local.local, optimizer
        self._groups, self.options = groups, options
        check_fit(self.model, optimizer)
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        compress = compress.for_sums_of(options.micro_batches)
        self.sync = self._bind(sync, compress, parameters)
        # Weighted losses make autograd's own sum the mean, where it is this worker's or this replica's alone.
        own_mean = self.sync.local_gradients and not groups.is_sharded
        self._weighted = own_mean or groups.is_sharded
        self._comm = groups.dp_replicate.channel("meeting")
        chosen = {compress.choose(name, p.shape) for name, p in parameters.items()}
        lossless = all(each.is_additive and not each.keeps_residual for each in chosen)
        self.has_residuals = groups.dp_replicate.size > 1 and not lossless
        self.finite = all(each.finite for each in chosen) and not own_mean
        self._control = StepControl(groups, self.sync, options.micro_batches)
        self.waited_seconds = 0.0
        self.buffers = StageBuffers(
            local, options.micro_batches, groups, self.synchronous,
            may_undo=options.may_drop or options.may_repeat, adopts=False)  # fmt: skip
        self._hooks = GradientHooks(local, optimizer, self._offer)
        self._lazy: LazyParameters | None = None
        with ExitStack() as undo:  # a worker may be lost while this one communicates, and the model is bound again then
            undo.callback(self.unhook)
            self.begin()
            lazy = self.sync.lazy_parameters and options.lazy and not groups.is_sharded
            if lazy and LazyParameters.fits(self.model):
                names = {id(p): name for name, p in parameters.items()}
                self._lazy = LazyParameters(self.model, names, self._wait_parameters)
            self._hooks.attach(during_backward=not own_mean and local.pipeline is None, exchanged=not own_mean)
            undo.pop_all()

    def _bind(
        self, sync: Synchronizer, compress: Compressor, parameters: Mapping[str, nn.Parameter]
    ) -> BoundSynchronizer:
        """Collective."""
        options, comm = self.options, self._groups.dp_replicate
        lossless = all(compress.is_lossless(p.dtype) for p in parameters.values())
        if comm.size == 1 and not options.group_may_grow and lossless:
            return LocalGradients(parameters)  # with no other replica and nothing to round
        loop = Loop(
            self.optimizer, options.micro_batches, 2 * options.micro_batches + options.control_width, options.overlap,
            self.local.sparse, options.group_may_grow, options.reference_weight)  # fmt: skip
        return sync.bind(parameters, comm.channel("gradients"), compress, loop)

    @property
    def is_sharded(self) -> bool:
        """Whether the replica is sharded over several workers."""
        return self._groups.is_sharded

    @property
    def synchronous(self) -> bool:
        """Whether replicas are equal after every step."""
        return self.sync.synchronous

    def _wait_parameters(self, names: Collection[str] | None) -> None:
        began = self._comm.now()
        self.sync.wait_parameters(names)
        self.waited_seconds += self._comm.now() - began

    def synchronize(self) -> None:
        """Collective, between two steps: make all replicas and the states of their optimizers equal."""
        synchronize_replicas(self.sync, self._comm, self.model, self.optimizer)
        if not self.synchronous:
            self.buffers.begin()  # the next step starts from these buffers

    def begin(self) -> None:
        """Begin a step. What was computed for a step that was not applied is dropped."""
        self._control.begin()
        self._hooks.begin()
        self.sync.begin()
        for parameter in self.model.parameters():
            parameter.grad = None
        self.buffers.begin()

    def begin_micro_batch(self, micro_batch: int, weight: float) -> None:
        """Before the forward pass of `micro_batch`, whose weight in the mean is `weight`."""
        self._hand_over(self.sync.fold)
        self._micro_batch, self._weight = micro_batch, weight
        self._control.set_weight(micro_batch, weight)
        if self.local.pipeline is None:
            self.buffers.before()
        if self._lazy:
            self._lazy.enter()

    def end_forward(self, loss: float = 0.0, *, last: bool, extra: list[float] | None = None) -> None:
        """After the forward pass and before backward.

        Args:
            last: no further micro-batch of this worker in this step.
            extra: the caller's numbers for the control word.

        Raises:
            PeerLost, MessageMismatch
        """
        self.local.unsharding.backward(last)
        self._control.set_loss(self._micro_batch, loss)
        if self.local.pipeline is None:
            self.buffers.after(self._micro_batch)
        if last:
            self.buffers.send()
            self._control.send(extra or [])

    def backward(self, loss: Tensor) -> None:
        """The backward pass of the micro-batch's mean `loss`, a scalar."""
        scale = self.loss_scale(self._weight)
        weighted = loss * scale if self._weighted and scale != 1.0 else loss
        self.local.unsharding.connect(weighted).backward()

    def loss_scale(self, weight: float) -> float:
        """The factor of the loss of a micro-batch with that weight, so that gradients add up to the mean."""
        return weight / self.options.reference_weight

    def settle(self) -> Step:
        """Wait for the mean over the global batch. Raises `PeerLost`, `MessageMismatch`."""
        if self._hooks.finish():
            self._hand_over(self.sync.fold)
        self._control.finish()
        return Step(self, self.sync.settle())

    def norm(self, change: PendingUpdate) -> float:
        """The 2-norm of `change` over all of the replica's parameters."""
        if not self._groups.is_sharded:
            return change.norm()
        square = torch.tensor([change.norm(self.local.counted_elsewhere) ** 2], dtype=torch.float64)
        return math.sqrt(float(self._groups.model.sum(square).wait()))

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors whose bits are equal on all synchronous replicas between two steps: weights, buffers, optimizer
        state."""
        state, _ = state_of(self.optimizer, self.model)
        return {name: t.detach() for name, t in weights_of(self.model).items()} | {f"/{n}": t for n, t in state.items()}

    def digest(self) -> float:
        """A digest of `state`: a number from 1 that a float64 of the control word holds exactly."""
        return 1.0 + (int(state_digest(self.state, {}), 16) >> 76)

    def copy_state_from(self, source: int) -> None:
        """Collective, between two steps: copy the `state` of replica `source` to all others."""
        copy_from(self._comm, source, self.state)
        self.begin()

    def apply(self, change: PendingUpdate, step: Callable[[], Any] | None, scale: float) -> Any:
        """Fold the buffers and take the optimizer's step, of ``scale * change``; see `Step.apply`."""
        self.buffers.fold()
        result = change.apply(partial(self.local.step, step or self.optimizer.step), scale)
        if self._lazy:
            self._lazy.applied()
        else:
            self.sync.wait_parameters()
        return result

    def drop(self) -> None:
        """Drop a settled step. Parameters and buffers have the values from before it."""
        self.buffers.drop()
        self.begin()

    def discard_step(self) -> None:
        """Drop what was computed for a step that will not be applied; the model has the state after the last step."""
        self.buffers.undo()
        for parameter in self.model.parameters():
            parameter.grad = None

    def unbind(self) -> None:
        """Detach the model: without hooks, and with all weights in its parameters."""
        self.unhook()
        if self._lazy:
            self.sync.wait_parameters()

    def unhook(self) -> None:
        """Remove this replica's hooks from the model."""
        if self._lazy:
            self._lazy.close()
        self._hooks.close()
        self.buffers.close()

    def _offer(self, name: str, gradient: Tensor) -> None:
        """Give a complete gradient of the current micro-batch to the synchronizer."""
        if self._lazy:
            self._lazy.came(name)
        if not self._control.is_finite(self._micro_batch):
            return  # such a step is not applied
        weight = 1.0 if self._weighted else self.loss_scale(self._weight)
        self._hand_over(self.sync.offer, name, gradient.detach() if gradient.requires_grad else gradient, weight)

    def _hand_over(self, give: Callable[..., None], *arguments: Any) -> None:
        """Call ``give(*arguments)``; mark this micro-batch if the synchronizer cannot represent its gradients."""
        try:
            give(*arguments)
        except ValueError as error:
            if not self.options.may_drop:
                raise
            LOG.warning("micro-batch %d, %s", self._micro_batch, error)
            self._control.mark_not_representable(self._micro_batch)


class Step:
    """The mean gradient of one step, not yet applied: of all workers if synchronous, else of this worker.

    Attributes:
        losses, weights: of the step's micro-batches; 0 for those of other workers that have not been exchanged.
    """

    def __init__(self, replica: Replica, change: PendingUpdate) -> None:
        self._replica, self._change = replica, change
        self._norm: float | None = None
        self._read_control()

    def _read_control(self) -> None:
        n = self._replica.options.micro_batches
        self.losses, self.weights = self._change.control[:n], self._change.control[n : 2 * n]

    @property
    def loss(self) -> float:
        """The weighted mean of the micro-batches' losses, summed in their order."""
        total = math.fsum(self.weights)
        return math.fsum(loss * w for loss, w in zip(self.losses, self.weights)) / total if total else math.nan

    @property
    def extra(self) -> list[float] | None:
        """The caller's numbers in all workers' control words; None where they were not exchanged in this step."""
        return self._change.control[2 * self._replica.options.micro_batches :] if self._change.agreed else None

    def norm(self) -> float:
        """Collective, before `apply`: the 2-norm of the mean gradient over all of the replica's parameters."""
        if self._norm is None:
            self._norm = self._replica.norm(self._change) * self._weight_scale()
        return self._norm

    def drop(self) -> None:
        """Drop the step instead of applying it. Parameters and buffers have the values from before the step."""
        self._replica.drop()

    def apply(self, step: Callable[[], Any] | None = None) -> Any:
        """Fold the buffers, clip the mean and take the optimizer's step; returns what that returns.

        With lazy parameters, the new weights have arrived after ``sync.wait_parameters()``.
        """
        result = self._replica.apply(self._change, step, self._scale())
        if self._change.agreed:  # perhaps only now
            self._read_control()
        self._replica.begin()
        return result

    def _weight_scale(self) -> float:
        """The factor for a step whose weights do not add up to the usual sum."""
        total = math.fsum(self.weights)
        return self._replica.options.reference_weight / total if total else 1.0

    def _scale(self) -> float:
        scale = self._weight_scale()
        if self._replica.options.clip is not None:
            # The small number is torch.nn.utils.clip_grad_norm_'s.
            scale *= min(1.0, self._replica.options.clip / (self.norm() + 1e-6))
        return scale


def synchronize_replicas(sync: BoundSynchronizer, comm: Communicator, model: nn.Module, optimizer: Optimizer) -> None:
    """Collective, between two steps: make all replicas, their buffers and the states of their optimizers equal."""
    weight = sync.local_weight
    sync.synchronize()
    if not sync.synchronous:
        state, _ = state_of(optimizer, model)
        kept = {} if sync.optimizer_on_server else state
        average([*dict(model.named_buffers()).values(), *kept.values()], comm, weight)


def copy_from(comm: Communicator, source: int, tensors: Mapping[str, Tensor]) -> None:
    """Collective: overwrite `tensors` by those of worker `source`, all or none. Raises `PeerLost`."""
    received = []
    for _, tensor in sorted(tensors.items()):
        here = tensor.contiguous().clone().view(-1).view(torch.uint8)
        received.append((tensor, comm.broadcast(here, source).wait()))
    for tensor, there in received:  # only now, so that a worker lost meanwhile leaves no state half copied
        tensor.copy_(there.view(tensor.dtype).view(tensor.shape))


def average(tensors: Sequence[Tensor], comm: Communicator, weight: float | None = None) -> None:
    """Collective: replace each floating-point tensor by its mean over all workers, and the others by those of worker 0.

    Args:
        weight: of this worker in the mean; None: all workers weigh the same.
    """
    factor, total = relative(weight, comm)
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device, tensor.dim() == 0), []).append(tensor)
    with torch.no_grad():
        for (dtype, _, scalars), group in kinds.items():
            # Scalars count steps, alike on all workers: a weighted mean would be off by a rounding error.
            times, over = (1.0, float(comm.size)) if scalars else (factor, total)
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            real = dtype.is_floating_point
            parts = (comm.sum(flat.mul_(times)) if real else comm.broadcast(flat)).wait()
            for tensor, part in zip(group, parts.split([tensor.numel() for tensor in group])):
                tensor.copy_(part.view(tensor.shape) / over if real else part.view(tensor.shape))
