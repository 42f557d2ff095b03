"""Topologies of gossip: which worker sends to which in a step, without I/O.

In step *k* worker *j* keeps a part of its weights and sends parts to its neighbours. W[i][j] is the part that *i*
receives from *j*. The parts of each *j* add up to 1: W is column-stochastic, so the sum over all workers is preserved.
In an undirected topology W is symmetric, and each worker takes a mean of its own weights and its neighbours'.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

Parts = dict[int, float]
"""The part of each neighbour, by its rank. Parts are above 0; those of one worker add up to less than 1."""


class Topology(Protocol):
    """Which worker sends to which, as a frozen value.

    Attributes:
        directed: whether a worker may receive from other workers than it sends to, or other parts than it sends.
    """

    @property
    def directed(self) -> bool: ...

    def sends(self, rank: int, size: int, step: int) -> Parts:
        """The neighbours to which worker `rank` of `size` sends in `step`, and the part that each receives."""

    def receives(self, rank: int, size: int, step: int) -> Parts:
        """The neighbours from which worker `rank` receives in `step`, and the part from each: `sends` transposed."""

    def period(self, size: int) -> int:
        """The mean number of steps after which a worker sends to the same neighbour again."""


class Undirected:
    """Base of topologies in which both workers of a pair receive the same part of each other."""

    directed = False

    def sends(self, rank: int, size: int, step: int) -> Parts:
        raise NotImplementedError

    def receives(self, rank: int, size: int, step: int) -> Parts:
        return self.sends(rank, size, step)

    def period(self, size: int) -> int:
        return 1


@dataclass(frozen=True)
class Ring(Undirected):
    """Each worker mixes with the previous and the next rank, in equal parts."""

    def sends(self, rank: int, size: int, step: int) -> Parts:
        return _even({(rank - 1) % size, (rank + 1) % size} - {rank})


@dataclass(frozen=True)
class Torus(Undirected):
    """Each worker mixes with its four neighbours on a periodic grid, in equal parts.

    The sides are the two closest factors of the number of workers: 12 workers are 3 x 4, a prime number is a ring.
    """

    def sends(self, rank: int, size: int, step: int) -> Parts:
        rows, columns = sides(size)
        row, column = divmod(rank, columns)
        vertical = {(row + offset) % rows * columns + column for offset in (-1, 1)}
        horizontal = {row * columns + (column + offset) % columns for offset in (-1, 1)}
        return _even((vertical | horizontal) - {rank})


@dataclass(frozen=True)
class Complete(Undirected):
    """Each worker mixes with all others, in equal parts: one step computes the mean."""

    def sends(self, rank: int, size: int, step: int) -> Parts:
        return _even(set(range(size)) - {rank})


@dataclass(frozen=True)
class RandomPairs(Undirected):
    """Workers mix in random pairs, drawn in each step, the same on all workers (Boyd et al. 2006).

    With an odd number of workers, one worker has no partner.
    """

    seed: int = 0

    def sends(self, rank: int, size: int, step: int) -> Parts:
        order = list(range(size))
        random.Random(f"{self.seed} {size} {step}").shuffle(order)
        partner = order.index(rank) ^ 1
        return {order[partner]: 0.5} if partner < size else {}

    def period(self, size: int) -> int:
        return max(1, size - 1 + size % 2)


@dataclass(frozen=True)
class OnePeerExponential:
    """In step *k* worker *j* sends half of its weights to *j* + 2^(k mod log2 n) (Assran et al. 2019, appendix A).

    Each worker sends one message per step. After log2 n steps all weights are mixed; if n is a power of 2, to their
    exact mean (Ying et al. 2021).
    """

    directed = True

    def sends(self, rank: int, size: int, step: int) -> Parts:
        return {(rank + (1 << step % self.period(size))) % size: 0.5} if size > 1 else {}

    def receives(self, rank: int, size: int, step: int) -> Parts:
        return {(rank - (1 << step % self.period(size))) % size: 0.5} if size > 1 else {}

    def period(self, size: int) -> int:
        return max(1, (size - 1).bit_length())


def sides(size: int) -> tuple[int, int]:
    """The two closest factors of `size`, the smaller first."""
    smaller = next(side for side in range(math.isqrt(size), 0, -1) if size % side == 0)
    return smaller, size // smaller


def _even(others: set[int]) -> Parts:
    return dict.fromkeys(sorted(others), 1 / (len(others) + 1))


TOPOLOGIES: dict[str, type] = {cls.__name__: cls for cls in (Ring, Torus, Complete, RandomPairs, OnePeerExponential)}
