"""From shards and copies of several steps, the newest complete state is found, without mixing steps."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unisono.comm import Simulated, outcomes
from unisono.elastic.sharded_state import ShardedModel, ShardVersion, StateShard, distinct, reassemble
from unisono.elastic.sharded_state_recovery import LONGEST_STEPS, SHARE, interval
from unisono.elastic.state_transfer import Parts, Progress
from unisono.tensors.box import Box

ROWS, PLACES = 6, 3
AT: list[ShardVersion] = [(1, 4), (1, 7), (2, 5)]
_EACH = ROWS // PLACES


def number(at: ShardVersion) -> float:
    return 100.0 * at[0] + at[1]


class Local(nn.Module):
    """One place's rows of a matrix, and a buffer that all have."""

    def __init__(self, place: int, value: float) -> None:
        super().__init__()
        rows = torch.arange(ROWS)[place * _EACH : (place + 1) * _EACH, None]
        self.weight = nn.Parameter(value + rows.expand(_EACH, 2).float() / 16)
        self.register_buffer("seen", torch.tensor(value))


def laid(place: int, value: float) -> ShardedModel:
    model = Local(place, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    optimizer.state[model.weight]["momentum_buffer"].copy_(-model.weight)
    parts = {"weight": Box((ROWS, 2), (place * _EACH, 0), (_EACH, 2))}
    return ShardedModel(model, Parts(parts, parts), optimizer)


def pieces(place: int, at: ShardVersion, committed: int) -> StateShard:
    """Of the state `at`, in which every number says which one it is."""
    reached = Progress(at[1], committed, loss=number(at))
    return laid(place, number(at)).shard(at, reached, {"losses": [number(at)]})


def test_the_same_part_of_the_same_state_is_kept_once() -> None:
    parts = [pieces(place, at, 0) for place in range(PLACES) for at in AT]
    assert len(distinct(parts)) == len(parts)
    again = distinct([*parts, *(pieces(place, at, 0) for place in range(PLACES) for at in AT[:2])])
    assert sorted((each.version, each.held.boxes["model/weight"]) for each in again) == sorted(
        (each.version, each.held.boxes["model/weight"]) for each in parts
    )


def meet(
    comm: Simulated, has: list[list[tuple[int, ShardVersion]]], committed: int
) -> tuple[ShardVersion, Progress, ShardedModel] | None:
    """This worker's place is its rank, from the start of a run that had not come far."""
    mine = laid(comm.rank % PLACES, 0.0)
    found = reassemble(comm, [pieces(place, at, committed) for place, at in has[comm.rank]], mine, [])
    if found is None:
        assert mine.model.seen == 0
        return None
    at, reached, judged = found
    assert judged == {"losses": [number(at)]}
    return at, reached, mine


HAS = st.lists(st.tuples(st.integers(0, PLACES - 1), st.sampled_from(AT)), max_size=4, unique=True)


@settings(max_examples=60)
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
            assert reached == Progress(at[1], committed, loss=number(at))
            assert torch.equal(mine.model.weight, expected.model.weight)
            assert mine.model.seen == number(at)
            momentum = mine.optimizer.state[mine.model.weight]["momentum_buffer"]
            assert torch.equal(momentum, -expected.model.weight)


WALKERS = 3
WALKS = st.lists(st.tuples(st.integers(0, PLACES - 1), st.integers(0, WALKERS - 1)), max_size=6, unique=True)


def own_number(walker: int) -> float:
    """What one that walks by itself has where others have others."""
    return 8.0 * 2**walker


def walks(place: int, walker: int) -> StateShard:
    """Of what one replica has: its weights are everybody's, what its optimizer remembers is its own."""
    mine = laid(place, number(AT[0]))
    mine.optimizer.state[mine.model.weight]["momentum_buffer"].fill_(own_number(walker))
    return mine.shard(AT[0], Progress(AT[0][1]), {}, walker)


def meet_walking(comm: Simulated, has: list[list[tuple[int, int]]]) -> ShardedModel | None:
    mine = laid(comm.rank % PLACES, 0.0)
    found = reassemble(comm, [walks(*each) for each in has[comm.rank]], mine, [])
    return mine if found else None


@settings(max_examples=60)
@given(has=st.lists(WALKS, min_size=PLACES, max_size=2 * PLACES))
def test_of_what_walkers_have_each_its_own_all_take_the_mean(has) -> None:
    """Of those walks of which all is there; what all have alike may come from any."""
    there = {piece for each in has for piece in each}
    several = len({walker for _, walker in there}) > 1
    apart = {place for place in range(PLACES) if len([True for one, _ in there if one == place]) > 1}
    whole = [w for w in range(WALKERS) if all((place, w) in there for place in range(PLACES))]
    enough = {place for place, _ in there} == set(range(PLACES)) and (bool(whole) or not apart)
    for rank, mine in enumerate(outcomes(len(has), meet_walking, has)):
        if isinstance(mine, BaseException):
            raise mine
        assert (mine is not None) == enough
        if mine is not None:
            assert torch.equal(mine.model.weight, laid(rank % PLACES, number(AT[0])).model.weight)
            momentum = mine.optimizer.state[mine.model.weight]["momentum_buffer"]
            if several and apart:
                expected = sum(map(own_number, whole)) / len(whole)
                torch.testing.assert_close(momentum, torch.full_like(momentum, expected))


@given(cost=st.floats(0, 1e3), step=st.one_of(st.just(0.0), st.floats(1e-6, 1e3)))
def test_copies_take_their_share(cost, step) -> None:
    steps = interval(cost, step)
    assert 1 <= steps <= LONGEST_STEPS
    assert steps == LONGEST_STEPS or cost <= SHARE * step * steps * 1.000001
    assert steps == 1 or step == 0 or cost > SHARE * step * (steps - 1) * 0.999999
