"""Traits: named texts that must be equal on all workers of a run. They are compared before a worker joins.

A worker on another host may have another file for the task's name, other data, or other hyperparameters. A trait is a
short value itself, or the digest of a long value. A trait that only one worker has is not compared. So versions of
torch with more hyperparameters, or data that cannot be read, cause no error. Weights are compared only by names and
shapes, since all workers receive the weights of one worker.
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
    """Compare the traits of two workers.

    Args:
        mine, theirs: the traits of one worker, and those of another worker or of the run.
        where: the owner of `mine` in the message, as ``this worker's``.
        whose: the owner of `theirs` in the message, as ``the run``.

    Raises:
        TaskMismatch: the traits differ; the message names those that do, and both values of the first one.
    """
    # Code comes last: a difference in what it computes is more informative.
    names = sorted(theirs, key=lambda name: name.startswith(CODE))
    found = [(name, *values) for name in names if (values := _difference(name, mine, theirs)) is not None]
    if not found:
        return
    name, here, there = found[0]
    others = ", ".join(name for name, *_ in found[1:])
    also = f" (they differ in {others} as well)" if others else ""
    raise TaskMismatch(name, here, f"that is {where}, and {whose} has {there}{also}", _CURE)


def _difference(name: str, mine: Traits, theirs: Traits) -> tuple[str, str] | None:
    """Both values of a trait as texts if they differ, else None."""
    if name not in mine or mine[name] == theirs[name]:
        return None
    return _items_that_differ(mine[name], theirs[name]) if name == DATA else (mine[name], theirs[name])


def _items_that_differ(mine: str, theirs: str) -> tuple[str, str] | None:
    with suppress(ValueError, TypeError):
        here, there = ({item.index: item for item in decode(text)} for text in (mine, theirs))
        odd = [index for index, item in here.items() if index in there and not item.matches(there[index])]
        return (f"sample {odd[0]}", "another one under this number") if odd else None
    return None
