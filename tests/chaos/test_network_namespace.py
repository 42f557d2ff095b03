"""A network namespace as another host: reachable, cut off, reachable again, removed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from unisono.chaos.network_namespace import NetworkNamespace, unavailable
from unisono.errors import UnisonoError

KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.0).close()"


@pytest.fixture
def there():
    if why := unavailable():
        pytest.skip(why)
    try:
        with NetworkNamespace() as made:
            yield made
    except UnisonoError as refused:
        pytest.skip(str(refused))


def comes_through(there: NetworkNamespace, port: int) -> bool:
    line = there.command([sys.executable, "-c", KNOCK, there.address, str(port)])
    return subprocess.run(line, capture_output=True).returncode == 0


@pytest.mark.root
def test_a_link_is_there_until_it_is_cut_and_again_when_it_is_mended(there: NetworkNamespace) -> None:
    with socket.create_server((there.address, 0)) as door:
        port = door.getsockname()[1]
        assert comes_through(there, port)
        there.cut()
        assert not comes_through(there, port)
        there.mend()
        assert comes_through(there, port)


@pytest.mark.root
def test_nothing_of_it_stays() -> None:
    if why := unavailable():
        pytest.skip(why)
    before = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout
    try:
        with NetworkNamespace():
            assert subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout != before
    except UnisonoError as refused:
        pytest.skip(str(refused))
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"unisono-{os.getpid()}" not in names.split()
