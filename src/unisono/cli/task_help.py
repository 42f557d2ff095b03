"""Help texts about a task's options, from its function's signature and docstring."""

from __future__ import annotations

import inspect

from unisono.tasks.arguments import REQUIRED, Parameter, option, shown
from unisono.tasks.source import NamedTask


def task_options(name: str) -> str:
    """The options of the task `name`, one per line, for the end of a help text.

    Raises:
        InvalidInput: there is no such task.
    """
    lines = [_line(name, parameter) for name, parameter in NamedTask(name).parameters().items()]
    return "\n".join([f"options of {name}:", *(lines or ["  none"])])


def first_sentence(name: str) -> str:
    """The first line of the task's docstring."""
    return (inspect.getdoc(NamedTask(name).target()) or "").partition("\n")[0]


def _line(name: str, parameter: Parameter) -> str:
    default = "required" if parameter.default is REQUIRED else _default(parameter.default)
    return f"  {option(name) + ' ' + shown(parameter.kind):<27} {default}".rstrip()


def _default(value: object) -> str:
    return "" if value in (None, ()) else f"[{value}]"
