"""Checks of values and functions from the user, before any process is started."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.errors import InvalidInput


def check_function(field: str, value: Any, arguments: Sequence[str], example: str) -> None:
    """Raise `InvalidInput` unless `value` is a function or object that can be called with `arguments`.

    Args:
        field: the name of the argument, as the user wrote it.
        arguments: names of the positional arguments that `value` is called with.
        example: what to write instead.
    """
    if isinstance(value, type):
        problem = f"a class: calling it constructs an object, and is not {field}({', '.join(arguments)})"
        raise InvalidInput(field, value.__name__, problem, f"write {example}")
    check_callable(field, value, arguments, example)


def check_callable(field: str, value: Any, arguments: Sequence[str], example: str) -> None:
    """As `check_function`; `value` may be a class too."""
    if not callable(value):
        raise InvalidInput(field, name_of(value), "it cannot be called", f"write {example}")
    try:
        signature = inspect.signature(value.forward if isinstance(value, nn.Module) else value)
    except (TypeError, ValueError):  # some functions in C have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        problem = f"it is called as {field}({', '.join(arguments)}), which its arguments do not allow ({error})"
        raise InvalidInput(field, name_of(value), problem, f"write {example}") from None


def name_of(value: Any) -> str:
    """The name of a function or class, else of the class of `value`, for messages."""
    found = getattr(value, "__name__", None)
    return found if isinstance(found, str) else type(value).__name__


def required(function: Callable[..., Any]) -> list[str]:
    """The names of required arguments of `function`; empty if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


def check_optimizer(kind: type[Optimizer]) -> None:
    """Raise `InvalidInput` if this class of optimizers does not support distributed steps."""
    if needed := required(kind.step)[1:]:  # the first is the optimizer itself
        raise InvalidInput(
            "optimizer", kind.__name__, f"its step runs the model several times, through {needed[0]}, which workers "
            "cannot do together", "use an optimizer whose step() needs no arguments, for instance AdamW")  # fmt: skip


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise `InvalidInput` unless `value` is a whole number of at least `least`."""
    check_kind(name, value, "int")
    if value < least:
        raise InvalidInput(name, value, f"below {least}", f"use {least} or more")


KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}


def check_kind(name: str, value: Any, kind: str) -> None:
    """Raise `InvalidInput` unless `value` is of that `kind`, one of `KINDS`."""
    fits = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str | Path),
    }[kind]
    if not fits:
        raise InvalidInput(name, value, f"not {KINDS[kind]}", f"write {KINDS[kind]}")
