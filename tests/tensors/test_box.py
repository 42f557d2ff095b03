"""Boxes of tensors behave as sets of elements: division, intersection, disjointness."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.tensors.box import Box, check_tiling, slabs

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    begin = [draw(st.integers(0, n)) for n in shape]
    return Box(shape, tuple(begin), tuple(draw(st.integers(0, n - b)) for n, b in zip(shape, begin)))


ONE = SHAPES.flatmap(boxes)
TWO = SHAPES.flatmap(lambda shape: st.tuples(boxes(shape), boxes(shape)))


def elements(box: Box) -> list[tuple[int, ...]]:
    """In row-major order."""
    return list(itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.size))))


@given(TWO)
def test_overlap_is_what_both_have(pair: tuple[Box, Box]) -> None:
    one, other = pair
    both = one.overlap(other)
    assert set(elements(both) if both else []) == set(elements(one)) & set(elements(other))
    assert both == other.overlap(one)


@given(ONE, st.integers(1, 40))
def test_slabs_are_the_box_in_order_and_small(box: Box, most: int) -> None:
    found = list(slabs(box, most))
    assert [element for slab in found for element in elements(slab)] == elements(box)
    assert all(slab.numel <= most for slab in found)
    at = 0
    for slab in found:
        if box.numel:
            assert slab.position(box) == at
        at += slab.numel


@given(TWO)
def test_a_span_is_one_run_around_the_box(pair: tuple[Box, Box]) -> None:
    inner = pair[0].overlap(pair[1])
    if inner is None:
        return
    of = pair[0]
    span = inner.span(of)
    assert set(elements(inner)) <= set(elements(span)) <= set(elements(of))
    places = [elements(of).index(element) for element in elements(span)]
    assert places == list(range(span.position(of), span.position(of) + span.numel))


@given(st.data())
def test_a_tiling_is_one_and_nothing_else_is(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    found = [data.draw(boxes(shape)) for _ in range(data.draw(st.integers(0, 4)))]
    counts = [sum(element in elements(box) for box in found) for element in elements(Box.whole(shape))]
    if set(counts) == {1}:
        check_tiling(shape, found)
        return
    with pytest.raises(ValueError, match=r"twice|missing") as refused:
        check_tiling(shape, found)
    region, _, wrong = str(refused.value).partition(" of ")
    ends = [tuple(map(int, part.split(":"))) for part in region.strip("[]").split(", ") if part]
    named = Box(shape, tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
    held = [sum(element in elements(box) for box in found) for element in elements(named)]
    assert held
    assert min(held) >= 2 if "twice" in wrong else max(held) == 0


def test_a_tensor_that_is_cut_along_more_dimensions_than_any_layout_does_is_refused() -> None:
    shape = (2,) * 8
    parts = [Box.whole(shape).cut(axis, 0, 1) for axis in range(8)]
    with pytest.raises(ValueError, match="along 8 dimensions"):
        check_tiling(shape, parts)


def test_boxes_on_a_staircase_are_checked_as_quickly() -> None:
    """Each corner of a square is an L of a row and a column, so that no order has few boxes open at a time."""
    n = 10_000
    rows = [Box((n, n), (i, i), (1, n - i)) for i in range(n)]
    columns = [Box((n, n), (i + 1, i), (n - i - 1, 1)) for i in range(n - 1)]
    check_tiling((n, n), rows + columns)
    with pytest.raises(ValueError, match=r"\[5001:10000, 5000:5001\] of \[10000, 10000\] is missing"):
        check_tiling((n, n), rows + columns[:5000] + columns[5001:])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([((0, 0), (2, 3)), ((4, 0), (2, 3))], r"\[2:4, 0:3\] of \[6, 3\] is missing"),
        ([((0, 0), (4, 3)), ((3, 1), (3, 2))], r"\[3:4, 1:3\] of \[6, 3\] is covered twice"),
        ([], r"\[0:6, 0:3\] of \[6, 3\] is missing"),
    ],
)
def test_the_region_is_named(parts: list[tuple[tuple[int, int], tuple[int, int]]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_tiling((6, 3), [Box((6, 3), *part) for part in parts])


def test_many_boxes_are_checked_quickly() -> None:
    """Both by rows and by columns; a look at every pair would take minutes."""
    for axis in (0, 1):
        shape = (20_000, 2) if axis == 0 else (2, 20_000)
        found = [Box.whole(shape).cut(axis, i, i + 1) for i in range(20_000)]
        check_tiling(shape, found)


@pytest.mark.parametrize(("offset", "size"), [((0,), (3,)), ((-1,), (1,)), ((3,), (-1,)), ((), ()), ((2,), (1,))])
def test_what_is_no_box_is_refused(offset: tuple[int, ...], size: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is not inside a tensor of shape"):
        Box((2,), offset, size)


def test_a_scalar_is_one_box() -> None:
    box = Box.whole(())
    assert (box.is_whole, box.numel, box.overlap(box), list(slabs(box, 1))) == (True, math.prod(()), box, [box])
