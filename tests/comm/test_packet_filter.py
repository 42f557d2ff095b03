"""Which packets a listening socket accepts."""

from __future__ import annotations

import socket

import pytest

from unisono.comm.host import source_addresses
from unisono.comm.packet_filter import KEEP, LARGEST, drop_all_but
from unisono.comm.process_sockets import admit_only, refuse_connections


def reached(wire: socket.socket, source: str) -> bool:
    """Whether a connection from that address is taken."""
    try:
        with socket.create_connection(wire.getsockname()[:2], 0.1, (source, 0)):
            return True
    except TimeoutError:
        return False


MANY = [f"10.1.{each // 200}.{each % 200}" for each in range(600)]


@pytest.mark.parametrize(
    ("admitted", "expected"),
    [
        ([], {"127.0.0.1": False, "127.0.0.2": False}),
        (["127.0.0.2"], {"127.0.0.1": False, "127.0.0.2": True}),
        (["10.0.0.1", "127.0.0.1", "192.0.2.7"], {"127.0.0.1": True, "127.0.0.2": False}),
        (["::1", "fd00::2"], {"127.0.0.1": False}),
        ([*MANY, "127.0.0.3"], {"127.0.0.3": True, "127.0.0.1": False}),
    ],
)  # fmt: skip
def test_only_addresses_that_are_admitted_are_answered(admitted: list[str], expected: dict[str, bool]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as wire:
        admit_only(admitted, wire.getsockname())
        assert {source: reached(wire, source) for source in expected} == expected
        refuse_connections(wire.getsockname())
        assert not any(reached(wire, source) for source in expected)


@pytest.mark.parametrize(
    ("admitted", "expected"), [(["::1"], True), (["::2", "127.0.0.1"], False), (["fd00::1", "::1"], True)]
)
def test_the_newer_version_of_ip_has_addresses_of_its_own(admitted: list[str], expected: bool) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as wire:
        admit_only(admitted, ("::1", wire.getsockname()[1]))
        assert reached(wire, "::1") == expected


def test_a_program_that_is_too_long_has_no_effect() -> None:
    many = [f"10.1.{each // 200}.{each % 200}" for each in range(LARGEST)]
    with socket.create_server(("127.0.0.1", 0)) as wire:
        admit_only(many, wire.getsockname())
        assert reached(wire, "127.0.0.1")


def test_connections_that_were_taken_go_on_under_the_filter() -> None:
    with socket.create_server(("127.0.0.1", 0)) as wire:
        admit_only(["127.0.0.1"], wire.getsockname())
        with socket.create_connection(wire.getsockname()) as near, wire.accept()[0] as far:
            refuse_connections(wire.getsockname())
            near.sendall(b"a" * 100_000)
            assert len(far.recv(100_000, socket.MSG_WAITALL)) == 100_000


def test_the_program_has_the_length_that_is_said() -> None:
    empty = len(drop_all_but([]))
    assert len(drop_all_but(["10.0.0.1", "10.0.0.2", "10.0.0.2"])) == empty + 6
    assert len(drop_all_but(["::1"])) == empty + 9
    assert drop_all_but(["::1"]).count(KEEP) == 1


def test_a_host_is_known_on_loopback_by_one_address_and_elsewhere_by_all_others() -> None:
    assert source_addresses("127.0.0.1") == ["127.0.0.1"]
    assert source_addresses("::1") == ["::1"]
    found = source_addresses("192.0.2.77")  # of this host or not
    assert "192.0.2.77" in found
    assert not {"127.0.0.1", "::1"} & set(found)
