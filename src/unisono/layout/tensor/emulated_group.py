"""Emulates a tensor group in one process: the ranks' computations, one after the other, with sums of their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.layout.split_styles import GATHERED, GROUPS, ROWS, SCATTERED
from unisono.layout.tensor import attention_heads as heads
from unisono.layout.tensor.forward_trace import Call, snapshot
from unisono.layout.tensor.linear_modules import Matrix, embedded, grouped_rows, matrix


def emulate(model: nn.Module, scope: str, unit: Mapping[str, str], degree: int, treatment: str, call: Call) -> Any:
    """The output of module `scope` when `degree` ranks compute it split as `unit` says.

    The ranks' passes run one after the other. The sum of a row layer is complete in the last pass, whose output is that
    of all ranks.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in unit}
    output = None
    for member in range(degree):
        with ExitStack() as stack:
            for name, word in unit.items():
                module = model.get_submodule(name)
                stack.enter_context(replaced_forward(module, _forward(module, word, degree, member, parts[name])))
            stack.enter_context(with_local_heads(model.get_submodule(scope), unit, degree, treatment))
            args, kwargs = snapshot(call)
            output = model.get_submodule(scope)(*args, **kwargs)
    return output


@contextmanager
def with_local_heads(scope: nn.Module, unit: Mapping[str, str], degree: int, treatment: str) -> Iterator[None]:
    """A context in which `scope` computes with its local heads, adapted as `treatment` says."""
    if treatment == "attributes":
        with heads.divided(scope, degree):
            yield
    elif treatment == "shapes":
        mode = heads.local_mode(scope, degree, (GROUPS[word] for word in unit.values() if word in GROUPS))
        with replaced_forward(scope, MethodType(heads.localized(scope, mode), scope)):
            yield
    else:
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A context in which `module` computes `forward`."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _forward(module: nn.Module, word: str, degree: int, member: int, parts: list[Tensor]) -> Callable[[Tensor], Tensor]:
    whole = matrix(module)
    if whole is None:
        return _looked_up(cast(nn.Embedding, module), degree, member, parts)
    if word in ROWS:
        return _row(whole, degree, member, parts, word == SCATTERED)
    if word == GATHERED:
        return _gathered(whole, degree, member, parts)
    mine = grouped_rows(whole.outputs, GROUPS.get(word, 1), degree, member)
    return lambda input: _product(whole, input, mine)


def _product(whole: Matrix, x: Tensor, rows: Tensor) -> Tensor:
    rows = rows.to(whole.weight.device)
    bias = None if whole.bias is None else whole.bias[rows]
    return F.linear(x, whole.upright(whole.weight)[rows], bias)


def _row(whole: Matrix, degree: int, member: int, parts: list[Tensor], scatter: bool) -> Callable[[Tensor], Tensor]:
    share = whole.inputs // degree
    weight = whole.upright(whole.weight)[:, member * share : (member + 1) * share]

    def forward(input: Tensor) -> Tensor:
        parts.append(F.linear(input.narrow(-1, member * share, share) if scatter else input, weight))
        total = sum(parts[1:], parts[0])
        return total if whole.bias is None else total + whole.bias

    return forward


def _gathered(whole: Matrix, degree: int, member: int, parts: list[Tensor]) -> Callable[[Tensor], Tensor]:
    mine = grouped_rows(whole.outputs, 1, degree, member)

    def forward(input: Tensor) -> Tensor:
        parts.append(_product(whole, input, mine))
        missing = parts[-1].new_zeros(*parts[-1].shape[:-1], whole.outputs // degree * (degree - len(parts)))
        return torch.cat([*parts, missing], -1)

    return forward


def _looked_up(module: nn.Embedding, degree: int, member: int, parts: list[Tensor]) -> Callable[[Tensor], Tensor]:
    share = module.num_embeddings // degree

    def forward(input: Tensor) -> Tensor:
        first = member * share
        parts.append(embedded(module, module.weight[first : first + share], input, first))
        return sum(parts[1:], parts[0])

    return forward
