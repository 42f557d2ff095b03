"""One notation for values everywhere: Python, command line, TOML, log, checkpoint, server processes.

A value is written as the call that makes it, ``AllReduce()`` or ``Exact(fraction_bits=40)``. Text is parsed, never
evaluated. It is a call of a class in a table; arguments are literals, further calls, or tuples or mappings of these.
The caller of `parse` gives the table, so text can name no other class. `show` and `write` are the inverse of `parse`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from unisono.errors import InvalidInput

RENAMED_SETTINGS = {
    "fewest": "min_workers",
    "most": "max_workers",
    "copies": "memory_checkpoints",
    "keep": "keep_checkpoints",
    "run": "run_dir",
    "recompute": "activation_checkpointing",
    "deadline_seconds": "timeout_seconds",
    "compare_every": "compare_replicas_every",
}
"""Fields of `Config` in a ``config.toml`` or a checkpoint of an earlier version, and their names today."""
RENAMED_ARGUMENTS = {"Gossip": {"meet_every": "synchronize_every"}}
"""For each class: the names of arguments in text of an earlier version, and their names today."""
_LONGEST = 20_000  # characters, which also limits how deeply a value is nested


def parse(field: str, text: str, names: Mapping[str, type]) -> Any:
    """The value that `text` represents.

    Args:
        field: the option's name, for the error message.
        text: for instance ``"Exact(fraction_bits=40)"``; a bare name means a call without arguments.
        names: the table of classes that may be called, by name.

    Raises:
        InvalidInput: `text` is not a literal call, has an unknown name, or has arguments that the class refuses.
    """
    if len(text) > _LONGEST:
        raise InvalidInput(field, f"{text[:40]}…", f"{len(text)} characters, more than {_LONGEST}", _example(names))
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.Call | ast.Name):
            raise InvalidInput(field, text, "not a literal call", _example(names))
        return _value(field, text, tree, names)
    except SyntaxError as error:
        raise InvalidInput(field, text, f"not a literal call ({error.msg})", _example(names)) from None
    except (ValueError, RecursionError, MemoryError) as error:  # a zero byte; nested too deeply
        problem = f"not a literal call ({type(error).__name__})"
        raise InvalidInput(field, text, problem, _example(names)) from None


def show(value: Any) -> str:
    """`value` in the notation, without arguments that equal their defaults.

    For people and for values that were parsed; it does not check that the result can be parsed again.
    """
    if type(value) is tuple:
        return f"({', '.join(map(show, value))}{',' * (len(value) == 1)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{show(key)}: {show(each)}' for key, each in value.items())}}}"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    parts = [
        f"{f.name}={show(getattr(value, f.name))}"
        for f in dataclasses.fields(value)
        if f.init and getattr(value, f.name) != _default(f)
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` of this or an earlier version, under the names of this version.

    Raises:
        InvalidInput: a setting is given under both names.
    """
    for name in settings.keys() & RENAMED_SETTINGS.keys():
        if RENAMED_SETTINGS[name] in settings:
            raise InvalidInput(name, settings[name], f"{RENAMED_SETTINGS[name]} is given too", "give one of the two")
    return {RENAMED_SETTINGS.get(name, name): value for name, value in settings.items()}


def write(field: str, value: Any, names: Mapping[str, type]) -> str:
    """`value` as text from which ``parse(field, text, names)`` makes an equal value.

    Args:
        field: the option's name, for the error message.
        names: the table of classes, by name, that the reader has.

    Raises:
        InvalidInput: the class of `value`, or of a value inside it, is not in `names`, or an argument is not a literal.
    """
    text = show(value)
    try:
        equal = parse(field, text, names) == value
    except InvalidInput:
        equal = False
    if not equal:
        raise InvalidInput(field, value, "cannot be written as text that another process reads: its class, or that of "
                           "a value inside it, is not known there, or an argument is not a literal",
                           f"use {', '.join(names)}, with literals as arguments")  # fmt: skip
    return text


def nearest(word: str, words: Mapping[str, Any] | list[str]) -> str:
    """The cure in an error message for the unknown `word`: the closest of the known `words`, or all of them."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(words))}"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _value(field: str, text: str, node: ast.expr, names: Mapping[str, type]) -> Any:
    if isinstance(node, ast.Name) and node.id == "inf":
        return math.inf
    if isinstance(node, ast.Name):
        node = ast.Call(func=node, args=[], keywords=[])
    if isinstance(node, ast.Tuple):
        return tuple(_value(field, text, element, names) for element in node.elts)
    if isinstance(node, ast.Dict):
        return _mapping(field, text, node, names)
    if not isinstance(node, ast.Call):
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            problem = f"{ast.unparse(node)} is neither a literal nor a listed name"
            raise InvalidInput(field, text, problem, _example(names)) from None
    if not isinstance(node.func, ast.Name) or node.func.id not in names:
        called = ast.unparse(node.func)
        raise InvalidInput(field, text, f"{called} is not a listed name", nearest(called, dict(names)))
    if any(k.arg is None for k in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
        raise InvalidInput(field, text, "* and ** cannot be unpacked here", "write the arguments out")
    arguments = [_value(field, text, a, names) for a in node.args]
    renamed = RENAMED_ARGUMENTS.get(node.func.id, {})
    given = [(renamed.get(k.arg, k.arg), k.value) for k in node.keywords if k.arg]
    if twice := [name for name, _ in given if [other for other, _ in given].count(name) > 1]:
        raise InvalidInput(field, text, f"{twice[0]} is given twice", "write it once")
    keywords = {name: _value(field, text, value, names) for name, value in given}
    try:
        return names[node.func.id](*arguments, **keywords)
    except (TypeError, ValueError) as error:
        cure = f"it is written {_signature(names[node.func.id])}"
        raise InvalidInput(field, text, str(error), cure) from None


def _mapping(field: str, text: str, node: ast.Dict, names: Mapping[str, type]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in zip(node.keys, node.values):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            written = "**" if key is None else ast.unparse(key)
            raise InvalidInput(
                field, text, f"{written} is not text, as the keys of a mapping have to be", _example(names)
            )
        if key.value in mapping:
            raise InvalidInput(field, text, f"{key.value!r} is written twice", "write it once")
        mapping[key.value] = _value(field, text, value, names)
    return mapping


def _signature(cls: type) -> str:
    if not dataclasses.is_dataclass(cls):
        return f"{cls.__name__}()"
    fields = [f for f in dataclasses.fields(cls) if f.init]
    shown = [f.name if _default(f) is dataclasses.MISSING else f"{f.name}={show(_default(f))}" for f in fields]
    return f"{cls.__name__}({', '.join(shown)})"


def _example(names: Mapping[str, type]) -> str:
    return "write for instance " + " or ".join(_signature(cls) for cls in list(names.values())[:2])
