"""How replicas agree: the contract.

What a user writes is a frozen value; `bind` gives it a replica's parameters, a communicator and a compressor. A
synchronizer sees plain local tensors under global names, and knows of no layout, loop or dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.compress import Compressor


class Change(Protocol):
    """What one step is about to do. Nothing that is shared or lasts has changed before `apply`."""

    @property
    def control(self) -> list[float]:
        """The control words of all workers, added up element by element."""

    def norm(self) -> float:
        """The 2-norm of the mean gradient over all parameters, the same bits on every worker."""

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Put ``scale * mean gradient`` into the parameters' ``grad``, call `step`, and take the gradients back out."""


class BoundSynchronizer(Protocol):
    """One step is: `begin`, then per micro-batch `offer` for each gradient, then `settle`, then ``change.apply``."""

    def begin(self) -> None:
        """A new step; what was offered before and not applied is forgotten."""

    def close(self, control: list[float]) -> None:
        """The micro-batch whose gradients are offered next is this worker's last of the step.

        `control` travels with the gradients: every worker's is as long (fixed at `bind`), and they are added up.
        Each number arrives exactly where all other workers say 0.
        """

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        """``weight * gradient`` of parameter `name` goes into the mean. Starts exchanges that became complete;
        returns at once. `gradient` may be dense or sparse, and is free again on return."""

    def settle(self) -> Change:
        """Wait for the mean. Raises `PeerLost`, `MessageMismatch`."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Synchronizer(Protocol):
    """How replicas agree, as a frozen value."""

    def bind(
        self,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        compress: Compressor,
        *,
        control: int = 0,
        overlap: bool = True,
        sparse: Collection[str] = (),
    ) -> BoundSynchronizer:
        """Give the value its world. `parameters`: global name to trainable parameter, each tensor once, in an order
        that all workers share; `control`: length of the control word in numbers; `sparse`: names of parameters whose
        optimizer wants sparse gradients."""
