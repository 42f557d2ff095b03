"""Where to cut a chain of units into stages: exact arithmetic, without a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from unisono.errors import InvalidInput


def balance(
    costs: Sequence[float], stages: int, *, bytes: Sequence[int] | None = None, limit: int | None = None
) -> tuple[int, ...]:
    """Where stages 1, 2, ... begin, so that the largest sum of costs in a stage is as small as it can be.

    Exact, by dynamic programming over (stages, units); of equally good cuts the earliest. `bytes` are what each unit
    weighs, and no stage may hold more than `limit` bytes.

    Raises:
        InvalidInput: fewer units than stages, or no cut keeps every stage within `limit`.
    """
    units = len(costs)
    if not 1 <= stages <= units:
        raise InvalidInput("stages", stages, f"the model has {units} units to cut between, so 1 to {units} stages",
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
