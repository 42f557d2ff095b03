"""A view as a difference from an earlier one: with thousands of members, a small part of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from unisono.membership.protocol import MAX_MEMBERS, Name, StateVersion, View, WorkerAddress
from unisono.system.bounds import STRICT, Bounds, Count

RankRange = tuple[Count, Count]
"""The first rank, and the one after the last."""


@dataclass(frozen=True)
class ViewDelta:
    """The difference between a view and a later one.

    Args:
        number, start: as in the later view.
        members: members of the later view, in order: ranges of ranks in the earlier view, and names of new workers.
        addresses: addresses of the new workers, in order.
        sources: sources of the later view, as ranges of ranks in it.
    """

    number: Count
    members: Annotated[tuple[RankRange | Name, ...], Bounds(max_length=MAX_MEMBERS)]
    addresses: Annotated[tuple[WorkerAddress, ...], Bounds(max_length=MAX_MEMBERS)]
    start: StateVersion
    sources: Annotated[tuple[RankRange, ...], Bounds(max_length=MAX_MEMBERS)]

    __pydantic_config__ = STRICT


def view_delta(before: View, after: View) -> ViewDelta | None:
    """The difference between two views; None if a member of both has changed its address."""
    ranks = {member: rank for rank, member in enumerate(before.members)}
    if any(m in ranks and before.addresses[ranks[m]] != address for m, address in zip(after.members, after.addresses)):
        return None
    members: list[RankRange | str] = []
    for item in (ranks.get(member, member) for member in after.members):
        last = members[-1] if members else ""
        if isinstance(item, int) and isinstance(last, tuple) and last[1] == item:
            members[-1] = (last[0], item + 1)
        else:
            members.append((item, item + 1) if isinstance(item, int) else item)
    addresses = tuple(address for member, address in zip(after.members, after.addresses) if member not in ranks)
    sources = set(after.sources)
    source_ranks = (rank for rank, member in enumerate(after.members) if member in sources)
    return ViewDelta(after.number, tuple(members), addresses, after.start, tuple(_rank_ranges(source_ranks)))


def apply_delta(before: View, delta: ViewDelta) -> View:
    """The later view, from the earlier view `before` and the difference `delta`.

    Raises:
        ValueError: `delta` does not fit the view `before`, or the later view has more than `MAX_MEMBERS` members.
    """
    if sum(1 if isinstance(each, str) else each[1] - each[0] for each in delta.members) > MAX_MEMBERS:
        raise ValueError(f"view {delta.number} has more than {MAX_MEMBERS} members")
    members: list[str] = []
    addresses: list[WorkerAddress] = []
    new = iter(delta.addresses)
    for each in delta.members:
        if isinstance(each, str):
            members.append(each)
            addresses += [address for address in [next(new, None)] if address is not None]
        else:
            members += before.members[each[0] : each[1]]
            addresses += before.addresses[each[0] : each[1]]
    if len(addresses) != len(members):
        raise ValueError(f"view {delta.number} has {len(members)} members and {len(addresses)} addresses")
    sources = tuple(member for first, end in delta.sources for member in members[first:end])
    return View(delta.number, tuple(members), delta.start, sources, tuple(addresses))


def _rank_ranges(ranks: Iterable[int]) -> Sequence[RankRange]:
    ranges: list[RankRange] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank:
            ranges[-1] = (ranges[-1][0], rank + 1)
        else:
            ranges.append((rank, rank + 1))
    return ranges
