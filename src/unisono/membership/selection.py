"""Which workers form the next view, and whose state it starts from: arithmetic without I/O."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from unisono.membership.protocol import StateVersion, View


def best(standings: Mapping[str, StateVersion]) -> tuple[StateVersion, tuple[str, ...]]:
    """The most advanced state version, and the workers that have it.

    Damaged memory can cause several digests at the same step: the one that most workers have wins, on a tie the first.
    """
    furthest = max((each.view, each.step) for each in standings.values())
    there = [each for each in standings.values() if (each.view, each.step) == furthest]
    (chosen, _), *_ = Counter(there).most_common(1)
    return chosen, tuple(worker for worker, each in standings.items() if each == chosen)


def unproven(lineage: Sequence[View], start: StateVersion, ended: Mapping[str, StateVersion]) -> list[View]:
    """Views of whose steps some may be committed and not be in the state `start`.

    A step is committed once all members of a view have it in their state. In a view that one of `ended`, workers that
    have ended it, was a member of, and stands before, none is and none ever will be.

    Args:
        lineage: the views whose states follow from each other.
    """
    later = [view for view in lineage if view.number > start.view]
    forgotten = lineage[:1] if lineage and lineage[0].start.view > start.view else []
    return [*forgotten, *(v for v in later if not any(m in ended and ended[m].view < v.number for m in v.members))]


def acquainted(workers: Sequence[str], missing: Iterable[tuple[str, Collection[str]]]) -> list[str]:
    """A subset of `workers`, in order, in which every pair can reach each other.

    Greedy: the worker with the most unreachable peers is removed (on a tie, the last one), until every pair can. The
    result need not be the largest such subset. Sets of workers are the bits of an integer, so that thousands which all
    miss the same thousands take milliseconds.

    Args:
        missing: workers, and the peers that each could not reach.
    """
    rank = {worker: i for i, worker in enumerate(workers)}
    apart = _apart(rank, missing)
    left = (1 << len(workers)) - 1
    # The number of a worker's unreachable peers never grows: the heap holds that number, or more.
    queue = [(-others.bit_count(), -i) for i, others in apart.items()]
    heapq.heapify(queue)
    while queue:
        said, i = queue[0]
        true = -(apart[-i] & left).bit_count()
        if not true:
            heapq.heappop(queue)
        elif true != said:
            heapq.heapreplace(queue, (true, i))
        else:
            heapq.heappop(queue)
            left &= ~(1 << -i)
    return [worker for worker, i in rank.items() if left >> i & 1]


def _apart(rank: Mapping[str, int], missing: Iterable[tuple[str, Collection[str]]]) -> dict[int, int]:
    """By rank, the ranks that could not reach it, or that it could not reach, as bits."""
    who_missed: dict[frozenset[str], int] = defaultdict(int)
    for worker, missed in missing:
        if worker in rank:
            who_missed[frozenset(missed)] |= 1 << rank[worker]
    apart: dict[int, int] = defaultdict(int)
    for missed, reporters in who_missed.items():
        them = [rank[worker] for worker in missed if worker in rank]
        bits = sum(1 << i for i in them)
        for i in them:
            apart[i] |= reporters & ~(1 << i)
        for i in _bits(reporters):
            apart[i] |= bits & ~(1 << i)
    return apart


def _bits(number: int) -> list[int]:
    return [i for i, bit in enumerate(reversed(f"{number:b}")) if bit == "1"]


def seated(before: Sequence[str], candidates: Collection[str], unit: int, maximum: int, shares: int = 0) -> list[str]:
    """`candidates` in the order of their ranks in the next view.

    They form complete replicas of `unit` workers, at most `maximum` workers, and a number of replicas that divides the
    micro-batches `shares`, if that is not 0. Complete replicas of the view `before` keep their order. New replicas are
    made of the survivors of the others, and then of the workers that have joined since.
    """
    among, members = set(candidates), set(before)
    whole = [before[i : i + unit] for i in range(0, len(before) - unit + 1, unit)]
    staying = [m for replica in whole if among.issuperset(replica) for m in replica]
    seated_already = set(staying)
    survivors = [m for m in before if m in among and m not in seated_already]
    new = [m for m in candidates if m not in members]
    ordered = [*staying, *survivors, *new]
    replicas = min(len(ordered), maximum) // unit
    while shares and replicas and shares % replicas:
        replicas -= 1
    return ordered[: replicas * unit]
