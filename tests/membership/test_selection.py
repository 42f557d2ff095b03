"""Which workers may be in the next view: arithmetic."""

from hypothesis import given
from hypothesis import strategies as st

from unisono.membership import StateVersion, View, WorkerAddress
from unisono.membership.selection import assign_ranks, mutually_reachable, newest_version, unproven_views
from unisono.membership.view_delta import apply_delta, view_delta

NAMES = [f"w{i}" for i in range(8)]
SOME = st.lists(st.sampled_from(NAMES), unique=True)


def test_the_newest_version_is_of_the_latest_view_then_step_then_majority() -> None:
    versions = {
        "a": StateVersion(2, 9, "x"),
        "b": StateVersion(3, 5, "y"),
        "c": StateVersion(3, 7, "bad"),
        "d": StateVersion(3, 7, "z"),
        "e": StateVersion(3, 7, "z"),
    }
    assert newest_version(versions) == (StateVersion(3, 7, "z"), ("d", "e"))


@given(workers=SOME, pairs=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=12))
def test_no_unreachable_pair_is_left(workers, pairs) -> None:
    left = mutually_reachable(workers, [(one, {other}) for one, other in pairs])
    assert left == [worker for worker in workers if worker in left]
    assert not [pair for pair in pairs if pair[0] != pair[1] and set(pair) <= set(left)]
    unreachable = {
        name for one, other in pairs if one != other and {one, other} <= set(workers) for name in (one, other)
    }
    assert set(workers) - unreachable <= set(left)
    assert len(left) == len(workers) or set(workers) & unreachable


def test_the_larger_part_of_a_split_network_stays() -> None:
    assert mutually_reachable(NAMES, [(one, NAMES[5:]) for one in NAMES[:5]]) == NAMES[:5]
    assert mutually_reachable(NAMES, [(one, NAMES[:5]) for one in NAMES[5:]]) == NAMES[:5]


@given(before=SOME, after=SOME, sources=SOME, moved=st.sets(st.sampled_from(NAMES), max_size=1))
def test_a_delta_and_the_view_before_give_the_view(before, after, sources, moved) -> None:
    def address(name: str, where: str = "") -> WorkerAddress:
        return WorkerAddress(name, f"{name}{where}")

    old = View(3, tuple(before), StateVersion(2, 1), (), tuple(map(address, before)))
    addresses = tuple(address(name, "moved" if name in moved else "") for name in after)
    new = View(4, tuple(after), StateVersion(3, 7, "x"), tuple(m for m in after if m in sources), addresses)
    delta = view_delta(old, new)
    assert (delta is None) == bool(moved & set(before) & set(after))
    assert delta is None or apply_delta(old, delta) == new


def test_a_delta_of_thousands_of_members_is_small() -> None:
    names = [f"w{i}" for i in range(4096)]
    old = View(1, tuple(names), addresses=(WorkerAddress(),) * 4096)
    new = View(2, (*names[:7], *names[8:], "new"), sources=tuple(names[:7]), addresses=(WorkerAddress(),) * 4096)
    delta = view_delta(old, new)
    assert delta is not None
    assert delta.members == ((0, 7), (8, 4096), "new")
    assert delta.sources == ((0, 7),)


@given(
    before=SOME,
    candidates=SOME,
    replica_size=st.integers(1, 3),
    maximum=st.integers(1, 8),
    micro_batches=st.integers(0, 12),
)
def test_replicas_are_complete_and_keep_their_members(before, candidates, replica_size, maximum, micro_batches) -> None:
    before = before[: len(before) // replica_size * replica_size]
    found = assign_ranks(before, candidates, replica_size, maximum, micro_batches)
    possible = [
        n
        for n in range(min(len(candidates), maximum) // replica_size + 1)
        if not micro_batches or not n or micro_batches % n == 0
    ]
    assert len(found) == len(set(found)) == max(possible) * replica_size
    assert set(found) <= set(candidates)
    replicas = [before[i : i + replica_size] for i in range(0, len(before), replica_size)]
    whole = [member for replica in replicas if set(replica) <= set(candidates) for member in replica]
    assert found[: len(whole)] == whole[: len(found)]


LINEAGE = (
    View(1, ("a", "b")),
    View(2, ("a", "b", "c"), StateVersion(1, 5, "x")),
    View(5, ("b", "c"), StateVersion(2, 9, "y")),
)


def numbers(start, ended) -> list[int]:
    return [view.number for view in unproven_views(LINEAGE, start, ended)]


def test_unproven_views() -> None:
    latest, second, first = StateVersion(5, 12, "z"), StateVersion(2, 9, "y"), StateVersion(1, 5, "x")
    assert numbers(latest, {"c": latest}) == []
    assert numbers(second, {"c": second}) == []  # c was a member of view 5, and never trained in it
    assert numbers(second, {"a": second}) == [5]  # b and c may have trained in it
    assert numbers(first, {"a": first}) == [5]
    assert numbers(first, {"d": first}) == [2, 5]
    assert numbers(first, {"c": first}) == []
    assert [view.number for view in unproven_views(LINEAGE[1:], StateVersion(), {"c": StateVersion()})] == [
        2
    ]  # who knows what was
