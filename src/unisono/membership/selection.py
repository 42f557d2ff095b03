"""Which workers form the next view, and whose state it starts from: arithmetic without I/O."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from unisono.membership.protocol import StateVersion, View


def newest_version(versions: Mapping[str, StateVersion]) -> tuple[StateVersion, tuple[str, ...]]:
    """The newest state version, and the workers that have it.

    Damaged memory can cause several digests at the same step. The digest that most workers have is then taken, and the
    first one on a tie.
    """
    furthest = max((each.view, each.step) for each in versions.values())
    candidates = [each for each in versions.values() if (each.view, each.step) == furthest]
    (chosen, _), *_ = Counter(candidates).most_common(1)
    return chosen, tuple(worker for worker, each in versions.items() if each == chosen)


def unproven_views(lineage: Sequence[View], start: StateVersion, ended: Mapping[str, StateVersion]) -> list[View]:
    """Views of which committed steps may be missing in the state `start`.

    A step is committed once all members of a view have it in their state. If a member of view *n* has ended it with a
    state of an earlier view, no step of view *n* is committed, and none ever will be.

    Args:
        lineage: the views whose states follow from each other.
        ended: state versions of workers that have ended these views.
    """
    later = [view for view in lineage if view.number > start.view]
    forgotten = lineage[:1] if lineage and lineage[0].start.view > start.view else []
    return [*forgotten, *(v for v in later if not any(m in ended and ended[m].view < v.number for m in v.members))]


def mutually_reachable(workers: Sequence[str], unreachable: Iterable[tuple[str, Collection[str]]]) -> list[str]:
    """A subset of `workers`, in order, in which every pair can reach each other.

    Greedy: the worker with the most unreachable peers is removed (on a tie, the last one), until every pair can reach
    each other. The result need not be the largest such subset. Sets of workers are the bits of an integer, so that
    thousands of workers that cannot reach thousands of others take milliseconds.

    Args:
        unreachable: pairs of a worker and the peers that it could not reach.
    """
    rank = {worker: i for i, worker in enumerate(workers)}
    peers = _unreachable_ranks(rank, unreachable)
    left = (1 << len(workers)) - 1
    # The number of a worker's unreachable peers never grows: the heap holds that number, or more.
    queue = [(-others.bit_count(), -i) for i, others in peers.items()]
    heapq.heapify(queue)
    while queue:
        queued, i = queue[0]
        actual = -(peers[-i] & left).bit_count()
        if not actual:
            heapq.heappop(queue)
        elif actual != queued:
            heapq.heapreplace(queue, (actual, i))
        else:
            heapq.heappop(queue)
            left &= ~(1 << -i)
    return [worker for worker, i in rank.items() if left >> i & 1]


def _unreachable_ranks(rank: Mapping[str, int], unreachable: Iterable[tuple[str, Collection[str]]]) -> dict[int, int]:
    """For each rank, the ranks that could not reach it, or that it could not reach, as the bits of an integer."""
    reporters_of: dict[frozenset[str], int] = defaultdict(int)
    for worker, peers in unreachable:
        if worker in rank:
            reporters_of[frozenset(peers)] |= 1 << rank[worker]
    pairs: dict[int, int] = defaultdict(int)
    for reported, reporters in reporters_of.items():
        ranks = [rank[worker] for worker in reported if worker in rank]
        bits = sum(1 << i for i in ranks)
        for i in ranks:
            pairs[i] |= reporters & ~(1 << i)
        for i in _bits(reporters):
            pairs[i] |= bits & ~(1 << i)
    return pairs


def _bits(number: int) -> list[int]:
    return [i for i, bit in enumerate(reversed(f"{number:b}")) if bit == "1"]


def assign_ranks(
    before: Sequence[str], candidates: Collection[str], replica_size: int, maximum: int, micro_batches: int = 0
) -> list[str]:
    """`candidates` in the order of their ranks in the next view.

    Only so many candidates get a rank that they form complete replicas of `replica_size` workers, are at most `maximum`
    workers, and have a number of replicas that divides `micro_batches`, if that is not 0. Complete replicas of the view
    `before` keep their order. New replicas consist first of survivors of incomplete replicas, then of workers that have
    joined since.
    """
    available, members = set(candidates), set(before)
    replicas = [before[i : i + replica_size] for i in range(0, len(before) - replica_size + 1, replica_size)]
    staying = [m for replica in replicas if available.issuperset(replica) for m in replica]
    assigned = set(staying)
    survivors = [m for m in before if m in available and m not in assigned]
    new = [m for m in candidates if m not in members]
    ordered = [*staying, *survivors, *new]
    count = min(len(ordered), maximum) // replica_size
    while micro_batches and count and micro_batches % count:
        count -= 1
    return ordered[: count * replica_size]
