"""The words of a command that has options of its own, and few; and those with which a command ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.errors import InvalidInput, UnisonoError, WorkerFailed
from unisono.notation import RENAMED_SETTINGS, nearest

RENAMED: Mapping[str, str] = {
    **{f"--{old}".replace("_", "-"): f"--{new}".replace("_", "-") for old, new in RENAMED_SETTINGS.items()},
    "--no-copies": "--no-memory-checkpoints",
}
"""Options of an earlier version, and what to write today."""


def read(
    words: Sequence[str], known: Mapping[str, bool], renamed: Mapping[str, str] = RENAMED
) -> tuple[dict[str, str], list[str]]:
    """The options among `words`, and what else there is.

    Args:
        known: every option, and whether a value follows it.
        renamed: options of an earlier version, and what to write today.

    Raises:
        InvalidInput: an unknown option, or one without its value.
    """
    found: dict[str, str] = {}
    rest, left = [], list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            rest.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in known:
            raise unknown(name, value, list(known), renamed)
        if equals and not known[name]:
            raise InvalidInput(name, value, "it takes no value", f"write {name}")
        if known[name] and not equals and not left:
            raise InvalidInput(name, "(nothing)", "a value is missing", f"write {name} VALUE")
        found[name] = value if equals or not known[name] else left.pop(0)
    return found, rest


def unknown(name: str, value: str, known: Sequence[str], renamed: Mapping[str, str] = RENAMED) -> InvalidInput:
    """The error for option `name`, which is not `known`."""
    cure = f"write {renamed[name]}" if name in renamed else nearest(name, list(known)) if known else "leave it out"
    return InvalidInput(name, value or "(nothing)", "there is no such option", cure)


def single(rest: Sequence[str], name: str, needed: str, cure: str) -> str:
    """The argument `name`, where `rest` holds it alone.

    Raises:
        InvalidInput: there is none, or there are several.
    """
    if len(rest) != 1:
        raise InvalidInput(name, " ".join(rest) or "(nothing)", f"one {needed} is needed", cure)
    return rest[0]


def ended(error: UnisonoError) -> tuple[str, int]:
    """What a command that `error` ends has to say, and its exit code."""
    if isinstance(error, InvalidInput):
        return str(error), 2
    traceback = error.traceback.rstrip() + "\n\n" if isinstance(error, WorkerFailed) and error.traceback else ""
    return traceback + str(error), getattr(error, "exit_code", 1)


def whole(name: str, text: str, least: int = 1) -> int:
    """The number that option `name` was given.

    Raises:
        InvalidInput: it is none, or below `least`.
    """
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise InvalidInput(name, text, f"not a whole number from {least}", f"write for instance {name} {max(2, least)}")
    return int(text)
