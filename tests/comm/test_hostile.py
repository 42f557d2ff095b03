"""A server does not die, grow or change, whoever comes; `tests.comm.hostile` has the long form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.comm import hostile
from tests.comm.hostile import Target


@pytest.fixture(scope="module", params=hostile.DOORS)
def server(request: pytest.FixtureRequest) -> Iterator[Target]:
    with hostile.target(request.param) as made:
        yield made


@pytest.mark.parametrize("attack", hostile.ATTACKS)
def test_it_withstands(attack: str, server: Target) -> None:
    hostile.ATTACKS[attack](server)
    hostile.served(server)


def test_a_crowd_does_not_keep_out_who_is_expected(server: Target) -> None:
    hostile.crowd(server, 2000)


def test_noise_changes_nothing(server: Target) -> None:
    assert hostile.noise(server, seconds=1.5) > 10
