"""How replicas agree: the contract.

What a user writes is a frozen value; `bind` gives it a replica's parameters, a communicator and a compressor. A
synchronizer sees plain local tensors under global names, and knows of no layout, loop or dataset.

Under a synchronous one, every step is one of all replicas, which are equal after it. Under others, replicas take local
steps and synchronize from time to time. Asynchronous ones also lease work items to workers, as these ask for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.compress import Compressor

WorkItem = tuple[int, range]
"""A work item: a step, and those of its micro-batches that one worker computes between two calls of `settle`."""


class PendingUpdate(Protocol):
    """The update of one step, before it is applied: until `apply`, no shared or lasting state has changed."""

    @property
    def control(self) -> list[float]:
        """The sum of all workers' control words, element by element, if `agreed`; else this worker's own."""

    @property
    def agreed(self) -> bool:
        """Whether all workers have the same `control`. At the end of a round of local steps, `apply` makes it true."""

    def norm(self, without: Collection[str] = ()) -> float:
        """The 2-norm of the mean gradient over all parameters but `without`.

        Under a synchronous algorithm it has the same bits on every worker; else it is that of this worker's own mean.
        """

    def write(self, scale: float = 1.0) -> None:
        """Add ``scale * mean gradient`` to the parameters' ``grad``, in memory that only this worker uses.

        A ``grad`` that is None, of a parameter that no worker used, stays None. Not with `optimizer_on_server`.
        """

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Take the step of ``scale * mean gradient``, and return what `step` returns.

        The gradient is in the parameters' ``grad`` during `step`, and removed afterwards. After `write`, the step is
        that of the gradients as they are then, and they stay. With `optimizer_on_server`, the servers take the step,
        and `step` is not called.
        """


class BoundSynchronizer(ABC):
    """A synchronizer with a replica's parameters and a communicator.

    One step is `begin`, then for each micro-batch `offer` for each gradient and `fold`, then `settle`, then
    ``update.apply``. The defaults are those of a synchronous algorithm without state of its own.

    Attributes:
        synchronous: replicas are equal after every `apply`, and every `PendingUpdate` is agreed from the start.
        local_gradients: the mean gradient is this worker's own. It may then stay where autograd adds it up: a caller
            that weights the losses need not `offer`.
        gradients_only: nothing is exchanged but gradients, so that a step without an optimizer's step, or with several,
            needs no further call. Under others, every `PendingUpdate` is applied, on all workers alike.
        optimizer_on_server: the optimizer's state is elsewhere, and `synchronize` fetches it.
        lazy_parameters: weights may still be in flight after `apply`; call `wait_parameters` before they are read.
        local_weight: the weight of this replica where replicas average what is local to each (optimizer state,
            buffers): that of its local steps since the last `synchronize`. None: all replicas weigh the same.
    """

    synchronous: bool = True
    local_gradients: bool = False
    gradients_only: bool = False
    optimizer_on_server: bool = False
    lazy_parameters: bool = False
    local_weight: float | None = None

    @abstractmethod
    def begin(self) -> None:
        """Begin a step. Gradients that were offered and not applied are discarded."""

    @abstractmethod
    def close(self, control: list[float], weight: float = 1.0) -> None:
        """Announce that the gradients offered next are those of this worker's last micro-batch of the step.

        Args:
            control: the control word, which is sent with the next exchange. Its length is `Loop.control` on every
                worker; the words of all workers are summed. A number is exact if all other workers send 0.
            weight: the sum over all micro-batches of this worker, on the scale of `Loop.reference`.
        """

    @abstractmethod
    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        """Add ``weight * gradient`` of parameter `name` to the mean, and start the exchanges that became complete.

        Returns at once. `gradient` may be dense or sparse; the caller may overwrite it afterwards.
        """

    @abstractmethod
    def settle(self) -> PendingUpdate:
        """Wait for the mean gradient. Raises `PeerLost`, `MessageMismatch`."""

    def fold(self) -> None:  # noqa: B027
        """Fold the gradients of a micro-batch, which have all been offered.

        Raises:
            ValueError: a gradient cannot be represented; names the parameter. `offer` may raise it too.
        """

    def wait_parameters(self, names: Collection[str] | None = None) -> None:  # noqa: B027
        """Wait until the weights of the parameters `names` have arrived (None: of all).

        After `apply` they may be in flight; after `synchronize`, `settle` and inside `averaged_weights` none is.
        Raises `PeerLost`.
        """

    def work_items(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[WorkItem] | None:
        """The work items of steps ``first .. until - 1`` that are leased to this worker, each to one worker.

        None: every worker computes the same part of every step. Items may be requested ahead of computing. The
        iterator ends when all are leased, or with the step in which one worker's `stop` became true.
        """
        return None

    @property
    def leased_until(self) -> int:
        """After `work_items` has ended: the step before which all work is leased, the same on all workers."""
        return 0

    def synchronize(self) -> None:  # noqa: B027
        """Collective, between two steps. Makes parameters equal on all workers, and with `optimizer_on_server` the
        optimizer's state. Does nothing under a synchronous algorithm."""

    def quiesce(self) -> None:  # noqa: B027
        """Collective, between two steps. Waits until no message is in flight and every received update is applied.
        Does nothing under a synchronous algorithm."""

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Collective, between two steps. Inside, the parameters are what the replicas agree on, for evaluation; after
        it they are as before."""
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        """The replicated state besides parameters and optimizer, after `synchronize`: the same on all workers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Load the `state_dict` of an earlier attempt with an equal synchronizer. Parameters are loaded already."""

    def residual_state(self) -> dict[str, Tensor]:
        """This worker's error-feedback residuals, after `synchronize`."""
        return {}

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:  # noqa: B027
        """After `load_state_dict`, load this worker's residuals of an earlier attempt with as many workers."""


@dataclass(frozen=True)
class Loop:
    """The training loop, as far as a synchronizer needs to know it.

    Args:
        optimizer: of the parameters; its hyperparameters, such as the learning rate, may change before every step.
        micro_batches: of one step, over all workers.
        control: length of the control word in numbers.
        reference: the usual sum of a step's weights over all workers; None: the number of micro-batches.
        overlap: whether to exchange while backward runs, and with lazy parameters while forward runs.
        sparse: names of parameters whose optimizer needs sparse gradients.
        elastic: whether workers may join and leave during the run. Then all of them synchronize from time to time, also
            if work is leased.
    """

    optimizer: Optimizer
    micro_batches: int = 1
    control: int = 0
    overlap: bool = True
    sparse: frozenset[str] = frozenset()
    elastic: bool = False
    reference: float | None = None


class Synchronizer(Protocol):
    """How replicas agree, as a frozen value."""

    def bind(
        self, parameters: Mapping[str, nn.Parameter], comm: Communicator, compress: Compressor, loop: Loop
    ) -> BoundSynchronizer:
        """Bind the value to a replica. All workers have the same weights and optimizer state at this time.

        Args:
            parameters: global name to trainable parameter, each tensor once, in the same order on all workers.
        """
