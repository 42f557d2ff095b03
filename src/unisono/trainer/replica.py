"""One copy of the model, or this worker's shard of one: it passes gradients to the synchronizer during backward."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from unisono.bad_steps import NOT_REPRESENTABLE
from unisono.comm import Communicator, Work
from unisono.comm.process_groups import ProcessGroups
from unisono.compress import Compressor
from unisono.elastic.model_state import state_of, weights_of
from unisono.elastic.transfer import state_digest
from unisono.errors import CommunicationError, InvalidInput
from unisono.layout import LocalModel
from unisono.sync import BoundSynchronizer, LocalGradients, Loop, PendingUpdate, Synchronizer, WorkItem
from unisono.sync.flat_weights import relative
from unisono.tasks.checks import check_optimizer
from unisono.trainer.buffer_sync import BufferSync
from unisono.trainer.lazy_parameters import LazyParameters

LOG = logging.getLogger("unisono")


class Replica:
    """A model and its optimizer, bound to the other replicas.

    Per step: `begin`; per micro-batch of this worker `begin_micro_batch`, the forward pass, `end_forward`, the backward
    pass; then `settle` and `apply`. Backward is run by `backward`, or by the user's own loop. The control word travels
    with the gradients: the losses of micro-batches ``0..n-1``, their weights, then `extra` numbers of the caller.

    Attributes:
        has_residuals: whether its messages may leave out what `residual_state` then has; the same on all workers.
        finite: whether the compressor refuses what is not finite, so that it never enters a mean.
        waited_seconds: the time for which forward passes have waited for weights in flight.

    Args:
        micro_batches: of one step, over all workers.
        reference: the usual sum of a step's weights. Weights are divided by it before gradients are summed, so that
            the sum usually is the mean.
        clip: largest 2-norm of the mean gradient; None does not clip.
        extra: how many numbers of the caller the control word has.
        listener: called with the name of each parameter whose gradient is complete, before the synchronizer gets it;
            given where backward is run by the user's own loop.
        held: this worker's shard of the replica, where it is sharded; `model` is then ``held.local``.
        wires: the process groups of a sharded replica; `comm` is then ``wires.dp_replicate``.
        lazy: whether weights may arrive during the forward pass, module by module, if the synchronizer can do so. No
            effect in the user's own loop, which may read weights at any time.
        drops: whether steps may be dropped. A gradient that the compressor cannot represent then sets the loss of its
            micro-batch to `NOT_REPRESENTABLE` instead of raising an error.
        repeats: whether a step is computed again after a worker was lost in it.
        awaits: whether a group of one may grow: it then goes through the synchronizer as any other group.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Communicator,
        *,
        sync: Synchronizer,
        compress: Compressor,
        micro_batches: int,
        reference: float,
        clip: float | None = None,
        overlap: bool = True,
        extra: int = 0,
        listener: Callable[[str], None] | None = None,
        held: LocalModel | None = None,
        wires: ProcessGroups | None = None,
        lazy: bool = True,
        drops: bool = False,
        repeats: bool = False,
        awaits: bool = False,
    ) -> None:
        check_fit(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self.held, self._wires = held or LocalModel.whole(model), wires or ProcessGroups.replicated(comm)
        self._count, self._reference, self._clip, self._drops = micro_batches, reference, clip, drops
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        compress = compress.for_sums_of(micro_batches)
        self._sync: BoundSynchronizer
        if comm.size == 1 and not awaits and all(compress.is_lossless(p.dtype) for p in parameters.values()):
            self._sync = LocalGradients(parameters)  # with nobody to agree with and nothing to round
        else:
            loop = Loop(optimizer, micro_batches, 2 * micro_batches + extra, overlap, self.held.sparse, awaits,
                        reference)  # fmt: skip
            self._sync = sync.bind(parameters, comm.channel("gradients"), compress, loop)
        # Weighted losses make autograd's own sum the mean, where it is this worker's or this replica's alone.
        self._local = self._sync.local_gradients and listener is None and not self._wires.is_sharded
        self._weighted = self._local or self._wires.is_sharded
        self._comm = comm.channel("meeting")
        chosen = {compress.choose(name, p.shape) for name, p in parameters.items()}
        self.has_residuals = comm.size > 1 and not all(each.is_additive and not each.keeps_residual for each in chosen)
        self.finite = all(each.finite for each in chosen) and not self._local
        self._listener = listener
        self._names = {id(p): name for name, p in parameters.items()}
        self._asking: LazyParameters | None = None
        self.waited_seconds = 0.0
        side_by_side = self._wires.batch if self.synchronous else self._wires.dp_shard
        together = self.synchronous or self._wires.is_sharded
        lane = side_by_side.channel("statistics") if together else None
        pieces = {0: self.held.model} if self.held.pipeline is None else self.held.pipeline.stages
        statistics = {
            place: BufferSync(piece, micro_batches, lane, drops=drops or repeats, adopts=listener is not None)
            for place, piece in sorted(pieces.items())
        }
        self._statistics = {place: found for place, found in statistics.items() if found.active}
        self._hooks: list[RemovableHandle] = []
        with ExitStack() as undo:  # a worker may be lost while this one communicates, and the model is bound again then
            undo.callback(self.unhook)
            self.begin()
            if (
                self._sync.lazy_parameters
                and lazy
                and listener is None
                and not self._wires.is_sharded
                and LazyParameters.fits(model)
            ):
                self._asking = LazyParameters(model, self._names, self._awaited)
            as_they_come = not self._local and self.held.pipeline is None
            come = parameters.keys() - self.held.unsharding.late if as_they_come else ()
            self._hooks = [self.held.on_gradient(name, self._arrived) for name in parameters if name in come]
            undo.pop_all()

    @property
    def spread(self) -> bool:
        """Whether the replica is sharded over several workers."""
        return self._wires.is_sharded

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of one step, over all workers."""
        return self._count

    @property
    def synchronous(self) -> bool:
        """Whether replicas are equal after every step."""
        return self._sync.synchronous

    def work_items(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[WorkItem] | None:
        """See `BoundSynchronizer.work_items`."""
        return self._sync.work_items(first, until, stop)

    @property
    def leased_until(self) -> int:
        """See `BoundSynchronizer.leased_until`."""
        return self._sync.leased_until

    def wait_parameters(self) -> None:
        """Between two steps: wait until the new weights are in the parameters."""
        self._sync.wait_parameters()

    def _awaited(self, names: Collection[str] | None) -> None:
        began = self._comm.now()
        self._sync.wait_parameters(names)
        self.waited_seconds += self._comm.now() - began

    def synchronize(self) -> None:
        """Collective, between two steps: make all replicas and the states of their optimizers equal."""
        weight = self._sync.local_weight
        self._sync.synchronize()
        if not self.synchronous:
            state, _ = state_of(self.optimizer, self.model)
            kept = {} if self._sync.optimizer_on_server else state
            average([*dict(self.model.named_buffers()).values(), *kept.values()], self._comm, weight)
            for statistics in self._statistics.values():
                statistics.begin()  # the next step starts from these buffers

    def quiesce(self) -> None:
        """See `BoundSynchronizer.quiesce`."""
        self._sync.quiesce()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Collective, between two steps: inside, the parameters are what the replicas agree on."""
        return self._sync.averaged_weights()

    def state_dict(self) -> dict[str, Tensor]:
        """What all replicas share beside parameters and optimizer, after `synchronize`."""
        return self._sync.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the `state_dict` of an earlier attempt of the run."""
        self._sync.load_state_dict(state)

    def residual_state(self) -> dict[str, Tensor]:
        """See `BoundSynchronizer.residual_state`."""
        return self._sync.residual_state()

    def load_residuals(self, owed: Mapping[str, Tensor]) -> None:
        """See `BoundSynchronizer.load_residuals`."""
        self._sync.load_residuals(owed)

    def begin(self) -> None:
        """Begin a step. What was computed for a step that was not applied is dropped."""
        self._control = self._said = [0.0] * (2 * self._count)
        self._word: Work[Tensor] | None = None
        self._failed: CommunicationError | None = None
        self._late: dict[str, Tensor] = {}  # gradients of parameters that perhaps nobody has used
        self._unused: frozenset[str] | None = None  # once it is known
        self._sync.begin()
        for statistics in self._statistics.values():
            statistics.begin()

    def begin_micro_batch(self, micro_batch: int, weight: float) -> None:
        """Before the forward pass of `micro_batch`, whose weight in the mean is `weight`."""
        self._hand_over(self._sync.fold)
        self._micro_batch, self._weight = micro_batch, weight
        self._control[self._count + micro_batch] = weight
        if self.held.pipeline is None:
            self.before()
        if self._asking:
            self._asking.enter()

    def end_forward(self, loss: float = 0.0, *, last: bool, extra: list[float] | None = None) -> None:
        """After the forward pass and before backward. `last`: no further micro-batch of this worker in this step."""
        self.held.unsharding.backward(last)
        self._control[self._micro_batch] = loss
        if self.held.pipeline is None:
            self.after(self._micro_batch)
        if last:
            for statistics in self._statistics.values():
                statistics.send()
            self._said = control = self._control + (extra or [])
            if self._wires.is_sharded:
                n, silent = self._count, [0.0] * self._count
                control[:n] = control[:n] if self._wires.reports_loss else silent
                control[n : 2 * n] = control[n : 2 * n] if self._wires.reports_weight else silent
                self._word = self._wires.model.sum(torch.tensor(control, dtype=torch.float64))
                if not isinstance(self._sync, LocalGradients):
                    self._close_spread()  # it travels on with the gradients
            else:
                self._close(control)

    def _close(self, control: list[float]) -> None:
        self._sync.close(control, math.fsum(control[self._count : 2 * self._count]))

    def _close_spread(self) -> None:
        """Close the step, once all workers of this replica have sent their part of the control word."""
        assert self._word is not None
        self._close(self._word.wait().tolist())
        self._word = None

    def before(self, stage: int = 0) -> None:
        """Before each forward pass of a pipeline's `stage`; without a pipeline, `begin_micro_batch` calls it."""
        if stage in self._statistics:
            self._statistics[stage].before()

    def after(self, micro_batch: int, stage: int = 0) -> None:
        """After the forward pass of `stage`; without a pipeline, `end_forward` calls it."""
        if stage in self._statistics:
            self._statistics[stage].after(micro_batch)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of the micro-batch's mean `loss`, a scalar."""
        share = self.loss_scale(self._weight)
        weighted = loss * share if self._weighted and share != 1.0 else loss
        self.held.unsharding.connect(weighted).backward()

    def loss_scale(self, weight: float) -> float:
        """The factor of the loss of a micro-batch with that weight, so that gradients add up to the mean."""
        return weight / self._reference

    def fail(self, error: CommunicationError) -> None:
        """Have `settle` raise `error`, or the first of several."""
        self._failed = self._failed or error

    def settle(self) -> Step:
        """Wait for the mean over the global batch.

        Raises:
            PeerLost, MessageMismatch: also the first of those that occurred in a backward pass of the user's loop.
        """
        if self._failed is not None:
            raise self._failed
        if not self._local:
            self._unused = self.held.unsharding.finish()
            self._take_what_lies_there()
            for name, gradient in self._late.items():
                self._arrived(name, gradient)
            self._hand_over(self._sync.fold)
        if self._word is not None:
            self._close_spread()
        return Step(self, self._sync.settle())

    def norm(self, change: PendingUpdate) -> float:
        """The 2-norm of `change` over all of the replica's parameters."""
        if not self._wires.is_sharded:
            return change.norm()
        square = torch.tensor([change.norm(self.held.counted_elsewhere) ** 2], dtype=torch.float64)
        return math.sqrt(float(self._wires.model.sum(square).wait()))

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
        received = []
        for _, tensor in sorted(self.state.items()):
            here = tensor.contiguous().clone().view(-1).view(torch.uint8)
            received.append((tensor, self._comm.broadcast(here, source).wait()))
        for tensor, there in received:  # only now, so that a worker lost meanwhile leaves no state half copied
            tensor.copy_(there.view(tensor.dtype).view(tensor.shape))
        self.begin()

    def discard_step(self) -> None:
        """Drop what was computed for a step that will not be applied; the model has the state after the last step."""
        for statistics in self._statistics.values():
            statistics.undo()
        for parameter in self.model.parameters():
            parameter.grad = None

    def unbind(self) -> None:
        """Detach the model: without hooks, and with all weights in its parameters."""
        self.unhook()
        if self._asking:
            self.wait_parameters()

    def unhook(self) -> None:
        """Remove this replica's hooks from the model."""
        if self._asking:
            self._asking.close()
        for hook in self._hooks:
            hook.remove()
        for statistics in self._statistics.values():
            statistics.close()

    def _take_what_lies_there(self) -> None:
        """Offer the gradients that no hook has seen: those that user code has written."""
        for name in self._names.values():
            gradient = self.held.take(name)
            if gradient is not None:
                self._arrived(name, gradient)
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if id(parameter) not in self._names and parameter.grad is not None:
                raise self._unknown(parameter)

    def _unknown(self, parameter: Tensor) -> InvalidInput:
        """Why the gradient of a parameter that the optimizer has cannot be exchanged."""
        name = next((name for name, p in self.model.named_parameters() if p is parameter), None)
        if name is None:
            return _foreign(parameter)
        problem = "it has a gradient, but was frozen, or not part of the model, when training began"
        return InvalidInput("optimizer", name, problem, "unfreeze or add it before world.bind")

    def _arrived(self, name: str, gradient: Tensor) -> None:
        if self._unused is None and (name in self._late or not self.held.unsharding.used(name)):
            self._late[name] = self._late[name] + gradient if name in self._late else gradient
            return
        if self._unused and name in self._unused:
            return
        if name in self.held.sparse and not gradient.is_sparse:
            gradient = gradient.to_sparse(1)  # of a layout
        if self._asking:
            self._asking.came(name)
        if self._listener:
            self._listener(name)
        if self._failed is not None or not math.isfinite(self._control[self._micro_batch]):
            return  # such a step is not applied
        weight = 1.0 if self._weighted else self._weight / self._reference
        self._hand_over(self._sync.offer, name, gradient.detach() if gradient.requires_grad else gradient, weight)

    def _hand_over(self, give: Callable[..., None], *what: Any) -> None:
        """Call ``give(*what)``, and mark this micro-batch if the synchronizer cannot represent its gradients."""
        try:
            give(*what)
        except ValueError as error:
            if not self._drops:
                raise
            LOG.warning("micro-batch %d, %s", self._micro_batch, error)
            # Control words are sent when all gradients are through.
            self._control[self._micro_batch] = self._said[self._micro_batch] = NOT_REPRESENTABLE
        except CommunicationError as error:
            if self._listener is None:
                raise
            self.fail(error)


class Step:
    """The mean gradient of one step, not yet applied: of all workers if synchronous, else of this worker.

    Attributes:
        losses, weights: of the step's micro-batches; 0 for those of other workers that have not been exchanged.
    """

    def __init__(self, replica: Replica, change: PendingUpdate) -> None:
        self._replica, self._change = replica, change
        self._norm: float | None = None
        n = replica._count
        self.losses, self.weights = change.control[:n], change.control[n : 2 * n]

    @property
    def loss(self) -> float:
        """The weighted mean of the micro-batches' losses, summed in their order."""
        total = math.fsum(self.weights)
        return math.fsum(loss * w for loss, w in zip(self.losses, self.weights)) / total if total else math.nan

    def norm(self) -> float:
        """Collective, before `apply`: the 2-norm of the mean gradient over all of the replica's parameters."""
        if self._norm is None:
            self._norm = self._replica.norm(self._change) * self._whole()
        return self._norm

    def drop(self) -> None:
        """Drop the step instead of applying it. Parameters and buffers have the values from before the step."""
        for statistics in self._replica._statistics.values():
            statistics.drop()
        self._replica.begin()

    def apply(self, step: Callable[[], Any] | None = None) -> Any:
        """Fold the statistics, clip the mean and take the optimizer's step.

        With lazy parameters, the new weights have arrived after `Replica.wait_parameters`.
        """
        replica = self._replica
        for statistics in replica._statistics.values():
            statistics.fold()
        scale = self._scale()
        result = self._change.apply(partial(replica.held.step, step or replica.optimizer.step), scale)
        if replica._asking:
            replica._asking.applied()
        else:
            replica.wait_parameters()
        n = replica._count
        if self._change.agreed:  # perhaps only now
            self.losses, self.weights = self._change.control[:n], self._change.control[n : 2 * n]
        replica.begin()
        return result

    @property
    def extra(self) -> list[float] | None:
        """The `extra` numbers of all workers' control words; None where they were not exchanged in this step."""
        return self._change.control[2 * self._replica._count :] if self._change.agreed else None

    def _whole(self) -> float:
        """The factor for a step whose weights do not add up to the usual sum."""
        total = math.fsum(self.weights)
        return self._replica._reference / total if total else 1.0

    def _scale(self) -> float:
        scale = self._whole()
        if self._replica._clip is not None:
            # The small number is torch.nn.utils.clip_grad_norm_'s.
            scale *= min(1.0, self._replica._clip / (self.norm() + 1e-6))
        return scale


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


def check_fit(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `InvalidInput` if `optimizer` has parameters that `model` lacks, or its steps need more than gradients."""
    check_optimizer(type(optimizer))
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise _foreign(parameter)


def _foreign(parameter: Tensor) -> InvalidInput:
    return InvalidInput(
        "optimizer", tuple(parameter.shape), "a parameter of this shape is not one of the model's, so other workers "
        "would not hear of its gradient", "make it part of the model")  # fmt: skip


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
