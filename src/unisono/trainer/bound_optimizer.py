"""An optimizer of a custom loop, whose `step` and `zero_grad` belong to the loop until it is released."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.trainer.loop_model import LoopModel

Closure = Callable[[], Any] | None


class BoundOptimizer:
    """Replaces `step`, `zero_grad` and `add_param_group` of an optimizer until `restore`.

    Args:
        step: called with this and the closure, in place of the optimizer's step.
        before_zero_grad, before_new_group: called before gradients are set to zero, and before a group is added.
        after_new_group: called after a group was added.

    Attributes:
        optimizer: the user's.
        take: the optimizer's own step.
        models: the models that have its parameters.
        untrained: those of its parameters that were frozen when they were last looked at.
        rounds: for each of these models, how many rounds it had when this optimizer stepped last.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[BoundOptimizer, Closure], Any],
        before_zero_grad: Callable[[BoundOptimizer], None],
        before_new_group: Callable[[BoundOptimizer], None],
        after_new_group: Callable[[], None],
    ) -> None:
        self.optimizer, self.take = optimizer, optimizer.step
        self.models: list[LoopModel] = []
        self.untrained: list[nn.Parameter] = []
        self.rounds: dict[LoopModel, int] = {}
        self._own = {name: optimizer.__dict__.get(name) for name in ("step", "zero_grad", "add_param_group")}
        zero_grad, add_param_group = optimizer.zero_grad, optimizer.add_param_group

        def replaced_step(_: Optimizer, closure: Closure = None) -> Any:
            return step(self, closure)

        def replaced_zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            before_zero_grad(self)
            zero_grad(set_to_none=set_to_none)

        def replaced_add_param_group(_: Optimizer, param_group: dict[str, Any]) -> None:
            before_new_group(self)
            add_param_group(param_group)
            after_new_group()

        if hasattr(self.take, "_wrapped_by_lr_sched"):  # else a scheduler made earlier warns that it was lost
            replaced_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        # Bound methods of the optimizer itself, since learning-rate schedulers wrap its function and bind it again.
        optimizer.step = MethodType(replaced_step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(replaced_zero_grad, optimizer)  # type: ignore[method-assign]
        optimizer.add_param_group = MethodType(replaced_add_param_group, optimizer)  # type: ignore[method-assign]

    def find(self, models: Iterable[LoopModel]) -> None:
        """Find the models that have its parameters, among `models`."""
        mine = {id(p) for p in self.parameters}
        self.models = [model for model in models if any(id(p) in mine for p in model.parameters.values())]
        trained = {id(p) for model in self.models for p in model.parameters.values()}
        self.untrained = [p for p in self.parameters if id(p) not in trained]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of its groups."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def zero_gradients(self) -> None:
        """Set the gradient of each of its trained parameters to zero, where there is none."""
        untrained = {id(p) for p in self.untrained}
        for parameter in self.parameters:
            if parameter.grad is None and id(parameter) not in untrained:
                parameter.grad = torch.zeros_like(parameter)

    def restore(self) -> None:
        """Give the optimizer its own methods back."""
        for name, own in self._own.items():
            if own is None:
                self.optimizer.__dict__.pop(name, None)
            else:
                setattr(self.optimizer, name, own)
