"""Frozen values, written as JSON knows it, for a process that has to make them again.

A value is written as its class and its fields. The reader imports the class: what is read comes from whoever started
the process, who says which modules it runs anyway.
"""

from __future__ import annotations

import dataclasses
import importlib
from operator import attrgetter
from typing import Any

from unisono.errors import InvalidInput


def write(field: str, value: Any) -> Any:
    """`value` for JSON. Raises `InvalidInput`, which names `field`, for what `read` could not make again."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: write(field, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    if isinstance(value, list | tuple):
        return [write(field, each) for each in value]
    if isinstance(value, dict):
        return {"entries": [[write(field, key), write(field, each)] for key, each in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidInput(field, value, "a server in another process could not make it again",
                       "use a frozen dataclass of numbers, text and further dataclasses")  # fmt: skip


def read(written: Any) -> Any:
    """What was written; lists come back as tuples."""
    if isinstance(written, list):
        return tuple(read(each) for each in written)
    if isinstance(written, dict) and "entries" in written:
        return {read(key): read(each) for key, each in written["entries"]}
    if isinstance(written, dict):
        module, _, name = written["class"].partition(":")
        made = attrgetter(name)(importlib.import_module(module))
        return made(**{key: read(each) for key, each in written["fields"].items()})
    return written
