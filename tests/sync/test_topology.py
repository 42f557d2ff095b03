"""Laws of every topology: weights are conserved, all ranks are reached, and mixing contracts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import notation
from unisono.sync.topology import Complete, OnePeerExponential, RandomPairs, Ring, Topology, Torus, sides

TABLE: list[Topology] = [Ring(), Torus(), Complete(), RandomPairs(), RandomPairs(seed=3), OnePeerExponential()]
law = pytest.mark.parametrize("topology", TABLE, ids=notation.show)


def matrix(topology: Topology, size: int, step: int) -> np.ndarray:
    """W[i][j]: the part of j's weights that i has after the step."""
    w = np.eye(size)
    for j in range(size):
        for i, part in topology.sends(j, size, step).items():
            w[i, j] += part
            w[j, j] -= part
    return w


def gap(topology: Topology, size: int) -> float:
    """The factor by which a step reduces the distance to the mean, if all steps are equal."""
    return float(np.linalg.norm(matrix(topology, size, 0) - 1 / size, 2))


@law
@given(size=st.integers(1, 33), step=st.integers(0, 200))
def test_parts_add_up_and_both_ends_agree(topology, size, step) -> None:
    w = matrix(topology, size, step)
    assert (w >= 0).all()
    assert w.sum(0) == pytest.approx(1)
    assert w.sum(1) == pytest.approx(1)  # true of all of these, though a directed topology need not
    if not topology.directed:
        assert (w == w.T).all()
    for rank in range(size):
        assert rank not in topology.sends(rank, size, step)
        for peer, part in topology.receives(rank, size, step).items():
            assert topology.sends(peer, size, step)[rank] == part
    sent = sum(len(topology.sends(rank, size, step)) for rank in range(size))
    assert sent == sum(len(topology.receives(rank, size, step)) for rank in range(size))


@law
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 12, 16])
def test_every_worker_is_reached_and_mixing_contracts(topology, size) -> None:
    product = np.eye(size)
    for step in range(8 * size):
        product = matrix(topology, size, step) @ product
    assert (product > 0).all()
    # The ring is the slowest: its second eigenvalue is (1 + 2 cos(2 pi / n)) / 3.
    slowest = (1 + 2 * np.cos(2 * np.pi / max(size, 3))) / 3
    assert np.linalg.norm(product - 1 / size, 2) <= max(slowest ** (8 * size), 1e-2) + 1e-9


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_one_peer_exponential_has_the_exact_mean_after_its_period(size) -> None:
    product = np.eye(size)
    for step in range(5, 5 + size.bit_length() - 1):  # from any step on
        product = matrix(OnePeerExponential(), size, step) @ product
    np.testing.assert_allclose(product, np.full((size, size), 1 / size))


@given(st.integers(1, 500))
def test_a_torus_is_as_square_as_it_can_be(size) -> None:
    a, b = sides(size)
    assert a * b == size
    assert a <= b
    assert not any(size % side == 0 for side in range(a + 1, b))


def test_a_torus_of_a_prime_number_is_a_ring_and_a_larger_one_mixes_faster() -> None:
    assert all(Torus().sends(r, 7, 0) == Ring().sends(r, 7, 0) for r in range(7))
    assert Torus().sends(5, 12, 0) == dict.fromkeys([1, 4, 6, 9], 0.2)
    assert gap(Torus(), 16) < gap(Ring(), 16)


def test_pairs_change_from_step_to_step_and_with_the_seed() -> None:
    draws = {tuple(RandomPairs(seed).sends(r, 8, k).popitem()[0] for r in range(8)) for seed in (0, 1) for k in (0, 1)}
    assert len(draws) == 4


@law
@pytest.mark.parametrize("size", [2, 4, 8, 12])
def test_the_period_is_how_rarely_an_edge_is_used(topology, size) -> None:
    used = [set(topology.sends(0, size, step)) for step in range(300)]
    assert topology.period(size) == len(set.union(*used)) / max(map(len, used))
