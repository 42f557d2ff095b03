"""Ranks in the mesh of a layout: arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import InvalidInput
from unisono.layout import AXES, DATA_AXES, Layout, RankMesh
from unisono.layout.rank_mesh import nearest_divisor

SHARDS = st.integers(1, 5)


@given(shard=SHARDS, replicas=st.integers(1, 4))
def test_every_rank_has_a_place_of_its_own(shard, replicas) -> None:
    places = RankMesh(Layout(shard=shard), shard * replicas)
    found = [places.of(rank) for rank in range(places.workers)]
    assert len(set(found)) == places.workers
    assert [places.rank(place) for place in found] == list(range(places.workers))
    assert [place.replica for place in found] == [rank // shard for rank in range(places.workers)]


@given(shard=SHARDS, replicas=st.integers(1, 4))
@pytest.mark.parametrize("axes", [("replica",), ("shard",), AXES, ("replica", "shard")])
def test_groups_along_some_axes_divide_the_workers(axes, shard, replicas) -> None:
    places = RankMesh(Layout(shard=shard), shard * replicas)
    groups = {places.along(rank, *axes) for rank in range(places.workers)}
    assert sorted(rank for group in groups for rank in group) == list(range(places.workers))
    sizes = {"replica": replicas, "shard": shard}
    count = 1
    for axis in axes:
        count *= sizes.get(axis, 1)
    assert {len(group) for group in groups} == {count}


@given(layout=st.builds(Layout, shard=st.integers(1, 3), replicate=st.integers(1, 2), expert=st.integers(1, 2),
                        tensor=st.integers(1, 2)), replicas=st.integers(1, 2))  # fmt: skip
def test_a_lane_is_a_place_on_the_axes_side_by_side(layout, replicas) -> None:
    places = RankMesh(layout, layout.workers * replicas)
    for rank in range(places.workers):
        lanes = [places.data_parallel_rank(other) for other in places.along(rank, "replica", *DATA_AXES)]
        assert lanes == list(range(places.data_parallel_size))
        assert {places.data_parallel_rank(other) for other in places.along(rank, "tensor")} == {
            places.data_parallel_rank(rank)
        }


def test_members_of_a_shard_group_have_lanes_of_their_own() -> None:
    places = RankMesh(Layout(shard=2), 4)
    assert [places.data_parallel_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert places.data_parallel_size == 4


@pytest.mark.parametrize(
    ("workers", "words"), [(1, "write --workers 3"), (4, "write --workers 3 or 6"), (5, "write --workers 3 or 6")]
)
def test_workers_that_do_not_divide_are_refused_with_the_nearest(workers, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        RankMesh(Layout(shard=3), workers)


@pytest.mark.parametrize(("micro_batches", "words"), [(6, "there are 4 or 8"), (2, "there are 4 or 8"), (9, "8 or 12")])
def test_micro_batches_that_do_not_divide_are_refused_with_the_nearest(micro_batches, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        RankMesh(Layout(shard=2), 4).check_micro_batches(micro_batches)
    RankMesh(Layout(), 4).check_micro_batches(micro_batches)


@given(of=st.integers(1, 60), wanted=st.integers(1, 60))
def test_the_nearest_divisor_divides_and_is_the_number_itself_where_that_does(of, wanted) -> None:
    found = nearest_divisor(of, wanted)
    assert of % found == 0
    assert found == wanted or of % wanted
