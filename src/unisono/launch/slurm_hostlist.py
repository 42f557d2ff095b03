"""Parses Slurm's compact notations for lists of hosts and of counts."""

from __future__ import annotations

import itertools
import re

from unisono.errors import InvalidInput

_MAX_HOSTS = 1_000_000  # a list from the environment must not exhaust memory
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(field: str, text: str) -> tuple[str, ...]:
    """Expand a bracketed list of hosts: ``n[1-2,07],login`` is ``n1, n2, n07, login``.

    Args:
        field: the environment variable whose value `text` is, for the error.
        text: names separated by commas, each with any number of ``[low-high,…]`` parts.

    Raises:
        InvalidInput: brackets do not match, or a range is not made of numbers.
    """
    hosts: list[str] = []
    for name in _split(field, text):
        parts = re.split(r"\[([^\[\]]*)\]", name)
        if any(bracket in part for part in parts for bracket in "[]") or not name:
            raise _unreadable(field, text)
        choices = [_ranges(field, text, part) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts += map("".join, itertools.islice(itertools.product(*choices), _MAX_HOSTS))
    return tuple(hosts)


def counts(field: str, text: str) -> tuple[int, ...]:
    """Expand a list with repetitions: ``2(x3),1`` is ``2, 2, 2, 1``.

    Raises:
        InvalidInput: `text` is not such a list.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MAX_HOSTS:
            raise _unreadable(field, text)
        numbers += [int(match[1])] * int(match[2] or 1)
    return tuple(numbers)


def _split(field: str, text: str) -> list[str]:
    """Split `text` at the commas outside brackets."""
    names, depth = [""], 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise _unreadable(field, text)
        if character == "," and depth == 0:
            names.append("")
        else:
            names[-1] += character
    return names


def _ranges(field: str, text: str, ranges: str) -> list[str]:
    names: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        high = high or low
        if not (low.isdecimal() and high.isdecimal() and 0 <= int(high) - int(low) < _MAX_HOSTS):
            raise _unreadable(field, text)
        names += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return names


def _unreadable(field: str, text: str) -> InvalidInput:
    return InvalidInput(
        field,
        text,
        "not a list in Slurm's notation",
        "start the worker by srun, and do not change its variables",
    )
