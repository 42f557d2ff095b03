"""Who may be in the next view, and whose state it starts from: arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from unisono.membership.values import Standing, View


def best(standings: Mapping[str, Standing]) -> tuple[Standing, tuple[str, ...]]:
    """The most advanced standing, and who has it. Of several digests at the same step, which one of replicas whose
    memory went wrong can cause, the one that most have, and of as many the first."""
    furthest = max((each.view, each.step) for each in standings.values())
    there = [each for each in standings.values() if (each.view, each.step) == furthest]
    (chosen, _), *_ = Counter(there).most_common(1)
    return chosen, tuple(worker for worker, each in standings.items() if each == chosen)


def unproven(lineage: Sequence[View], start: Standing, ended: Mapping[str, Standing]) -> list[View]:
    """Views of whose steps some may be committed and not be in the state `start`.

    A step is committed once all members of a view have it in their state. In a view that one of `ended`, workers that
    have ended it, was a member of, and stands before, none is and none ever will be.

    Args:
        lineage: the views whose states follow from each other.
    """
    later = [view for view in lineage if view.number > start.view]
    forgotten = lineage[:1] if lineage and lineage[0].start.view > start.view else []
    return [*forgotten, *(v for v in later if not any(m in ended and ended[m].view < v.number for m in v.members))]


def acquainted(workers: Sequence[str], estranged: Iterable[tuple[str, str]]) -> list[str]:
    """As many of `workers`, in their order, as a simple rule finds among whom no two are `estranged`: whoever is so
    from most goes first, of several the last in order."""
    apart: dict[str, set[str]] = {worker: set() for worker in workers}
    for one, other in estranged:
        if one != other and one in apart and other in apart:
            apart[one].add(other)
            apart[other].add(one)
    rank = {worker: i for i, worker in enumerate(workers)}
    troubled = {worker for worker, others in apart.items() if others}
    while troubled:
        out = max(troubled, key=lambda worker: (len(apart[worker]), rank[worker]))
        for other in apart.pop(out):
            apart[other].discard(out)
        troubled = {worker for worker in troubled if worker != out and apart[worker]}
    return [worker for worker in workers if worker in apart]


def seated(before: Sequence[str], candidates: Collection[str], unit: int, maximum: int) -> list[str]:
    """`candidates` in the order of their ranks, in whole replicas of `unit`, at most `maximum`.

    Replicas of `before` that are whole stay whole and in their order; of the others' survivors and of who came since
    new ones are made, in order.
    """
    among, members = set(candidates), set(before)
    whole = [before[i : i + unit] for i in range(0, len(before) - unit + 1, unit)]
    staying = [m for replica in whole if among.issuperset(replica) for m in replica]
    seated_already = set(staying)
    survivors = [m for m in before if m in among and m not in seated_already]
    new = [m for m in candidates if m not in members]
    ordered = [*staying, *survivors, *new]
    return ordered[: min(len(ordered), maximum) // unit * unit]
