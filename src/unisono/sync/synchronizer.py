"""The contract of synchronizers, the algorithms by which replicas agree.

What a user writes is a frozen value; `bind` gives it a replica's parameters, a communicator and a compressor. A
synchronizer sees plain local tensors under global names, and knows of no layout, loop or dataset.

Under a synchronous synchronizer, all replicas take every step together and are equal after it. Under others, each
replica takes local steps, and the replicas synchronize from time to time. Asynchronous synchronizers also lease work
items to workers, which request them.
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
"""A work item: the number of a step, and the range of its micro-batches that one worker computes before `settle`."""


class PendingUpdate(Protocol):
    """The update of one step, before it is applied: until `apply`, no shared or lasting state has changed."""

    @property
    def control(self) -> list[float]:
        """The sum of all workers' control words, element by element, if `agreed`; else this worker's control word."""

    @property
    def agreed(self) -> bool:
        """Whether all workers have the same `control`.

        With local steps, `apply` makes it true in the steps in which the sum of the control words arrives.
        """

    def norm(self, without: Collection[str] = ()) -> float:
        """The 2-norm of the mean gradient over all parameters but `without`.

        Under a synchronous algorithm, the norm has the same bits on every worker. Under others, it is the norm of this
        worker's own mean gradient.
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
    """A synchronizer that is bound to a replica's parameters and a communicator.

    A step calls `begin`; for each micro-batch `offer` with each gradient, then `fold`; then `settle`; and `apply` of
    the update that `settle` returned. `close` comes before the last micro-batch. The defaults are those of a
    synchronous algorithm without state of its own.

    Attributes:
        synchronous: whether replicas are equal after every `apply`, and every `PendingUpdate` is agreed from the start.
        local_gradients: whether `settle` takes the mean of this worker's gradients only. They may then stay where
            autograd accumulates them: a caller that weights the losses need not call `offer`.
        gradients_only: whether nothing is exchanged but gradients. A step without an optimizer's step, or with several,
            then needs no further call. Under others, all workers apply every `PendingUpdate`.
        optimizer_on_server: whether servers have the optimizer's state; `synchronize` then fetches it.
        lazy_parameters: whether weights may still be in flight after `apply`. Call `wait_parameters` before reading
            them.
        local_weight: the weight of this replica in the mean of the replicas' optimizer states and buffers, where these
            are local. It is the sum of the weights of its local steps since the last `synchronize`. None: all replicas
            have equal weights.
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
            control: this worker's control word, of length `Loop.control`. It is sent with the next exchange, in which
                the words of all workers are summed. A number of the sum is exact if all workers but one have sent 0.
            weight: the sum of the weights of this worker's micro-batches in the step, on the scale of `Loop.reference`.
        """

    @abstractmethod
    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        """Add ``weight * gradient`` of parameter `name` to the mean, and start the exchanges that are now complete.

        Returns at once. `gradient` may be dense or sparse; the caller may overwrite it afterwards.
        """

    @abstractmethod
    def settle(self) -> PendingUpdate:
        """Wait for the mean gradient, and return the update by it. Raises `PeerLost`, `MessageMismatch`."""

    def fold(self) -> None:  # noqa: B027
        """Add the gradients that `offer` has buffered to the totals; called when a micro-batch has offered all of them.

        Raises:
            ValueError: the compressor cannot represent a gradient; the message names its parameter. `offer` may raise
                it too.
        """

    def wait_parameters(self, names: Collection[str] | None = None) -> None:  # noqa: B027
        """Wait until the weights of the parameters `names` have arrived (None: of all parameters).

        Weights may be in flight after `apply`, but not after `synchronize` or `settle`, nor inside `averaged_weights`.
        Raises `PeerLost`.
        """

    def work_items(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[WorkItem] | None:
        """The work items of steps ``first .. until - 1`` that are leased to this worker; each is leased only once.

        The iterator may request an item before the previous one is computed. It ends when all items are leased, or
        with the step in which one worker's `stop` returned true. None: nothing is leased, and every worker computes
        its own part of every step.
        """
        return None

    @property
    def leased_until(self) -> int:
        """The first step of which no work is leased, after `work_items` has ended; the same on all workers."""
        return 0

    def synchronize(self) -> None:  # noqa: B027
        """Collective, between two steps: make the parameters equal on all workers, and with `optimizer_on_server` the
        optimizer's state. This default, for synchronous algorithms, does nothing."""

    def quiesce(self) -> None:  # noqa: B027
        """Collective, between two steps: wait until no message is in flight and every received update is applied.
        This default, for synchronous algorithms, does nothing."""

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Collective, between two steps: a context in which the parameters are the weights on which all replicas
        agree, for evaluation. After it, the parameters are as before."""
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        """The state besides parameters and optimizer; after `synchronize` it is the same on all workers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Load the `state_dict` of an earlier attempt with an equal synchronizer, after parameters are loaded."""

    def residual_state(self) -> dict[str, Tensor]:
        """This worker's error-feedback residuals, after `synchronize`."""
        return {}

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Load this worker's residuals from an earlier attempt with the same number of workers; called after
        `load_state_dict`."""


@dataclass(frozen=True)
class Loop:
    """The training loop, as far as a synchronizer needs to know it.

    Args:
        optimizer: the optimizer of the parameters; its hyperparameters, such as the learning rate, may change before
            every step.
        micro_batches: the number of micro-batches of one step, over all workers.
        control: the length of the control word, in numbers.
        reference: the usual sum of a step's weights over all workers; None: the number of workers.
        overlap: whether to exchange while backward runs, and with lazy parameters while forward runs.
        sparse: the names of the parameters whose optimizer needs sparse gradients.
        elastic: whether workers may join and leave during the run. If so, all workers synchronize from time to time,
            even if work is leased.
        visible: gradients are taken by `PendingUpdate.write`.
    """

    optimizer: Optimizer
    micro_batches: int = 1
    control: int = 0
    overlap: bool = True
    sparse: frozenset[str] = frozenset()
    elastic: bool = False
    reference: float | None = None
    visible: bool = False


class Synchronizer(Protocol):
    """An algorithm by which replicas agree, as a frozen value."""

    def bind(
        self, parameters: Mapping[str, nn.Parameter], comm: Communicator, compress: Compressor, loop: Loop
    ) -> BoundSynchronizer:
        """Bind the value to a replica. All workers have the same weights and optimizer state at this time.

        Args:
            parameters: the trainable parameters by global name, each tensor once, in the same order on all workers.
        """
