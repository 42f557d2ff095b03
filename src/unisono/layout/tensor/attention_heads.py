"""Adapts attention code that computes with the number of all heads to the heads of one worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unisono.errors import InvalidInput
from unisono.layout.tensor.linear_modules import matrix

NUMBERS_OF_HEADS = (
    "n_head", "n_heads", "num_heads", "heads", "nhead", "num_attention_heads", "n_kv_head", "n_kv_heads",
    "num_kv_heads", "num_key_value_heads", "kv_heads", "n_local_heads", "n_local_kv_heads",
)  # fmt: skip
_WIDTHS_OF_ONE_HEAD = ("head_dim", "head_width", "head_size", "d_head", "dim_head", "attention_head_size")
# widths to which attention code reshapes its output
WIDTHS_OF_HEADS = ("all_head_size", "split_size", "inner_dim")

_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
_SPLITS = (Tensor.split, torch.split)


def head_counts(module: nn.Module) -> dict[str, int]:
    """The numbers of heads among `module`'s own attributes."""
    own = vars(module)
    return {name: own[name] for name in NUMBERS_OF_HEADS if type(own.get(name)) is int and own[name] > 0}


def heads(module: nn.Module) -> dict[str, int]:
    """The numbers of heads of one module, by name.

    They are attributes of the module; without such attributes, the fewest outputs of its matrices over a head's width.
    """
    own, found = vars(module), [each for child in module.children() if (each := matrix(child)) is not None]
    widths = {name: own[name] for name in _WIDTHS_OF_ONE_HEAD if type(own.get(name)) is int and own[name] > 0}
    if head_counts(module) or not widths or len(found) < 2:
        return head_counts(module)
    name, width = next(iter(widths.items()))
    return {f"of {name}={width}": min(each.outputs for each in found) // width}


def indivisible_heads(module: nn.Module, degree: int) -> str | None:
    """A sentence with the number of heads inside `module` that does not divide by `degree`; None if all divide."""
    for inner in module.modules():
        for name, number in heads(inner).items():
            if number % degree:
                return f"{number} heads ({name}) do not divide by {degree}"
    return None


def check_heads(model: nn.Module, degree: int) -> None:
    """Refuse a degree that cuts through heads; reads attributes only.

    Raises:
        InvalidInput: `degree` is below 1 or does not divide every number of heads in `model`.
    """
    if degree < 1:
        raise InvalidInput("tensor", degree, "below 1", "write tensor=1")
    found = {(name, number) for module in model.modules() for name, number in heads(module).items()}
    broken = sorted(f"{number} heads ({name})" for name, number in found if number % degree)
    if broken:
        common = math.gcd(*(number for _, number in found))
        nearest = min((d for d in range(1, common + 1) if common % d == 0), key=lambda d: (abs(d - degree), -d))
        problem = f"{', '.join(broken)} do not divide by {degree}; tensor must divide {common}"
        raise InvalidInput("tensor", degree, problem, f"write tensor={nearest}")


@contextmanager
def divided(scope: nn.Module, degree: int) -> Iterator[None]:
    """A context in which every number of heads inside `scope` is that of one of `degree` workers."""
    undo = divide(scope, degree)
    try:
        yield
    finally:
        for module, name, value in undo:
            setattr(module, name, value)


def divide(scope: nn.Module, degree: int) -> list[tuple[nn.Module, str, int]]:
    """Set the numbers of heads of every module in `scope` to those of one worker; returns the former ones.

    Changes only attributes of the modules themselves: a config object is shared by all layers.
    """
    before = []
    for module in scope.modules():
        numbers = head_counts(module)
        if numbers and all(number % degree == 0 for number in numbers.values()):
            own = vars(module)
            widths = {name: own[name] for name in WIDTHS_OF_HEADS if type(own.get(name)) is int}
            for name, value in (numbers | widths).items():
                before.append((module, name, value))
                setattr(module, name, value // degree)
    return before


class LocalShapes(TorchFunctionMode):
    """A function mode in which reshapes to sizes with the number of all heads use the local number of heads.

    Only calls that would fail are changed: a view to `degree` times the number of elements, and a split into the
    `groups` blocks of a matrix of queries, keys and values.
    """

    def __init__(self, degree: int, groups: Iterable[int], heads: Iterable[int]) -> None:
        super().__init__()
        self.degree, self.groups, self.heads = degree, frozenset(groups), frozenset(heads)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _VIEWS:
            args = self._viewed(args)
        elif func in _SPLITS:
            args, kwargs = self._split(args, dict(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _viewed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *sizes = args
        wanted = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
        if not wanted or not all(isinstance(size, int) for size in wanted) or -1 in wanted:
            return args
        if math.prod(wanted) != x.numel() * self.degree:
            return args
        fitting = local_sizes(tuple(x.shape), tuple(wanted), self.degree, self.heads)
        return args if fitting is None else (x, fitting)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, sizes, *rest = (
            args if len(args) > 1 else (*args, kwargs.pop("split_size", kwargs.pop("split_size_or_sections", None)))
        )
        whole = x.shape[rest[0] if rest else kwargs.get("dim", 0)] * self.degree
        if isinstance(sizes, int) and any(sizes * groups == whole for groups in self.groups):
            sizes //= self.degree
        elif isinstance(sizes, tuple | list) and sum(sizes) == whole:
            sizes = [size // self.degree for size in sizes]
        return (x, sizes, *rest), kwargs


def local_sizes(
    shape: tuple[int, ...], wanted: tuple[int, ...], degree: int, heads: frozenset[int] = frozenset()
) -> tuple[int, ...] | None:
    """`wanted`, which is `degree` times too large for `shape`, with the number of heads in it divided by `degree`.

    Leading sizes that have the same product in `shape` (samples, positions) are skipped, so that the choice does not
    depend on the number of samples. Of the others, a known number of heads is divided, else the first size that divides
    by `degree`. None if no size does.
    """
    begun = {math.prod(shape[:i]) for i in range(len(shape))}
    start = max(j for j in range(len(wanted)) if math.prod(wanted[:j]) in begun)
    dividing = [j for j in range(start, len(wanted)) if wanted[j] % degree == 0]
    if not dividing:
        return None
    chosen = next((j for j in dividing if wanted[j] in heads), dividing[0])
    return (*wanted[:chosen], wanted[chosen] // degree, *wanted[chosen + 1 :])


def localized(scope: nn.Module, mode: Callable[[], LocalShapes]) -> Callable[..., Any]:
    """The forward function of `scope`, to be bound to it, which runs under a new `LocalShapes` in each call."""
    before = vars(scope).get("forward")

    @wraps(type(scope).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with mode():
            return type(self).forward(self, *args, **kwargs) if before is None else before(*args, **kwargs)

    return forward


def local_mode(scope: nn.Module, degree: int, groups: Iterable[int]) -> Callable[[], LocalShapes]:
    """A factory of the `LocalShapes` for one attention module."""
    heads = {number for module in scope.modules() for number in head_counts(module).values()}
    kept = tuple(groups)
    return lambda: LocalShapes(degree, kept, heads)
