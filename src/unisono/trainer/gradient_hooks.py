"""Where gradients leave autograd: hooks pass each one on as soon as it is complete, while backward still runs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from unisono.errors import InvalidInput
from unisono.layout import LocalModel
from unisono.trainer.compatibility import foreign_parameter


class GradientHooks:
    """Hooks on the parameters of one worker.

    Per step: `begin`, backward passes, `finish`. A gradient is offered once per backward pass. In a sharded replica,
    it is known at `finish` which parameters no worker has used: until then, gradients of such parameters are kept back.

    Args:
        offer: ``offer(name, gradient)`` gets each complete gradient.
    """

    def __init__(self, local: LocalModel, optimizer: Optimizer, offer: Callable[[str, Tensor], None]) -> None:
        self._local, self._optimizer, self._offer = local, optimizer, offer
        self._names = {id(p): name for name, p in local.local.named_parameters() if p.requires_grad}
        self._handles: list[RemovableHandle] = []
        self._exchanged = False

    def attach(self, *, during_backward: bool, exchanged: bool) -> None:
        """Put hooks on the parameters.

        Args:
            during_backward: False where gradients are complete only after all micro-batches.
            exchanged: False where gradients stay in the parameters, since nothing is exchanged.
        """
        self._exchanged = exchanged
        names = set(self._names.values()) - self._local.unsharding.late if during_backward else set[str]()
        self._handles = [self._local.on_gradient(n, self._arrived) for n in self._names.values() if n in names]

    def close(self) -> None:
        """Remove all hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """Begin a step."""
        self._late: dict[str, Tensor] = {}  # gradients of parameters that perhaps no worker has used
        self._unused: frozenset[str] | None = None  # known at `finish`

    def finish(self) -> bool:
        """After the last backward pass of a step: offer all gradients that are left. False if none are exchanged.

        Raises:
            InvalidInput: a parameter of the optimizer has a gradient, and was frozen when training began.
        """
        if not self._exchanged:
            return False
        self._unused = self._local.unsharding.finish()
        for name in self._names.values():  # those that no hook has seen: user code has written them
            gradient = self._local.take(name)
            if gradient is not None:
                self._arrived(name, gradient)
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            if id(parameter) not in self._names and parameter.grad is not None:
                raise self._unknown(parameter)
        for name, gradient in self._late.items():
            self._arrived(name, gradient)
        return True

    def _arrived(self, name: str, gradient: Tensor) -> None:
        if self._unused is None and (name in self._late or not self._local.unsharding.used(name)):
            self._late[name] = self._late[name] + gradient if name in self._late else gradient
            return
        if self._unused and name in self._unused:
            return
        if name in self._local.sparse and not gradient.is_sparse:
            gradient = gradient.to_sparse(1)  # of a layout
        self._offer(name, gradient)

    def _unknown(self, parameter: Tensor) -> InvalidInput:
        """Why the gradient of a parameter of the optimizer cannot be exchanged."""
        name = next((name for name, p in self._local.local.named_parameters() if p is parameter), None)
        if name is None:
            return foreign_parameter(parameter)
        problem = "it has a gradient, but was frozen, or not part of the model, when training began"
        return InvalidInput("optimizer", name, problem, "unfreeze or add it before world.bind")
