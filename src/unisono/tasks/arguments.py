"""Converts arguments, as text from a command line, to the annotated types of a function's parameters.

Supported annotations: ``int``, ``float``, ``str``, ``bool``, ``tuple[kind, ...]``, ``Literal[…]``, ``kind | None`` and
frozen dataclasses, whose fields have dotted names (``model.layers``).
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from unisono.errors import InvalidInput
from unisono.notation import nearest

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function.

    Args:
        kind: its annotation; without one, the type of the default.
        default: its default; `REQUIRED` if it has none.
    """

    kind: Any
    default: Any = REQUIRED


def parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Every parameter of `function` by name; a dataclass is replaced by its fields, under dotted names."""
    flat: dict[str, Parameter] = {}
    for name, parameter in _signature(function).items():
        flat.update(_flatten(name, parameter))
    return flat


def bind_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], others: Collection[str] = ()
) -> dict[str, Any]:
    """Convert `arguments` to keyword arguments of `function`.

    Args:
        function: defines names and types.
        arguments: values, or text to be converted; ``{"model.layers": "4"}`` is the same as
            ``{"model": {"layers": 4}}``.
        others: further names, for the suggestion in the error for an unknown name.

    Raises:
        InvalidInput: an argument is unknown (suggests the nearest name), missing, or of another type.
    """
    known = _signature(function)
    given = nested(arguments)
    for name in given:
        if name not in known:
            raise _unknown(name, given[name], [*parameters(function), *others])
    for name, parameter in known.items():
        if parameter.default is REQUIRED and name not in given:
            raise InvalidInput(
                option(name), "(nothing)", "the task needs it", f"give {option(name)} {shown(parameter.kind)}"
            )
    return {name: _read(name, value, known[name].kind, known[name].default) for name, value in given.items()}


def nested(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Nest dotted names: ``{"a.b": 1}`` becomes ``{"a": {"b": 1}}``; later entries override earlier ones."""
    tree: dict[str, Any] = {}
    for name, value in arguments.items():
        first, _, rest = name.replace("-", "_").partition(".")
        value = nested({rest: value}) if rest else nested(value) if isinstance(value, Mapping) else value
        old = tree.get(first)
        tree[first] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return tree


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees; leaves of `above` override those of `below`."""
    both = dict(below)
    for name, value in above.items():
        old = both.get(name)
        both[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def shown(kind: Any) -> str:
    """A type as text for help messages: ``INT``, ``TEXT…``."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"{shown(get_args(kind)[0])}…"
    if _optional(kind):
        return f"{shown(_inner(kind))}|none"
    return {int: "INT", float: "NUMBER", str: "TEXT", bool: "true|false"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


def _signature(function: Callable[..., Any]) -> dict[str, Parameter]:
    hints = _hints(function)
    found = {}
    for name, p in inspect.signature(function).parameters.items():
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            guess = str if p.default in (REQUIRED, None) else type(p.default)
            found[name] = Parameter(hints.get(name, guess), p.default)
    return found


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    if isinstance(function, type):
        return get_type_hints(function)
    written = getattr(function, "__annotations__", {})  # the return annotation may exist for type checkers only
    ours = types.SimpleNamespace(__annotations__={k: v for k, v in written.items() if k != "return"})
    return get_type_hints(ours, globalns=getattr(function, "__globals__", {}))


def _flatten(name: str, parameter: Parameter) -> dict[str, Parameter]:
    if not _is_dataclass(parameter.kind):
        return {name: parameter}
    flat: dict[str, Parameter] = {}
    for inner, p in _signature(parameter.kind).items():
        default = p.default if parameter.default in (REQUIRED, None) else getattr(parameter.default, inner)
        flat.update(_flatten(f"{name}.{inner}", Parameter(p.kind, default)))
    return flat


def _read(name: str, value: Any, kind: Any, default: Any) -> Any:
    if _optional(kind):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        kind = _inner(kind)
    if _is_dataclass(kind):
        return _read_dataclass(name, value, kind, default)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(_read(name, v, item, REQUIRED) for v in values)
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if value == choice or value == str(choice):
                return choice
        raise InvalidInput(
            option(name), value, "not one of the choices", f"choose {' or '.join(map(str, get_args(kind)))}"
        )
    return _read_plain(name, value, kind)


def _read_dataclass(name: str, value: Any, kind: type, default: Any) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        cure = f"set its parts, for instance {option(name)}.{next(iter(_signature(kind)), 'part')}"
        raise InvalidInput(option(name), value, "it has parts, and no value of its own", cure)
    known = _signature(kind)
    parts = {} if default in (REQUIRED, None) else {part: getattr(default, part) for part in known}
    for part, given in value.items():
        if part not in known:
            raise _unknown(f"{name}.{part}", given, [f"{name}.{p}" for p in known])
        parts[part] = _read(f"{name}.{part}", given, known[part].kind, parts.get(part, known[part].default))
    try:
        return kind(**parts)
    except (TypeError, ValueError) as error:
        written = ", ".join(f"{part}={given}" for part, given in value.items())
        raise InvalidInput(option(name), written, str(error), f"change {option(name)}.…") from None


def _read_plain(name: str, value: Any, kind: Any) -> Any:
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, bool) is not (kind is bool) and kind in _KINDS:
        raise _wrong_type(name, value, kind)
    if kind in (int, float) and isinstance(value, str | int | float):
        try:
            number = kind(value)
        except ValueError:
            raise _wrong_type(name, value, kind) from None
        if number != number or (kind is int and isinstance(value, float) and not value.is_integer()):
            raise _wrong_type(name, value, kind)
        return number
    if kind in _KINDS and not isinstance(value, kind):
        raise _wrong_type(name, value, kind)
    return value


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _wrong_type(name: str, value: Any, kind: Any) -> InvalidInput:
    given = "(nothing)" if value is True else value
    return InvalidInput(option(name), given, f"not {_KINDS[kind]}", f"write {option(name)} {shown(kind)}")


def _unknown(name: str, value: Any, known: list[str]) -> InvalidInput:
    options = [option(k) for k in known]
    given = "(nothing)" if value is True else value
    return InvalidInput(option(name), given, "there is no such option", nearest(option(name), options))


def option(name: str) -> str:
    """The command-line option of argument `name`."""
    return "--" + name.replace("_", "-")


def _is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)


def _inner(kind: Any) -> Any:
    rest = [k for k in get_args(kind) if k is not type(None)]
    return rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007  (built at run time)
