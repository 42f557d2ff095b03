"""One whole copy of the model on this worker: it hands gradients to the synchronizer as backward finishes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.compress import Compressor
from unisono.errors import Diverged, InvalidInput
from unisono.statistics import Statistics
from unisono.sync import BoundSynchronizer, Change, LocalGradients, Synchronizer


class Replica:
    """A model and its optimizer, bound to the other replicas.

    Per step: `begin`; per micro-batch of this worker `enter`, the forward pass, `leave`, the backward pass; then
    `settle` and `apply`. Backward is run by `backward`, or by the user's own loop. The control word that travels with
    the gradients is, for micro-batches ``0..n-1``: their losses, their weights, then `extra` numbers of the caller's.

    Args:
        micro_batches: of one step, over all workers.
        reference: what the weights of a whole step usually add up to; weights are divided by it before anything is
            summed, so that the sum usually is the mean already.
        clip: largest 2-norm of the mean gradient; None does not clip.
        extra: how many further numbers the control word has.
        listener: told the name of each parameter whose gradient is complete, before it is handed on; given by whoever
            leaves backward to the user's own loop.
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
    ) -> None:
        check_fit(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self._count, self._reference, self._clip = micro_batches, reference, clip
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sync: BoundSynchronizer
        # With nobody to agree with and nothing to round, a weighted loss makes autograd's own sum the mean.
        self._local = comm.size == 1 and listener is None and all(compress.keeps(p.dtype) for p in parameters.values())
        if self._local:
            self._sync = LocalGradients(parameters)
        else:
            self._sync = sync.bind(
                parameters,
                comm.lane("gradients"),
                compress,
                control=2 * micro_batches + extra,
                overlap=overlap,
                sparse=sparse_parameters(model),
            )
        self._listener = listener
        self._names = {id(p): name for name, p in parameters.items()}
        self._statistics = Statistics(model, micro_batches, comm.lane("statistics"))
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._arrived, name))
            for name, p in parameters.items()
            if not self._local
        ]
        self.begin()

    def begin(self) -> None:
        """A new step; what was computed for one that was not applied is forgotten."""
        self._control = [0.0] * (2 * self._count)
        self._sync.begin()
        if self._statistics.active:
            self._statistics.begin()

    def enter(self, micro_batch: int, weight: float) -> None:
        """Before the forward pass of `micro_batch`, which counts `weight` in the mean."""
        self._micro_batch, self._weight = micro_batch, weight
        self._control[self._count + micro_batch] = weight
        if self._statistics.active:
            self._statistics.before()

    def leave(self, loss: float = 0.0, *, last: bool, extra: list[float] | None = None) -> None:
        """After the forward pass and before backward. `last`: no further micro-batch of this worker in this step."""
        self._control[self._micro_batch] = loss
        if self._statistics.active:
            self._statistics.after(self._micro_batch)
            if last:
                self._statistics.send()
        if last:
            self._sync.close(self._control + (extra or []))

    def backward(self, loss: Tensor) -> None:
        """The backward pass of the micro-batch's mean `loss`, a scalar."""
        share = self._weight / self._reference
        (loss * share if self._local and share != 1.0 else loss).backward()

    def settle(self) -> Step:
        """Wait for the mean over the global batch. Raises `PeerLost`, `MessageMismatch`."""
        if not self._local:
            self._take_what_lies_there()
        return Step(self, self._sync.settle())

    def unbind(self) -> None:
        """Leave the model as it was found."""
        for hook in self._hooks:
            hook.remove()

    def _take_what_lies_there(self) -> None:
        """Gradients that came past the hooks: the user's own, or of parameters that nobody told us of."""
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                name = self._names.get(id(parameter))
                if name is None:
                    raise InvalidInput(
                        "optimizer", tuple(parameter.shape), "a parameter of this shape got a gradient, but was not "
                        "trainable when the model was bound", "unfreeze or add it before")  # fmt: skip
                self._arrived(name, parameter)

    def _arrived(self, name: str, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        if self._listener:
            self._listener(name)
        self._sync.offer(
            name, gradient.detach() if gradient.requires_grad else gradient, self._weight / self._reference
        )


class Step:
    """One step's mean, agreed on by all workers and not yet applied."""

    def __init__(self, replica: Replica, change: Change) -> None:
        self._replica, self._change = replica, change
        n = replica._count
        self.losses, self.weights = change.control[:n], change.control[n : 2 * n]
        self.extra = change.control[2 * n :]

    @property
    def loss(self) -> float:
        """The weighted mean of the micro-batches' losses, summed in their order."""
        total = math.fsum(self.weights)
        return math.fsum(loss * w for loss, w in zip(self.losses, self.weights)) / total if total else math.nan

    def check_finite(self, step: int, worker_of: Callable[[int], int]) -> None:
        """Raise `Diverged` if a loss is not finite, naming the first such micro-batch and its worker."""
        for m, loss in enumerate(self.losses):
            if not math.isfinite(loss):
                raise Diverged(
                    f"the loss is {loss} in step {step}, micro-batch {m}, computed by worker {worker_of(m)}: lower the "
                    "learning rate, set clip, or look at that micro-batch's samples"
                )

    def apply(self, step: Callable[[], Any] | None = None) -> Any:
        """Fold the statistics, put the clipped mean into the gradients, and take the optimizer's step."""
        replica = self._replica
        if replica._statistics.active:
            replica._statistics.fold()
        scale = self._scale()
        result = self._change.apply(step or replica.optimizer.step, scale)
        replica.begin()
        return result

    def _scale(self) -> float:
        total = math.fsum(self.weights)
        scale = self._replica._reference / total if total else 1.0
        if self._replica._clip is not None:
            norm = self._change.norm() * scale
            # The small number is torch.nn.utils.clip_grad_norm_'s.
            scale *= min(1.0, self._replica._clip / (norm + 1e-6))
        return scale


def check_fit(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `InvalidInput` if `optimizer` trains what `model` does not hold, or what cannot be averaged."""
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise InvalidInput(
                    "optimizer", tuple(parameter.shape), "a parameter of this shape is not one of the model's, so "
                    "other workers would not hear of its gradient", "make it part of the model")  # fmt: skip
    check_trainable(model)


def check_trainable(model: nn.Module) -> None:
    """Raise `InvalidInput` if `model` has nothing to train, or something that cannot be."""
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidInput("model", type(model).__name__, "no parameter requires a gradient", "unfreeze some of it")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise InvalidInput("model", name, "a lazy parameter that has no shape yet",
                               "run one forward pass where the model is built")  # fmt: skip
        if parameter.is_complex() and parameter.requires_grad:
            raise InvalidInput("model", name, "complex numbers cannot be averaged yet",
                               "hold it as real numbers and use torch.view_as_complex")  # fmt: skip


def sparse_parameters(model: nn.Module) -> set[str]:
    """Names of the weights of embeddings that ask for sparse gradients."""
    return {
        f"{path}.weight".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under its global name, each tensor once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
