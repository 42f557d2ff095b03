"""Checks of the functions that a user passes, before anything is started."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from unisono.errors import InvalidInput


def check_function(field: str, value: Any, arguments: Sequence[str], example: str) -> None:
    """Raise `InvalidInput` unless `value` is a function, or another object, that can be called with `arguments`.

    Args:
        field: as the user wrote it.
        arguments: names of the positional arguments that it is called with.
        example: what to write instead.
    """
    if isinstance(value, type):
        problem = f"a class: a call of it makes an object, and is not {field}({', '.join(arguments)})"
        raise InvalidInput(field, value.__name__, problem, f"write {example}")
    check_callable(field, value, arguments, example)


def check_callable(field: str, value: Any, arguments: Sequence[str], example: str) -> None:
    """As `check_function`, for what may be a class too."""
    if not callable(value):
        raise InvalidInput(field, name_of(value), "it cannot be called", f"write {example}")
    try:
        signature = inspect.signature(value.forward if isinstance(value, nn.Module) else value)
    except (TypeError, ValueError):  # some functions that are written in C do not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        problem = f"it is called as {field}({', '.join(arguments)}), which its arguments do not allow ({error})"
        raise InvalidInput(field, name_of(value), problem, f"write {example}") from None


def name_of(value: Any) -> str:
    """What a message calls `value`: the name of a function or class, else of the object's class."""
    found = getattr(value, "__name__", None)
    return found if isinstance(found, str) else type(value).__name__


def required(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments that `function` cannot be called without; none where it does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]
