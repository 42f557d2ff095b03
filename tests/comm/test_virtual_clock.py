"""A discrete-event simulation of threads: what an event raises ends it, and no thread is left behind."""

from __future__ import annotations

import math
import threading

import pytest

from tests.support.leftovers import within
from unisono.comm.simulated.virtual_clock import VirtualScheduler

SIZE = 3


def raises() -> None:
    raise ValueError("the cause")


@pytest.mark.parametrize("catches", [False, True], ids=["workers end", "workers catch and wait again"])
@pytest.mark.parametrize("at", [0.0, 1.5])
def test_what_an_event_raises_ends_the_simulation(at: float, catches: bool) -> None:
    before = threading.active_count()
    scheduler = VirtualScheduler(SIZE, 0, lambda: None)
    scheduler.at(at, raises)
    ended = []

    def work(rank: int) -> None:
        try:
            scheduler.advance(rank, 1.0)
            scheduler.wait(rank, math.inf, math.inf)
        except SystemExit:
            ended.append(rank)
            if not catches:
                raise
            scheduler.wait(rank, math.inf, math.inf)

    with pytest.raises(ValueError, match="the cause"):
        scheduler.run(work)
    assert sorted(ended) == ([] if at == 0.0 else list(range(SIZE)))
    assert within(5, lambda: threading.active_count() == before)
