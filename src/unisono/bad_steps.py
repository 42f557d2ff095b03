"""Which steps count: arithmetic on numbers that all workers have agreed on, so that all of them decide alike.

A step whose loss or gradient is not finite, or whose loss leaps far above those before it, would ruin weights that
took long to train. What is to be done about it is a value that the user writes: `Stop`, `Skip` or `RollBack`. An
`AnomalyDetector` looks at each step before it is applied, and remembers which ones did not count.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REMEMBERED = 64  # losses of steps that counted, by which the next is judged
ENOUGH = 16  # of them, before anything is called a spike
NORMAL = 1.4826  # times the median absolute deviation is the standard deviation, where numbers are normal
LEAST_SPREAD = 0.01  # of the median: losses that happen to be alike do not make the next one a spike
NOT_REPRESENTABLE = -math.inf
"""Said in place of the loss of a micro-batch with a gradient that the compressor's numbers cannot hold."""


@dataclass(frozen=True)
class Stop:
    """A step with a loss that is not finite ends the run, with nothing of it applied. With `clip`, whose norm says it
    at no cost, a gradient that is not finite does too; without, the next loss shows it."""


@dataclass(frozen=True)
class Skip:
    """A bad step is dropped: its samples are passed over, and the run goes on with the next step.

    Bad is a loss or a norm of the mean gradient that is not finite. The norm costs nothing with `clip`, and is not
    needed with `Exact()`, which looks at every gradient anyhow; else it is one pass over the gradients.

    Args:
        spike: a loss this many standard deviations above the median of the last 64 is bad too; they are estimated by
            the median absolute deviation, which outliers do not move (Hampel 1974), and taken for 1 % of the median at
            least. ``inf``: no loss is too large.
        limit: more bad steps than that among `within` end the run.
        within: steps.

    Raises:
        ValueError: a number out of bounds.
    """

    spike: float = math.inf
    limit: int = 5
    within: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.spike, int | float) or isinstance(self.spike, bool) or not self.spike > 0:
            raise ValueError(f"spike={self.spike!r} is not a number of deviations above 0")
        _check_whole(self, limit=1, within=1)


@dataclass(frozen=True)
class RollBack(Skip):
    """A bad step takes the run back to its newest checkpoint, from where it is trained again without that step. Cures
    what earlier steps, or a damaged memory, have done to the state. Without a checkpoint it is `Skip`.

    Args:
        before: so many steps before the bad one are left out too, as far as they come after the checkpoint (Chowdhery
            et al. 2022, "PaLM", section 5.1, leave out some hundreds).
    """

    before: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_whole(self, before=0)


BadStep = Stop | Skip
BAD_STEPS: dict[str, type] = {cls.__name__: cls for cls in (Stop, Skip, RollBack)}


def _check_whole(value: Any, **least: int) -> None:
    for name, bound in least.items():
        number = getattr(value, name)
        if not isinstance(number, int) or isinstance(number, bool) or number < bound:
            raise ValueError(f"{name}={number!r} is not a whole number from {bound}")


@dataclass(frozen=True)
class Bad:
    """Why a step must not count.

    Args:
        micro_batches: that make it so; none where only their sum is known.
    """

    step: int
    micro_batches: tuple[int, ...]
    why: str


class AnomalyDetector:
    """Looks at the steps of a run; `state` is to outlive this process.

    Attributes:
        skipped: the steps that did not count, or are not to when they are come to again.
        healed: how many replicas were found to differ and given the state of the others.
    """

    def __init__(self, policy: BadStep) -> None:
        self.policy = policy
        self.skipped: set[int] = set()
        self.healed = 0
        self._bad: list[int] = []
        self._losses: deque[float] = deque(maxlen=REMEMBERED)

    def inspect(self, step: int, losses: Sequence[float], loss: float, norm: Callable[[], float]) -> Bad | None:
        """What is wrong with `step`, if anything.

        Args:
            losses: of its micro-batches.
            loss: their mean.
            norm: computes the 2-norm of the mean gradient; called only if all losses are finite.
        """
        wrong = [m for m, each in enumerate(losses) if not math.isfinite(each)]
        if wrong:
            return Bad(step, tuple(wrong), _not_finite(losses[wrong[0]]))
        length = norm()
        if not math.isfinite(length):
            return Bad(step, (), f"the norm of the mean gradient is {length}")
        bound = self.bound
        if loss > bound:
            above = tuple(m for m, each in enumerate(losses) if each > bound)
            return Bad(step, above, f"the loss is {loss:.6g}, where up to {bound:.6g} was to be expected")
        return None

    @property
    def bound(self) -> float:
        """The largest loss that is no spike; inf while too few are known."""
        if not isinstance(self.policy, Skip) or self.policy.spike == math.inf or len(self._losses) < ENOUGH:
            return math.inf
        median = statistics.median(self._losses)
        deviation = NORMAL * statistics.median(abs(each - median) for each in self._losses)
        return median + self.policy.spike * max(deviation, LEAST_SPREAD * abs(median))

    def record_good(self, loss: float) -> None:
        """A step is taken."""
        if isinstance(self.policy, Skip) and self.policy.spike < math.inf:
            self._losses.append(loss)

    def too_many(self, step: int) -> int | None:
        """How many steps have been bad within the policy's `within`, with `step`, if too many."""
        assert isinstance(self.policy, Skip)
        recent = 1 + sum(step - self.policy.within < each <= step for each in self._bad)
        return recent if recent > self.policy.limit else None

    def record_bad(self, step: int) -> None:
        """`step` was bad, and what is to be done about it is done: a worker may be lost before."""
        self._bad.append(step)

    def skip(self, steps: Iterable[int]) -> None:
        """`steps` do not count."""
        self.skipped |= set(steps)

    def state(self) -> dict[str, Any]:
        """All that it remembers, as JSON can say it."""
        found = {"bad": list(self._bad), "skipped": sorted(self.skipped), "losses": list(self._losses)}
        return {**found, "healed": self.healed}

    def replace(self, state: Mapping[str, Any]) -> None:
        """Know what another process's judge knows, and forget all else."""
        self._bad, self.skipped, self.healed = [], set(), 0
        self.load(state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up the `state` that belongs to the weights that training goes on with: of another process, or an earlier
        one of this judge. What was found to be bad since then stays so."""
        self._losses = deque(state.get("losses", ()), maxlen=REMEMBERED)
        self._bad = self._bad or list(state.get("bad", ()))
        self.skipped |= set(state.get("skipped", ()))
        self.healed = max(self.healed, state.get("healed", 0))


def _not_finite(loss: float) -> str:
    if loss == NOT_REPRESENTABLE:
        return f"the loss is {loss}, or a gradient is too large for what travels,"
    return f"the loss is {loss}"


@dataclass(frozen=True)
class ReplicaMismatch:
    """Replicas that are not all alike.

    Args:
        source: the first of those that most are like; None where no more than half are alike.
        odd: the others.
    """

    source: int | None
    odd: tuple[int, ...]


def find_mismatch(digests: Mapping[int, float]) -> ReplicaMismatch | None:
    """Who differs from the majority, given everybody's digest; None where nobody does, or some have said 0: nothing."""
    said = list(digests.values())
    if not all(said) or len(set(said)) <= 1:
        return None
    most = max(set(said), key=said.count)
    if 2 * said.count(most) <= len(said):
        return ReplicaMismatch(None, tuple(digests))
    alike = [rank for rank, digest in digests.items() if digest == most]
    return ReplicaMismatch(alike[0], tuple(rank for rank in digests if rank not in alike))
