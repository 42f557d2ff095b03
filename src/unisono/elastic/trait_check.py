"""What all workers of a run must have in common, as named texts that are compared before a worker takes part.

A worker on another host may find another file under the task's name, other data, other hyperparameters. What can be
seen of that is a trait: short values as they are, long ones as a digest. A trait that only one side has is not
compared, so that versions of torch with more hyperparameters, or data that cannot be read, raise no alarm. Weights are
compared by names and shapes alone, since all workers take those of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from unisono.data.content_sample import decode
from unisono.errors import TaskMismatch

Traits = Mapping[str, str]
DATA, CODE = "data", "code"
_CURE = "give every host the same task, data and settings"


def check(mine: Traits, theirs: Traits, where: str, whose: str) -> None:
    """Compare.

    Args:
        mine, theirs: of a worker, and of whom it is to train with.
        where: who has `mine`: ``this worker's``.
        whose: who has `theirs`: ``the run``.

    Raises:
        TaskMismatch: they differ; says in what, and what both have where that is short.
    """
    # That code differs says less than what it makes does.
    names = sorted(theirs, key=lambda name: name.startswith(CODE))
    found = [(name, *values) for name in names if (values := _difference(name, mine, theirs)) is not None]
    if not found:
        return
    name, here, there = found[0]
    others = ", ".join(name for name, *_ in found[1:])
    also = f" (they differ in {others} as well)" if others else ""
    raise TaskMismatch(name, here, f"that is {where}, and {whose} has {there}{also}", _CURE)


def _difference(name: str, mine: Traits, theirs: Traits) -> tuple[str, str] | None:
    """What both have, in words."""
    if name not in mine or mine[name] == theirs[name]:
        return None
    return _items_that_differ(mine[name], theirs[name]) if name == DATA else (mine[name], theirs[name])


def _items_that_differ(mine: str, theirs: str) -> tuple[str, str] | None:
    with suppress(ValueError, TypeError):
        here, there = ({item.index: item for item in decode(text)} for text in (mine, theirs))
        odd = [index for index, item in here.items() if index in there and not item.matches(there[index])]
        return (f"sample {odd[0]}", "another one under this number") if odd else None
    return None
