"""Detects bad steps, by arithmetic on numbers that are equal on all workers, so that all workers decide alike.

A step whose loss or gradient is not finite, or whose loss is a spike, would ruin weights that took long to train. The
user chooses what happens then: `Stop`, `Skip` or `RollBack`. An `AnomalyDetector` inspects each step before it is
applied, and records which steps did not count.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REMEMBERED = 64  # a loss is compared with the losses of so many earlier steps that counted
ENOUGH = 16  # a loss can be a spike once so many losses are known
NORMAL = 1.4826  # standard deviation over median absolute deviation, of a normal distribution
LEAST_SPREAD = 0.01  # least deviation over median, so that nearly equal losses do not make the next loss a spike
NOT_REPRESENTABLE = -math.inf
"""Replaces the loss of a micro-batch whose gradient the compressor cannot represent."""


@dataclass(frozen=True)
class Stop:
    """Ends the run at a step whose loss is not finite, without applying that step.

    With `clip`, a gradient that is not finite ends the run too, since its norm is computed anyway. Without `clip`, the
    loss of the next step shows it.
    """


@dataclass(frozen=True)
class Skip:
    """Skips a bad step with its samples, and continues with the next step.

    A step is bad if its loss, or the norm of its mean gradient, is not finite. The norm costs nothing with `clip`, and
    is not needed with `Exact()`, which checks every gradient; otherwise it is one pass over the gradients.

    Args:
        spike: a loss this many standard deviations above the median of the last 64 losses is bad too. The deviation is
            estimated from the median absolute deviation, which is robust to outliers (Hampel 1974), and is at least 1 %
            of the median. ``inf``: no loss is too large.
        limit: more bad steps than this within `within` steps end the run.
        within: the number of steps in which bad steps are counted for `limit`.

    Raises:
        ValueError: a number is out of its bounds.
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
    """After a bad step, rolls the run back to its newest checkpoint, and skips that step.

    This also undoes damage to the state by earlier steps, or by faulty memory. Without a checkpoint it acts as `Skip`.

    Args:
        before: this many steps before the bad step are skipped too, as far as they come after the checkpoint
            (Chowdhery et al. 2022, "PaLM", section 5.1, skip some hundreds).
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
    """A step that must not count, and why.

    Args:
        micro_batches: the micro-batches that make the step bad; empty if only their sum is known.
    """

    step: int
    micro_batches: tuple[int, ...]
    why: str


class AnomalyDetector:
    """Inspects the steps of a run; checkpoints contain its `state`.

    Attributes:
        skipped: the steps that did not count, or will not count when they are reached again after a roll back.
        healed: how many replicas differed and received the state of the majority.
    """

    def __init__(self, policy: BadStep) -> None:
        self.policy = policy
        self.skipped: set[int] = set()
        self.healed = 0
        self._bad: list[int] = []
        self._losses: deque[float] = deque(maxlen=REMEMBERED)

    def inspect(self, step: int, losses: Sequence[float], loss: float, norm: Callable[[], float]) -> Bad | None:
        """Why `step` is bad; None if it is not.

        Args:
            losses: the losses of the step's micro-batches.
            loss: the mean of these losses.
            norm: computes the 2-norm of the mean gradient; called only if all losses are finite.
        """
        nonfinite = [m for m, each in enumerate(losses) if not math.isfinite(each)]
        if nonfinite:
            return Bad(step, tuple(nonfinite), _not_finite(losses[nonfinite[0]]))
        length = norm()
        if not math.isfinite(length):
            return Bad(step, (), f"the norm of the mean gradient is {length}")
        bound = self.bound
        if loss > bound:
            above = tuple(m for m, each in enumerate(losses) if each > bound)
            return Bad(step, above, f"the loss is {loss:.6g}, where up to {bound:.6g} was expected")
        return None

    @property
    def bound(self) -> float:
        """The largest loss that is not a spike; inf while too few losses are known."""
        if not isinstance(self.policy, Skip) or self.policy.spike == math.inf or len(self._losses) < ENOUGH:
            return math.inf
        median = statistics.median(self._losses)
        deviation = NORMAL * statistics.median(abs(each - median) for each in self._losses)
        return median + self.policy.spike * max(deviation, LEAST_SPREAD * abs(median))

    def record_good(self, loss: float) -> None:
        """Record the loss of a step that was applied."""
        if isinstance(self.policy, Skip) and self.policy.spike < math.inf:
            self._losses.append(loss)

    def too_many(self, step: int) -> int | None:
        """The number of bad steps among the last `within` steps, including `step`, if it exceeds `limit`; else None."""
        assert isinstance(self.policy, Skip)
        recent = 1 + sum(step - self.policy.within < each <= step for each in self._bad)
        return recent if recent > self.policy.limit else None

    def record_bad(self, step: int) -> None:
        """Record `step` as bad. Called once the step is handled, since it is repeated if a worker is lost before."""
        self._bad.append(step)

    def skip(self, steps: Iterable[int]) -> None:
        """Make `steps` not count."""
        self.skipped |= set(steps)

    def state(self) -> dict[str, Any]:
        """The state, as JSON values."""
        state = {"bad": list(self._bad), "skipped": sorted(self.skipped), "losses": list(self._losses)}
        return {**state, "healed": self.healed}

    def replace(self, state: Mapping[str, Any]) -> None:
        """Replace the state by that of another process's detector."""
        self._bad, self.skipped, self.healed = [], set(), 0
        self.load(state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the `state` that belongs to the weights with which training continues.

        It is the state of another process's detector, or an earlier state of this one. Bad steps that were recorded
        since then stay recorded.
        """
        self._losses = deque(state.get("losses", ()), maxlen=REMEMBERED)
        self._bad = self._bad or list(state.get("bad", ()))
        self.skipped |= set(state.get("skipped", ()))
        self.healed = max(self.healed, state.get("healed", 0))


def _not_finite(loss: float) -> str:
    if loss == NOT_REPRESENTABLE:
        return f"the loss is {loss}, or a gradient is too large for the compressor,"
    return f"the loss is {loss}"


@dataclass(frozen=True)
class ReplicaMismatch:
    """The result of a comparison of replicas that are not all equal.

    Args:
        source: the first replica of the majority; None if no more than half are equal.
        odd: the replicas outside the majority; all replicas, if there is no majority.
    """

    source: int | None
    odd: tuple[int, ...]


def find_mismatch(digests: Mapping[int, float]) -> ReplicaMismatch | None:
    """The replicas that differ from the majority, by the digest of each replica.

    None if all digests are equal, or if one of them is 0, which means that the replica has computed none.
    """
    values = list(digests.values())
    if not all(values) or len(set(values)) <= 1:
        return None
    commonest = max(set(values), key=values.count)
    if 2 * values.count(commonest) <= len(values):
        return ReplicaMismatch(None, tuple(digests))
    equal = [rank for rank, digest in digests.items() if digest == commonest]
    return ReplicaMismatch(equal[0], tuple(rank for rank in digests if rank not in equal))
