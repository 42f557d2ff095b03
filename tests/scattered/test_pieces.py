"""Of parts and copies of several steps, the newest state that is whole is found, and nothing is mixed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unisono.comm import Simulated, outcomes
from unisono.keeping import LONGEST_STEPS, SHARE, interval
from unisono.layout import Part
from unisono.pieces import At, Laid, Pieces, assemble
from unisono.state import Reached

ROWS, PLACES = 6, 3
AT: list[At] = [(1, 4), (1, 7), (2, 5)]
_EACH = ROWS // PLACES


def number(at: At) -> float:
    return 100.0 * at[0] + at[1]


class Local(nn.Module):
    """One place's rows of a matrix, and a buffer that all have."""

    def __init__(self, place: int, value: float) -> None:
        super().__init__()
        rows = torch.arange(ROWS)[place * _EACH : (place + 1) * _EACH, None]
        self.weight = nn.Parameter(value + rows.expand(_EACH, 2).float() / 16)
        self.register_buffer("seen", torch.tensor(value))


def laid(place: int, value: float) -> Laid:
    model = Local(place, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    optimizer.state[model.weight]["momentum_buffer"].copy_(-model.weight)
    return Laid(model, {"weight": Part((ROWS, 2), (place * _EACH, 0), (_EACH, 2))}, optimizer)


def pieces(place: int, at: At, committed: int) -> Pieces:
    """Of the state `at`, in which every number says which one it is."""
    return laid(place, number(at)).pieces(at, Reached(at[1], committed), {"losses": [number(at)]})


def meet(comm: Simulated, has: list[list[tuple[int, At]]], committed: int) -> tuple[At, Reached, Laid] | None:
    """This worker's place is its rank, from the start of a run that had not come far."""
    mine = laid(comm.rank % PLACES, 0.0)
    found = assemble(comm, [pieces(place, at, committed) for place, at in has[comm.rank]], mine, [])
    if found is None:
        assert mine.model.seen == 0
        return None
    at, reached, judged = found
    assert judged == {"losses": [number(at)]}
    return at, reached, mine


HAS = st.lists(st.tuples(st.integers(0, PLACES - 1), st.sampled_from(AT)), max_size=4, unique=True)


@settings(max_examples=60, deadline=None)
@given(has=st.lists(HAS, min_size=PLACES, max_size=2 * PLACES), committed=st.sampled_from([0, 0, 0, 5]))
def test_the_newest_that_is_whole_is_found(has, committed) -> None:
    there = {piece for each in has for piece in each}
    on_disk = committed if there else 0
    whole = [at for at in AT if all((place, at) in there for place in range(PLACES)) and at[1] >= on_disk]
    for rank, found in enumerate(outcomes(len(has), meet, has, committed)):
        if isinstance(found, BaseException):
            raise found
        assert (found is not None) == bool(whole)
        if found is not None:
            at, reached, mine = found
            expected = laid(rank % PLACES, number(at))
            assert at == max(whole)
            assert reached == Reached(at[1], committed)
            assert torch.equal(mine.model.weight, expected.model.weight)
            assert mine.model.seen == number(at)
            momentum = mine.optimizer.state[mine.model.weight]["momentum_buffer"]
            assert torch.equal(momentum, -expected.model.weight)


@given(cost=st.floats(0, 1e3), step=st.one_of(st.just(0.0), st.floats(1e-6, 1e3)))
def test_copies_take_their_share(cost, step) -> None:
    steps = interval(cost, step)
    assert 1 <= steps <= LONGEST_STEPS
    assert steps == LONGEST_STEPS or cost <= SHARE * step * steps * 1.000001
    assert steps == 1 or step == 0 or cost > SHARE * step * (steps - 1) * 0.999999
