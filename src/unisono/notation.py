"""One notation for values everywhere: Python, command line, TOML, log, checkpoint.

A value is written as the call that makes it, ``AllReduce()`` or ``Exact(fraction_bits=40)``. It is parsed, never
evaluated: a call of a listed name, whose arguments are literals, further calls, or tuples or mappings of either.
``show`` writes it back.
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
"""By class: arguments as text of an earlier version has them, and their names today."""
_LONGEST = 20_000  # characters; deeper nesting than they allow is no value of ours


def parse(field: str, text: str, names: Mapping[str, type]) -> Any:
    """The value that `text` writes down.

    Args:
        field: the option's name, for the error message.
        text: for instance ``"Exact(fraction_bits=40)"``; a bare name means a call without arguments.
        names: the names that may be called.

    Raises:
        InvalidInput: not a literal call, an unknown name, or arguments that the value refuses.
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
    except (ValueError, RecursionError, MemoryError) as error:  # a zero byte; nested without end
        problem = f"not a literal call ({type(error).__name__})"
        raise InvalidInput(field, text, problem, _example(names)) from None


def show(value: Any) -> str:
    """`value` in the notation; arguments that equal their defaults are left out. ``parse(show(v)) == v``."""
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


def nearest(word: str, words: Mapping[str, Any] | list[str]) -> str:
    """A listed word that `word` may have meant, as the end of a sentence."""
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
        raise InvalidInput(field, text, "stars cannot be unpacked here", "write the arguments out")
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
    found: dict[str, Any] = {}
    for key, value in zip(node.keys, node.values):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            said = "**" if key is None else ast.unparse(key)
            raise InvalidInput(field, text, f"{said} is no text, as the names in a mapping are", _example(names))
        if key.value in found:
            raise InvalidInput(field, text, f"{key.value!r} is named twice", "write it once")
        found[key.value] = _value(field, text, value, names)
    return found


def _signature(cls: type) -> str:
    if not dataclasses.is_dataclass(cls):
        return f"{cls.__name__}()"
    fields = [f for f in dataclasses.fields(cls) if f.init]
    shown = [f.name if _default(f) is dataclasses.MISSING else f"{f.name}={show(_default(f))}" for f in fields]
    return f"{cls.__name__}({', '.join(shown)})"


def _example(names: Mapping[str, type]) -> str:
    return "write for instance " + " or ".join(_signature(cls) for cls in list(names.values())[:2])
