"""How replicas agree: the contract.

What a user writes is a frozen value; `bind` gives it a replica's parameters, a communicator and a compressor. A
synchronizer sees plain local tensors under global names, and knows of no layout, loop or dataset.

Some synchronizers keep all replicas in lockstep: every step is all workers' together. Others let each walk by itself
for a while, and meet now and then; the asynchronous ones also deal out the work as it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.compress import Compressor

Share = tuple[int, range]
"""What one worker computes between two `settle`s: a step, and some of its micro-batches."""


class PendingUpdate(Protocol):
    """What one step is about to do. Nothing that is shared or lasts has changed before `apply`."""

    @property
    def control(self) -> list[float]:
        """The control words of all workers, added up element by element, if `agreed`; else this worker's own."""

    @property
    def agreed(self) -> bool:
        """Whether all workers have heard the same `control`. Where walks end in `apply`, it becomes true there."""

    def norm(self, without: Collection[str] = ()) -> float:
        """The 2-norm of the mean gradient over all parameters but some: the same bits on every worker in lockstep,
        else of this worker's own mean."""

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Take the step of ``scale * mean gradient``: put it into the parameters' ``grad``, call `step` and take the
        gradients back out, or have the step taken where the optimizer is."""


class BoundSynchronizer(Protocol):
    """One step is: `begin`, then per micro-batch `offer` for each gradient, then `settle`, then ``change.apply``.

    Attributes:
        lockstep: whether replicas are equal after every `apply` and every `PendingUpdate` is agreed from the start.
        local: whether the mean gradient is this worker's own. It may then stay where autograd adds it up: whoever
            weights the losses need not `offer`.
        keeps_optimizer: whether the optimizer's state lives elsewhere, and comes here in `meet`.
        defers: whether weights may still be on their way after `apply`; who reads or uses them calls `need` before.
        local_weight: what this replica counts for where replicas average what each has of its own (optimizer state,
            buffers): the weight of its local steps since the last `meet`. None: all replicas count alike.
    """

    lockstep: bool
    local: bool
    optimizer_on_server: bool
    defers: bool
    local_weight: float | None

    def begin(self) -> None:
        """A new step; what was offered before and not applied is forgotten."""

    def close(self, control: list[float], weight: float = 1.0) -> None:
        """The micro-batch whose gradients are offered next is this worker's last of the step. All of its
        micro-batches together weigh `weight`, on the scale of `Loop.reference`.

        `control` travels with what is exchanged next: every worker's is as long (fixed at `bind`), and they are added
        up. Each number arrives exactly where all other workers say 0.
        """

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        """``weight * gradient`` of parameter `name` goes into the mean. Starts exchanges that became complete;
        returns at once. `gradient` may be dense or sparse, and is free again on return."""

    def fold(self) -> None:
        """Every gradient of a micro-batch has been offered. Raises `ValueError`, which names the parameter, where one
        cannot be represented; `offer` may find that too."""

    def settle(self) -> PendingUpdate:
        """Wait for the mean. Raises `PeerLost`, `MessageMismatch`."""

    def wait_parameters(self, names: Collection[str] | None = None) -> None:
        """The weights of the parameters `names` (None: of all) are here when it returns, and the others go on
        arriving. After `apply` they may be on their way; `meet`, `shared` and `settle` leave nothing so. Raises
        `PeerLost`."""

    def work_items(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[Share] | None:
        """The work of steps ``first .. until - 1`` as it is dealt out to this worker, each micro-batch to one worker;
        None: every worker computes the same part of every step. May be asked ahead of what is computed; ends when
        all is dealt out, or when the step is that was begun when one worker's `stop` became true."""

    @property
    def leased_until(self) -> int:
        """After `shares` has ended: the step before which everything is dealt out, the same on all workers."""

    def synchronize(self) -> None:
        """All workers call it alike, between two steps: afterwards all have the same parameters (and optimizer
        state, if `keeps_optimizer`), and walk on from there. Nothing to do in lockstep."""

    def quiesce(self) -> None:
        """All workers call it alike, between two steps: afterwards nothing is under way, and the parameters are all
        that this replica has come to. Nothing to do where that is so after each step that all have met in."""

    def averaged_weights(self) -> AbstractContextManager[None]:
        """All workers enter it alike, between two steps: inside, the parameters are what the replicas agree on, for
        evaluation; outside they are as before."""

    def state_dict(self) -> dict[str, Tensor]:
        """What all replicas share beyond parameters and optimizer, after `meet`: the same on all workers."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up the `state` of another life of the same value. The parameters are already that life's."""

    def residual_state(self) -> dict[str, Tensor]:
        """What this worker alone remembers, after `meet`: what its compressed messages have left out."""

    def load_residuals(self, owed: Mapping[str, Tensor]) -> None:
        """After `load_state_dict`, owe what this worker's `owed` said in another life among as many workers."""


@dataclass(frozen=True)
class Loop:
    """What a synchronizer is told of the training loop.

    Args:
        optimizer: of the parameters; its groups' numbers (learning rate) may change before every step.
        micro_batches: of one step, over all workers.
        control: length of the control word in numbers.
        reference: what the weights of a step usually add up to over all workers; None: to their number.
        overlap: exchange while backward, and where weights may come late the forward pass, still runs.
        sparse: names of parameters whose optimizer wants sparse gradients.
        awaits: whether workers may come and go while it runs: then all have to meet now and then, where work is dealt
            out too.
    """

    optimizer: Optimizer
    micro_batches: int = 1
    control: int = 0
    overlap: bool = True
    sparse: frozenset[str] = frozenset()
    awaits: bool = False
    reference: float | None = None


class Synchronizer(Protocol):
    """How replicas agree, as a frozen value."""

    def bind(
        self, parameters: Mapping[str, nn.Parameter], comm: Communicator, compress: Compressor, loop: Loop
    ) -> BoundSynchronizer:
        """Give the value its world; all workers have the same weights and optimizer state now.

        Args:
            parameters: global name to trainable parameter, each tensor once, in an order that all workers share.
        """


class AllHere:
    """What all say of themselves who have put the new weights where they belong when `apply` returns."""

    defers = False
    local_weight: float | None = None

    def fold(self) -> None:
        pass

    def wait_parameters(self, names: Collection[str] | None = None) -> None:
        pass

    def quiesce(self) -> None:
        pass


class OwesNothing:
    """What all say of themselves whose messages leave nothing out for later."""

    def residual_state(self) -> dict[str, Tensor]:
        return {}

    def load_residuals(self, owed: Mapping[str, Tensor]) -> None:
        pass


class Lockstep(AllHere):
    """What all lockstep synchronizers say of themselves."""

    lockstep = True
    local = False
    optimizer_on_server = False

    leased_until = 0

    def work_items(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[Share] | None:
        return None

    def synchronize(self) -> None:
        pass

    def averaged_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass
