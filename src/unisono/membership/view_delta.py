"""What a view has of one before it: with thousands of workers the difference is small, and the whole is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unisono.membership.protocol import StateVersion, View, WorkerAddress

MOST_MEMBERS = 1 << 16  # of a view
Run = tuple[int, int]
"""Ranks: the first, and the one behind the last."""


@dataclass(frozen=True)
class ViewDelta:
    """From one view to a later one.

    Args:
        members: runs of ranks of the view before, and names of those who were not in it, in order.
        places: of those who were not in it.
        sources: runs of ranks of the later one.
    """

    number: int
    members: tuple[Run | str, ...]
    places: tuple[WorkerAddress, ...]
    start: StateVersion
    sources: tuple[Run, ...]


def change(before: View, after: View) -> ViewDelta | None:
    """What makes `after` of `before`; None if some member is not where it was."""
    ranks = {member: rank for rank, member in enumerate(before.members)}
    if any(m in ranks and before.places[ranks[m]] != place for m, place in zip(after.members, after.places)):
        return None
    members: list[Run | str] = []
    for found in (ranks.get(member, member) for member in after.members):
        last = members[-1] if members else ""
        if isinstance(found, int) and isinstance(last, tuple) and last[1] == found:
            members[-1] = (last[0], found + 1)
        else:
            members.append((found, found + 1) if isinstance(found, int) else found)
    places = tuple(place for member, place in zip(after.members, after.places) if member not in ranks)
    sources = set(after.sources)
    there = (rank for rank, member in enumerate(after.members) if member in sources)
    return ViewDelta(after.number, tuple(members), places, after.start, tuple(_runs(there)))


def changed(before: View, told: ViewDelta) -> View:
    """The later view.

    Raises:
        ValueError: it cannot be made of that one, or would have more than `MOST_MEMBERS`.
    """
    if sum(1 if isinstance(each, str) else each[1] - each[0] for each in told.members) > MOST_MEMBERS:
        raise ValueError(f"view {told.number} has more than {MOST_MEMBERS} members")
    members: list[str] = []
    places: list[WorkerAddress] = []
    new = iter(told.places)
    for each in told.members:
        if isinstance(each, str):
            members.append(each)
            places += [place for place in [next(new, None)] if place is not None]
        else:
            members += before.members[each[0] : each[1]]
            places += before.places[each[0] : each[1]]
    if len(places) != len(members):
        raise ValueError(f"view {told.number} has {len(members)} members in {len(places)} places")
    sources = tuple(member for first, behind in told.sources for member in members[first:behind])
    return View(told.number, tuple(members), told.start, sources, tuple(places))


def _runs(ranks: Iterable[int]) -> Sequence[Run]:
    found: list[Run] = []
    for rank in ranks:
        if found and found[-1][1] == rank:
            found[-1] = (found[-1][0], rank + 1)
        else:
            found.append((rank, rank + 1))
    return found
