"""One stage of a pipeline: a part of the user's model, under the names of the whole model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
Run = Callable[[tuple[Tensor, ...], Mapping[str, Any]], Any]


def by_name(signature: inspect.Signature, inputs: Inputs) -> dict[str, Any]:
    """The model's arguments, by the names of its forward's parameters.

    If `inputs` is a tuple, it contains positional arguments; a mapping contains keyword arguments. Anything else is the
    only argument.
    """
    if isinstance(inputs, Mapping):
        bound = signature.bind(**inputs)
    elif isinstance(inputs, tuple):
        bound = signature.bind(*inputs)
    else:
        bound = signature.bind(inputs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match signature.parameters[name].kind:
            case inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            case inspect.Parameter.VAR_POSITIONAL:
                raise TypeError(f"forward takes *{name}, and a pipeline passes inputs by name")
            case _:
                named[name] = value
    return named


class Stage(nn.Module):
    """A part of a model with the parameters and buffers that it uses, under the whole model's names.

    ``stage(*values, **inputs)`` takes the output of the previous stage and the model's own inputs by name, and returns
    the input of the next stage. The last stage returns the tensors in the model's output; ``assemble`` restores the
    output's structure.

    Args:
        body: holds the stage's modules. It is not a submodule, so that their names have no prefix.
        run: computes the stage, from the received tensors and the model's inputs.
        last: whether `run` returns the model's output.
        signature: the signature of the whole model's forward.
        aliases: for further names of tied parameters and buffers, the first name in the whole model.
    """

    def __init__(
        self, body: nn.Module, run: Run, last: bool, signature: inspect.Signature, aliases: Mapping[str, str]
    ) -> None:
        super().__init__()
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = getattr(body, shared)
        self.__dict__["_body"] = body
        self._run, self.is_last, self.call_signature, self.alias_names = run, last, signature, dict(aliases)
        self._form: tuple[TreeSpec, list[Any]] | None = None

    def forward(self, *values: Tensor, **inputs: Any) -> tuple[Tensor, ...]:
        """The stage's output tensors."""
        body = self.__dict__["_body"]
        body.training = self.training
        out = self._run(tuple(_with_contiguous_grad(v) if v.requires_grad else v for v in values), inputs)
        if not self.is_last:
            return tuple(_sendable(v, values) for v in out)
        leaves, spec = tree_flatten(out)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        self._form = spec, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        return tensors

    def begin_with(self, act: Callable[[], None]) -> None:
        """Call ``act()`` in the next forward pass, before the first computation that belongs to this stage alone."""
        later = getattr(self._run, "begin_with", None)
        if later is None:
            act()
        else:
            later(act)

    def assemble(self, tensors: Tensor | tuple[Tensor, ...]) -> Any:
        """The model's output from its tensors, with the structure that the last forward pass returned."""
        assert self._form is not None, "only the last stage, after a forward pass"
        spec, leaves = self._form
        rest = iter((tensors,) if isinstance(tensors, Tensor) else tensors)
        return tree_unflatten([next(rest) if leaf is None else leaf[0] for leaf in leaves], spec)

    def whole_names(self) -> dict[str, nn.Parameter]:
        """The stage's parameters by their names in ``model.named_parameters()``."""
        return {self.alias_names.get(name, name): parameter for name, parameter in self.named_parameters()}

    def whole_buffers(self) -> dict[str, Tensor]:
        """The stage's buffers by their names in ``model.named_buffers()``."""
        return {self.alias_names.get(name, name): buffer for name, buffer in self.named_buffers()}


class _ContiguousGrad(torch.autograd.Function):
    """The identity, with a contiguous gradient, as gloo and NCCL require for sending."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _with_contiguous_grad(value: Tensor) -> Tensor:
    out = _ContiguousGrad.apply(value)  # type: ignore[no-untyped-call]
    assert isinstance(out, Tensor)
    return out


def _sendable(value: Any, arrived: tuple[Tensor, ...]) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"a {type(value).__name__} cannot be sent between stages; only tensors can")
    if value._is_view() or any(value is a for a in arrived):
        return value.clone(memory_format=torch.contiguous_format)  # zero-bubble schedules detach it in place
    return value.contiguous()
