"""Hooks on the parameters of a custom loop's model: a new gradient arrives alone, whatever is in ``grad`` already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.errors import UnisonoError


class GradientArrivals:
    """The gradients of one model, as backward passes compute them.

    Args:
        parameters: by name.
        exchanges: whether a gradient that arrives now is exchanged; else it stays in ``grad``.
        deliver: ``deliver(name, gradient)`` gets a gradient that is exchanged, which is taken out of ``grad``.

    Attributes:
        any: whether a gradient has arrived since `begin_micro_batch`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        exchanges: Callable[[], bool],
        deliver: Callable[[str, Tensor], None],
    ) -> None:
        self._parameters, self._exchanges, self._deliver = parameters, exchanges, deliver
        self._set_aside: dict[str, Tensor] = {}
        self._accumulated: set[str] = set()  # names of gradients that passes without an exchange have left in ``grad``
        self._handles: list[RemovableHandle] = []
        self.any = False

    def attach(self) -> None:
        """Put hooks on the parameters, unless they are there."""
        if not self._handles:
            for name, parameter in self._parameters.items():
                self._handles += [
                    parameter.register_hook(partial(self._before, name, parameter)),
                    parameter.register_post_accumulate_grad_hook(partial(self._after, name)),
                ]

    def release(self) -> None:
        """Remove the hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin_micro_batch(self) -> None:
        """Before the forward passes of a micro-batch."""
        self.any = False

    def take_accumulated(self) -> Iterator[tuple[str, Tensor]]:
        """Take the gradients that passes without an exchange have left."""
        names, self._accumulated = self._accumulated, set()
        for name in names:
            gradient, self._parameters[name].grad = self._parameters[name].grad, None
            if gradient is not None:
                yield name, gradient

    def accumulate_all(self) -> None:
        """Every ``grad`` counts as one that a pass without an exchange has left."""
        self._accumulated = {name for name, p in self._parameters.items() if p.grad is not None}

    def restore(self) -> None:
        """Put back what was set aside."""
        for name, gradient in self._set_aside.items():
            self._parameters[name].grad = gradient
        self._set_aside = {}

    def clear(self) -> None:
        """Discard all gradients."""
        self._set_aside = {}
        self._accumulated.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _before(self, name: str, parameter: nn.Parameter, _: Tensor) -> None:
        """A gradient is about to be accumulated: set aside what is there."""
        if parameter.grad is not None and name not in self._accumulated and self._exchanges():
            self._set_aside[name], parameter.grad = parameter.grad, None

    def _after(self, name: str, parameter: Tensor) -> None:
        self.any = True
        if not self._exchanges():
            self._accumulated.add(name)
            return
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if len(parameter._post_accumulate_grad_hooks or ()) > 1:
            raise UnisonoError(
                f"{name}: a hook of register_post_accumulate_grad_hook would see the gradient of this worker's data "
                "alone: read gradients and step optimizers after backward()"
            )
        if gradient.requires_grad:
            raise UnisonoError(
                f"{name}: backward(create_graph=True) leaves gradients with a graph, which the average over workers "
                "cuts off: get them by torch.autograd.grad(loss, parameters, create_graph=True)"
            )
        self._accumulated.discard(name)
        self._deliver(name, gradient)
