"""Servers survive attacks without change; the long form is `tests.campaigns.hostile_peers`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.campaigns import hostile_peers
from tests.campaigns.hostile_peers import Target


@pytest.fixture(scope="module", params=hostile_peers.DOORS)
def server(request: pytest.FixtureRequest) -> Iterator[Target]:
    with hostile_peers.target(request.param) as made:
        yield made


@pytest.mark.parametrize("attack", hostile_peers.ATTACKS)
def test_it_withstands(attack: str, server: Target) -> None:
    hostile_peers.ATTACKS[attack](server)
    hostile_peers.served(server)


def test_a_crowd_does_not_keep_out_who_is_expected(server: Target) -> None:
    hostile_peers.crowd(server, 2000)


def test_noise_changes_nothing(server: Target) -> None:
    assert hostile_peers.noise(server, seconds=1.5) > 10
