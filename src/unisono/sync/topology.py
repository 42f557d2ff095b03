"""Who sends to whom in a step of gossip: functions from numbers to numbers.

In step *k* worker *j* keeps a part of its weights and sends parts to others. The parts that a worker gives away and
keeps add up to 1: the matrix of all parts, W[i][j] = what *i* gets of *j*, is column-stochastic, so nothing is lost. In
an undirected topology W is symmetric, and a mean of each worker's weights with its neighbours'.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

Parts = dict[int, float]
"""Rank to part, above 0; all of one worker's add up to less than 1."""


class Topology(Protocol):
    """Who sends to whom, as a frozen value.

    Attributes:
        directed: whether a worker may get from others than it sends to, or other parts.
    """

    @property
    def directed(self) -> bool: ...

    def sends(self, rank: int, size: int, step: int) -> Parts:
        """To whom worker `rank` of `size` sends in `step`, and which part of its weights."""

    def receives(self, rank: int, size: int, step: int) -> Parts:
        """From whom it gets weights, and which part of theirs: ``sends`` seen from the other end."""

    def turns(self, size: int) -> int:
        """After how many steps a worker sends to the same one again, on average."""


class Undirected:
    """What each gets of the other is the same."""

    directed = False

    def sends(self, rank: int, size: int, step: int) -> Parts:
        raise NotImplementedError

    def receives(self, rank: int, size: int, step: int) -> Parts:
        return self.sends(rank, size, step)

    def turns(self, size: int) -> int:
        return 1


@dataclass(frozen=True)
class Ring(Undirected):
    """Each with the one before and the one after it, in equal parts."""

    def sends(self, rank: int, size: int, step: int) -> Parts:
        return _even({(rank - 1) % size, (rank + 1) % size} - {rank})


@dataclass(frozen=True)
class Torus(Undirected):
    """Each with its four neighbours on a grid that closes on itself, in equal parts.

    The sides are the two whole numbers next to each other whose product is the worker count: 12 workers are 3 x 4, a
    prime number of them is a ring.
    """

    def sends(self, rank: int, size: int, step: int) -> Parts:
        rows, columns = sides(size)
        row, column = divmod(rank, columns)
        vertical = {(row + way) % rows * columns + column for way in (-1, 1)}
        horizontal = {row * columns + (column + way) % columns for way in (-1, 1)}
        return _even((vertical | horizontal) - {rank})


@dataclass(frozen=True)
class Complete(Undirected):
    """Each with all others, in equal parts: one step is a whole mean."""

    def sends(self, rank: int, size: int, step: int) -> Parts:
        return _even(set(range(size)) - {rank})


@dataclass(frozen=True)
class RandomPairs(Undirected):
    """Everybody with one other, both taking the mean; drawn anew each step, the same on all workers (Boyd et al.
    2006). Of an odd number one is left out."""

    seed: int = 0

    def sends(self, rank: int, size: int, step: int) -> Parts:
        order = list(range(size))
        random.Random(f"{self.seed} {size} {step}").shuffle(order)
        place = order.index(rank) ^ 1
        return {order[place]: 0.5} if place < size else {}

    def turns(self, size: int) -> int:
        return max(1, size - 1 + size % 2)


@dataclass(frozen=True)
class OnePeerExponential:
    """In step *k* half goes to the worker that is 2^(k mod log2 n) ranks further (Assran et al. 2019, appendix A; Ying
    et al. 2021): one message per step, and all that n workers had is mixed after log2 n steps, exactly so where n is a
    power of 2."""

    directed = True

    def sends(self, rank: int, size: int, step: int) -> Parts:
        return {(rank + (1 << step % self.turns(size))) % size: 0.5} if size > 1 else {}

    def receives(self, rank: int, size: int, step: int) -> Parts:
        return {(rank - (1 << step % self.turns(size))) % size: 0.5} if size > 1 else {}

    def turns(self, size: int) -> int:
        return max(1, (size - 1).bit_length())


def sides(size: int) -> tuple[int, int]:
    """The two factors of `size` that are nearest to each other, the smaller first."""
    smaller = next(side for side in range(math.isqrt(size), 0, -1) if size % side == 0)
    return smaller, size // smaller


def _even(others: set[int]) -> Parts:
    return dict.fromkeys(sorted(others), 1 / (len(others) + 1))


TOPOLOGIES: dict[str, type] = {cls.__name__: cls for cls in (Ring, Torus, Complete, RandomPairs, OnePeerExponential)}
