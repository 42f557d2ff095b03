"""Transfer plans: every wanted element comes once, from a holder, and senders share the work."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.checkpoint import Box, TensorShard
from unisono.elastic.transfer.transfer_plan import Move, plan, rounds
from unisono.errors import StateMissing

SHAPES = {"a": (7,), "b": (4, 6), "c": (), "d": (0, 3), "e": (3, 2, 5)}
DTYPES = {"a": torch.float32, "b": torch.float64, "c": torch.int64, "d": torch.float32, "e": torch.bfloat16}


@st.composite
def boxes(draw: st.DrawFn, name: str) -> TensorShard:
    shape = SHAPES[name]
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    size = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset))
    return TensorShard(DTYPES[name], draw(st.sampled_from([Box.whole(shape), Box(shape, offset, size)])))


holdings = st.fixed_dictionaries({}, optional={name: boxes(name) for name in SHAPES})
workers = st.lists(st.tuples(st.lists(holdings, max_size=2), holdings, st.sampled_from("xy")), min_size=1, max_size=5)


def numbers(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """A tensor with a 1 in the box."""
    found = torch.zeros(shape, dtype=torch.int64)
    found[box.slices()] = 1
    return found


def has(here, name: str) -> torch.Tensor:
    """Where of the tensor a worker has the numbers."""
    return sum((numbers(SHAPES[name], h[name].box) for h in here if name in h), torch.zeros(SHAPES[name])) > 0


@settings(max_examples=150)
@given(workers, st.sampled_from([1, 8, 1 << 20]))
def test_every_wanted_number_comes_once_from_who_has_it(given_workers, grain_bytes) -> None:
    here, wants, hosts = (list(each) for each in zip(*given_workers))
    held = [
        {
            name: sum((numbers(s, h[name].box) for h in each if name in h), torch.zeros(s)) > 0
            for name, s in SHAPES.items()
        }
        for each in here
    ]
    lacking = {
        name
        for want in wants
        for name, piece in want.items()
        if (numbers(SHAPES[name], piece.box).bool() & ~torch.stack([each[name] for each in held]).any(0)).any()
    }
    if lacking:
        with pytest.raises(StateMissing) as caught:
            plan(here, wants, hosts, grain_bytes)
        assert {each.split()[0] for each in caught.value.missing} == lacking
        return
    moves = plan(here, wants, hosts, grain_bytes)
    assert moves == plan(here, wants, hosts, grain_bytes)
    for target, want in enumerate(wants):
        for name, shape in SHAPES.items():
            came = sum(
                (numbers(shape, move.box) for move in moves if (move.name, move.target) == (name, target)),
                torch.zeros(shape, dtype=torch.int64),
            )
            expected = numbers(shape, want[name].box) if name in want else torch.zeros_like(came)
            assert torch.equal(came, expected)
    for move in moves:
        wanted = numbers(SHAPES[move.name], move.box).bool()
        owners = [rank for rank, each in enumerate(held) if each[move.name][wanted].all()]
        assert move.source in owners
        assert move.target not in owners or move.source == move.target
        assert move.nbytes <= max(grain_bytes, 8) or move.source == move.target
        near = [rank for rank in owners if hosts[rank] == hosts[move.target]]
        assert move.source in near or not near or not _in_one_piece(here, near, move)


def _in_one_piece(here, ranks, move: Move) -> bool:
    """Several boxes of a worker may have only together what one of another has."""
    return any(name == move.name and p.box.overlap(move.box) == move.box
               for rank in ranks for h in here[rank] for name, p in h.items())  # fmt: skip


def whole(shape: tuple[int, ...]) -> TensorShard:
    return TensorShard(torch.float32, Box.whole(shape))


@pytest.mark.parametrize("holders", [1, 2, 3, 7])
def test_equals_give_equally_much(holders: int) -> None:
    """A newcomer takes everything from several replicas: no holder gives more than its share and one grain."""
    state = {f"layer {i}": whole((64, 10 * i + 1)) for i in range(20)} | {"embedding": whole((5000, 64))}
    grain = 4096
    moves = plan([[state]] * holders + [[]], [{}] * holders + [state], grain_bytes=grain)
    given = Counter[int]()
    for move in moves:
        given[move.source] += move.nbytes
    total = sum(piece.box.numel * 4 for piece in state.values())
    assert sum(given.values()) == total
    assert max(given.values()) <= total / holders + grain


def test_who_is_near_is_asked_first_and_who_has_it_asks_nobody() -> None:
    state = {"x": whole((100,)), "y": whole((50,))}
    moves = plan([[state], [], [state], [], [state]], [{}, state, {}, state, state], list("aabbc"))
    assert {(move.source, move.target) for move in moves} == {(0, 1), (2, 3), (4, 4)}


def test_another_dtype_or_shape_is_not_what_is_wanted() -> None:
    has = {"x": TensorShard(torch.float64, Box.whole((4,))), "y": whole((5,)), "z": whole((2,))}
    with pytest.raises(StateMissing, match=r"no worker has x \[0:4\] of \[4\], y \[0:4\] of \[4\]$"):
        plan([[has], []], [{}, {"x": whole((4,)), "y": whole((4,)), "z": whole((2,))}])


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=40), st.integers(1, 50))
def test_rounds_are_bounded_and_keep_the_order(sizes, most_bytes) -> None:
    moves = [Move(f"{i}", torch.uint8, Box.whole((n,)), source, 9) for i, (n, source) in enumerate(sizes)]
    found = rounds(moves, most_bytes)
    for source in range(4):
        mine = [[move for move in together if move.source == source] for together in found]
        assert [move for together in mine for move in together] == [move for move in moves if move.source == source]
        assert all(sum(move.nbytes for move in each) <= most_bytes or len(each) == 1 for each in mine)
