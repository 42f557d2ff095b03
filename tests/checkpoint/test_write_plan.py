"""Which worker writes which tensors of a checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.checkpoint import plan_replicated_writes

SIZES = st.dictionaries(st.text(max_size=5), st.integers(0, 10**12), max_size=40)


@given(sizes=SIZES, workers=st.integers(1, 9))
def test_every_name_has_exactly_one_worker(sizes: dict[str, int], workers: int) -> None:
    shares = plan_replicated_writes(sizes, workers)
    assert len(shares) == workers
    assert sorted(name for share in shares for name in share) == sorted(sizes)


@given(sizes=SIZES, workers=st.integers(1, 9))
def test_no_worker_has_more_than_the_mean_and_one_tensor(sizes: dict[str, int], workers: int) -> None:
    loads = [sum(sizes[name] for name in share) for share in plan_replicated_writes(sizes, workers)]
    assert max(loads) <= sum(sizes.values()) / workers + max(sizes.values(), default=0)
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


@given(sizes=SIZES, workers=st.integers(1, 9), order=st.randoms(use_true_random=False))
def test_the_order_of_names_does_not_matter(sizes: dict[str, int], workers: int, order: object) -> None:
    names = list(sizes)
    order.shuffle(names)  # type: ignore[attr-defined]
    assert plan_replicated_writes({name: sizes[name] for name in names}, workers) == plan_replicated_writes(
        sizes, workers
    )


def test_equal_tensors_are_dealt_evenly() -> None:
    assert [len(share) for share in plan_replicated_writes({str(i): 8 for i in range(12)}, 4)] == [3, 3, 3, 3]


def test_no_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="workers=0"):
        plan_replicated_writes({}, 0)
