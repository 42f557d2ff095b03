"""Which workers may be in the next view: arithmetic."""

from hypothesis import given
from hypothesis import strategies as st

from unisono.membership import StateVersion, View, WorkerAddress
from unisono.membership.selection import assign_ranks, mutually_reachable, newest_version, unproven_views
from unisono.membership.view_delta import apply_delta, view_delta

NAMES = [f"w{i}" for i in range(8)]
SOME = st.lists(st.sampled_from(NAMES), unique=True)


def test_the_later_view_is_right_then_the_later_step_then_what_most_have() -> None:
    stand = {
        "a": StateVersion(2, 9, "x"),
        "b": StateVersion(3, 5, "y"),
        "c": StateVersion(3, 7, "bad"),
        "d": StateVersion(3, 7, "z"),
        "e": StateVersion(3, 7, "z"),
    }
    assert newest_version(stand) == (StateVersion(3, 7, "z"), ("d", "e"))


@given(workers=SOME, pairs=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=12))
def test_no_two_are_left_that_could_not_reach_each_other(workers, pairs) -> None:
    left = mutually_reachable(workers, [(one, {other}) for one, other in pairs])
    assert left == [worker for worker in workers if worker in left]
    assert not [pair for pair in pairs if pair[0] != pair[1] and set(pair) <= set(left)]
    quarrels = {name for one, other in pairs if one != other and {one, other} <= set(workers) for name in (one, other)}
    assert set(workers) - quarrels <= set(left)
    assert len(left) == len(workers) or set(workers) & quarrels


def test_of_two_islands_the_larger_stays() -> None:
    assert mutually_reachable(NAMES, [(one, NAMES[5:]) for one in NAMES[:5]]) == NAMES[:5]
    assert mutually_reachable(NAMES, [(one, NAMES[:5]) for one in NAMES[5:]]) == NAMES[:5]


@given(before=SOME, after=SOME, sources=SOME, moved=st.sets(st.sampled_from(NAMES), max_size=1))
def test_a_view_is_told_by_what_it_has_of_the_one_before(before, after, sources, moved) -> None:
    def place(name: str, where: str = "") -> WorkerAddress:
        return WorkerAddress(name, f"{name}{where}")

    old = View(3, tuple(before), StateVersion(2, 1), (), tuple(map(place, before)))
    there = tuple(place(name, "moved" if name in moved else "") for name in after)
    new = View(4, tuple(after), StateVersion(3, 7, "x"), tuple(m for m in after if m in sources), there)
    told = view_delta(old, new)
    assert (told is None) == bool(moved & set(before) & set(after))
    assert told is None or apply_delta(old, told) == new


def test_of_thousands_little_is_told() -> None:
    names = [f"w{i}" for i in range(4096)]
    old = View(1, tuple(names), addresses=(WorkerAddress(),) * 4096)
    new = View(2, (*names[:7], *names[8:], "new"), sources=tuple(names[:7]), addresses=(WorkerAddress(),) * 4096)
    told = view_delta(old, new)
    assert told is not None
    assert told.members == ((0, 7), (8, 4096), "new")
    assert told.sources == ((0, 7),)


@given(before=SOME, candidates=SOME, unit=st.integers(1, 3), maximum=st.integers(1, 8), shares=st.integers(0, 12))
def test_replicas_are_whole_and_stay_together(before, candidates, unit, maximum, shares) -> None:
    before = before[: len(before) // unit * unit]
    found = assign_ranks(before, candidates, unit, maximum, shares)
    possible = [n for n in range(min(len(candidates), maximum) // unit + 1) if not shares or not n or shares % n == 0]
    assert len(found) == len(set(found)) == max(possible) * unit
    assert set(found) <= set(candidates)
    replicas = [before[i : i + unit] for i in range(0, len(before), unit)]
    whole = [member for replica in replicas if set(replica) <= set(candidates) for member in replica]
    assert found[: len(whole)] == whole[: len(found)]


LINEAGE = (
    View(1, ("a", "b")),
    View(2, ("a", "b", "c"), StateVersion(1, 5, "x")),
    View(5, ("b", "c"), StateVersion(2, 9, "y")),
)


def numbers(start, ended) -> list[int]:
    return [view.number for view in unproven_views(LINEAGE, start, ended)]


def test_what_may_be_committed_elsewhere() -> None:
    latest, second, first = StateVersion(5, 12, "z"), StateVersion(2, 9, "y"), StateVersion(1, 5, "x")
    assert numbers(latest, {"c": latest}) == []
    assert numbers(second, {"c": second}) == []  # c was to be in view 5, and never was
    assert numbers(second, {"a": second}) == [5]  # b and c may have worked in it
    assert numbers(first, {"a": first}) == [5]
    assert numbers(first, {"d": first}) == [2, 5]
    assert numbers(first, {"c": first}) == []
    assert [view.number for view in unproven_views(LINEAGE[1:], StateVersion(), {"c": StateVersion()})] == [
        2
    ]  # who knows what was
