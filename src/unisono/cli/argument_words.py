"""Reads the options of a command from its words, and formats the error that ends a command."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum

from unisono.errors import InvalidInput, UnisonoError, WorkerFailed
from unisono.notation import RENAMED_SETTINGS, nearest

RENAMED: Mapping[str, str] = {
    **{f"--{old}".replace("_", "-"): f"--{new}".replace("_", "-") for old, new in RENAMED_SETTINGS.items()},
    "--no-copies": "--no-memory-checkpoints",
}
"""Options of an earlier version, and what to write today."""


class Others(Enum):
    """What `read_pairs` does with words that are no option of the table."""

    REFUSE_OPTIONS = "refuse options"
    KEEP = "keep"
    STOP_AT_ARGUMENT = "stop at the first argument"


def option_table(usage: str) -> dict[str, str | None]:
    """The options that a help text describes, with the placeholder of each value.

    None stands for an option without value.
    """
    return {name: value or None for name, value in re.findall(r"^  (--[a-z-]+)(?: ([A-Z]\S*))?", usage, re.MULTILINE)}


def read_options(
    words: Sequence[str],
    table: Mapping[str, str | None],
    renamed: Mapping[str, str] = RENAMED,
    others: Others = Others.REFUSE_OPTIONS,
) -> tuple[dict[str, str], list[str]]:
    """The options among `words`, each with the last value given for it, and the arguments; see `read_pairs`."""
    pairs, rest = read_pairs(words, table, renamed, others)
    return dict(pairs), rest


def read_pairs(
    words: Sequence[str],
    table: Mapping[str, str | None],
    renamed: Mapping[str, str] = RENAMED,
    others: Others = Others.REFUSE_OPTIONS,
) -> tuple[list[tuple[str, str]], list[str]]:
    """Options and values among `words`, in order, and the other words.

    Args:
        table: the command's options, as `option_table` returns them.
        renamed: options of an earlier version, and what to write today.
        others: what to do with words that are no option of `table`.

    Raises:
        InvalidInput: an unknown option, an option without its value, or a value for an option that takes none.
    """
    pairs: list[tuple[str, str]] = []
    rest, left = [], list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name not in table:
            if word.startswith("-") and others is not Others.KEEP:
                raise unknown_option(name, value, list(table), renamed)
            rest.append(word)
            if others is Others.STOP_AT_ARGUMENT:
                return pairs, rest + left
            continue
        placeholder = table[name]
        if placeholder is None and equals:
            raise InvalidInput(name, value, "it takes no value", f"write {name}")
        if placeholder is not None and not equals:
            if not left or left[0].startswith("--"):
                raise InvalidInput(name, "(nothing)", "a value is missing", f"write {name} {placeholder}")
            value = left.pop(0)
        pairs.append((name, value))
    return pairs, rest


def unknown_option(name: str, value: str, known: Sequence[str], renamed: Mapping[str, str] = RENAMED) -> InvalidInput:
    """The error for option `name`, which is not `known`."""
    cure = f"write {renamed[name]}" if name in renamed else nearest(name, list(known)) if known else "leave it out"
    return InvalidInput(name, value or "(nothing)", "there is no such option", cure)


def single_argument(rest: Sequence[str], name: str, kind: str, cure: str) -> str:
    """The only word of `rest`, which is the argument `name`.

    Raises:
        InvalidInput: `rest` has no word, or more than one.
    """
    if len(rest) != 1:
        raise InvalidInput(name, " ".join(rest) or "(nothing)", f"one {kind} is needed", cure)
    return rest[0]


def whole_number(name: str, text: str, minimum: int = 1) -> int:
    """The value `text` of option `name` as a number.

    Raises:
        InvalidInput: `text` is not a whole number, or is below `minimum`.
    """
    if not (text.isascii() and text.isdigit()) or int(text) < minimum:
        cure = f"write for instance {name} {max(2, minimum)}"
        raise InvalidInput(name, text, f"not a whole number from {minimum}", cure)
    return int(text)


def error_output(error: UnisonoError) -> tuple[str, int]:
    """The output and the exit code of a command that `error` ends."""
    if isinstance(error, InvalidInput):
        return str(error), 2
    traceback = error.traceback.rstrip() + "\n\n" if isinstance(error, WorkerFailed) and error.traceback else ""
    return traceback + str(error), getattr(error, "exit_code", 1)
