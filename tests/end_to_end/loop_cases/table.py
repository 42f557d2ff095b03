"""The table of cases, and what is expected of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from tests.end_to_end.loop_cases.environments import Environment

Numbers = Mapping[str, Tensor]
"""What a case comes to: weights, buffers and the optimizer's numbers, by name."""

Fragment = Callable[[Environment], Numbers]

TOLERANCE = 1e-6


class Expected(Enum):
    """What a world has to make of a case."""

    EQUAL = "the numbers of plain torch on all samples"
    REFUSED = "an error that says what to write instead"
    EITHER = "one of these two, and never other numbers without a word"
    ENDS = "the numbers of plain torch, or any error, and never a hang"
    ABSENT = "this loop cannot be written in this form"


@dataclass(frozen=True)
class Case:
    """A training loop.

    Attributes:
        run: the loop.
        own: what is expected where each worker has data of its own.
        steps: what is expected where `World.steps` gives the data.
        why: the reason, where not both are `Expected.EQUAL`.
        tolerance: how far numbers may be from those of plain torch, relative and absolute.
        slow: it takes seconds.
        find_unused: DistributedDataParallel has to look for parameters without a gradient.
        data_matters: workers that exchanged nothing would come to other numbers.
    """

    name: str
    run: Fragment
    own: Expected = Expected.EQUAL
    steps: Expected = Expected.EQUAL
    why: str = ""
    tolerance: float = TOLERANCE
    slow: bool = False
    find_unused: bool = False
    data_matters: bool = True

    def expected(self, form: str) -> Expected:
        """What is expected in the form ``own`` or ``steps``."""
        return {"own": self.own, "steps": self.steps}[form]


CASES: dict[str, Case] = {}


def add(case: Case) -> None:
    """Add `case` to the table."""
    assert case.name not in CASES, case.name
    assert case.why or case.own is case.steps is Expected.EQUAL, f"{case.name} needs a reason"
    CASES[case.name] = case


def case(
    *,
    own: Expected = Expected.EQUAL,
    steps: Expected = Expected.EQUAL,
    why: str = "",
    tolerance: float = TOLERANCE,
    slow: bool = False,
    find_unused: bool = False,
    data_matters: bool = True,
) -> Callable[[Fragment], Fragment]:
    """Add the decorated loop to the table; see `Case`."""

    def added(run: Fragment) -> Fragment:
        add(Case(run.__name__, run, own, steps, why, tolerance, slow, find_unused, data_matters))
        return run

    return added
