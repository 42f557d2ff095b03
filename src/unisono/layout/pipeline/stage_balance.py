"""Where to cut a chain of units into stages: exact arithmetic, without a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from unisono.errors import InvalidInput

COST_UNITS = 10_000  # costs are rounded to integers with this sum, so that sums do not depend on the order
TOLERANCE = 1.02  # times within this factor count as equal, as measurements are not more precise


def balance(
    costs: Sequence[float], stages: int, *, bytes: Sequence[int] | None = None, limit: int | None = None
) -> tuple[int, ...]:
    """The units at which stages 1, 2, ... begin, such that the largest cost of a stage is minimal.

    Exact, by dynamic programming over (stages, units); of equal optima, the earliest cuts. `bytes` has the bytes of
    each unit, and no stage may exceed `limit` bytes.

    Raises:
        InvalidInput: fewer units than stages, or no cut keeps every stage within `limit`.
    """
    units = len(costs)
    if not 1 <= stages <= units:
        raise InvalidInput("stages", stages, f"the model has {units} units, so 1 to {units} stages",
                           f"cut into {max(1, min(stages, units))}")  # fmt: skip
    seconds = [0.0, *accumulate(costs)]
    weight = [0, *accumulate(bytes or [0] * units)]
    bound = math.inf if limit is None else limit

    def stage(begin: int, end: int) -> float:
        return seconds[end] - seconds[begin] if weight[end] - weight[begin] <= bound else math.inf

    def worst(best: Sequence[float], end: int, begin: int) -> float:
        return max(best[begin], stage(begin, end))

    best = [stage(0, end) for end in range(units + 1)]  # best[end]: the first `end` units in as many stages as so far
    chosen: list[list[int]] = []
    for count in range(2, stages + 1):
        begins = [min(range(count - 1, end), key=partial(worst, best, end), default=0) for end in range(units + 1)]
        best = [max(best[b], stage(b, end)) if end >= count else math.inf for end, b in enumerate(begins)]
        chosen.append(begins)
    if math.isinf(best[units]):
        raise InvalidInput("pipeline", stages, f"no cut into {stages} stages keeps each within {limit} bytes",
                           "use more stages or a higher limit")  # fmt: skip
    cuts: list[int] = []
    for begins in reversed(chosen):
        cuts.insert(0, begins[cuts[0] if cuts else units])
    return tuple(cuts)


def balance_workers(
    costs: Sequence[float], bytes: Sequence[int], holders: Sequence[int], limit: int | None = None
) -> tuple[int, ...]:
    """The units at which stages begin, such that the busiest worker's cost is minimal. Among cuts within `TOLERANCE`,
    the heaviest worker's bytes are minimal.

    With one stage per worker, the cost is optimal. With several, the result of `balance` for single stages is improved
    by moving neighbouring cuts together, until that no longer helps.

    Args:
        costs: the cost of each unit of the chain, in seconds or on any other scale.
        bytes: the bytes of each unit of the chain.
        holders: the worker of each stage.
        limit: the most bytes that a stage may have.

    Raises:
        InvalidInput: as `balance`.
    """
    whole = sum(costs) or 1.0
    parts = [round(COST_UNITS * cost / whole) for cost in costs]
    busy, heavy = partial(_loads, parts, holders), partial(_loads, bytes, holders)

    def beyond(cuts: tuple[int, ...]) -> int:
        return 0 if limit is None else max(0, max(sums(bytes, cuts)) - limit)

    first = balance(parts, len(holders), bytes=bytes, limit=limit)
    quick = _improved(first, len(costs), lambda cuts: [beyond(cuts), *busy(cuts)])
    enough = math.floor(TOLERANCE * busy(quick)[0])
    return _improved(quick, len(costs), lambda cuts: [beyond(cuts), max(enough, busy(cuts)[0]), *heavy(cuts)])


def sums(values: Sequence[Any], cuts: Sequence[int]) -> list[Any]:
    """The sum of the values in each stage."""
    return [sum(values[begin:end]) for begin, end in pairwise((0, *cuts, len(values)))]


def _loads(values: Sequence[int], holders: Sequence[int], cuts: Sequence[int]) -> list[int]:
    """The sum of the values of each worker, in descending order."""
    found = dict.fromkeys(holders, 0)
    for holder, value in zip(holders, sums(values, cuts), strict=True):
        found[holder] += value
    return sorted(found.values(), reverse=True)


def _improved(cuts: tuple[int, ...], units: int, cost: Callable[[tuple[int, ...]], list[int]]) -> tuple[int, ...]:
    """Hill climbing from `cuts`, until no move reduces the cost."""
    while True:
        best = min(_moves(cuts, units), key=cost, default=cuts)
        if cost(best) >= cost(cuts):
            return cuts
        cuts = best


def _moves(cuts: tuple[int, ...], units: int) -> Iterator[tuple[int, ...]]:
    """All `cuts` in which neighbouring cuts are moved by the same distance, and no stage is empty."""
    for begin in range(len(cuts)):
        for end in range(begin + 1, len(cuts) + 1):
            low = cuts[begin - 1] + 1 if begin else 1
            high = cuts[end] - 1 if end < len(cuts) else units - 1
            for by in range(low - cuts[begin], high - cuts[end - 1] + 1):
                if by:
                    yield (*cuts[:begin], *(cut + by for cut in cuts[begin:end]), *cuts[end:])
