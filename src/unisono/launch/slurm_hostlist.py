"""Slurm's short notations for lists of hosts and of counts, as pure functions."""

from __future__ import annotations

import itertools
import re

from unisono.errors import InvalidInput

_LARGEST = 1_000_000  # hosts; a list from the environment must not fill the memory
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(field: str, text: str) -> tuple[str, ...]:
    """The hosts of a bracketed list: ``n[1-2,07],login`` is ``n1, n2, n07, login``.

    Args:
        field: the variable that `text` comes from, for the message.
        text: names separated by commas, each with any number of ``[low-high,…]`` parts.

    Raises:
        InvalidInput: brackets do not match, or a range is not made of numbers.
    """
    hosts: list[str] = []
    for name in _split(field, text):
        pieces = re.split(r"\[([^\[\]]*)\]", name)
        if any(mark in piece for piece in pieces for mark in "[]") or not name:
            raise _unreadable(field, text)
        choices = [_ranges(field, text, piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        hosts += map("".join, itertools.islice(itertools.product(*choices), _LARGEST))
    return tuple(hosts)


def counts(field: str, text: str) -> tuple[int, ...]:
    """The numbers of a repeated list: ``2(x3),1`` is ``2, 2, 2, 1``.

    Raises:
        InvalidInput: `text` is not such a list.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _LARGEST:
            raise _unreadable(field, text)
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _split(field: str, text: str) -> list[str]:
    """`text` at the commas outside brackets."""
    names, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise _unreadable(field, text)
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return names


def _ranges(field: str, text: str, ranges: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        high = high or low
        if not (low.isdecimal() and high.isdecimal() and 0 <= int(high) - int(low) < _LARGEST):
            raise _unreadable(field, text)
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found


def _unreadable(field: str, text: str) -> InvalidInput:
    return InvalidInput(
        field,
        text,
        "not a list in Slurm's notation",
        "start the worker by srun, and leave its variables alone",
    )
