"""A network namespace that acts as another host, behind a link that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address
from types import TracebackType
from typing import Self

from unisono.errors import UnisonoError

_NET = int(IPv4Address("198.18.0.0"))  # addresses for network tests, which are not routed (RFC 2544)
_NETS = 1 << 15  # how many networks of four addresses there are
_INSIDE = "eth0"


def unavailable() -> str:
    """Why network namespaces cannot be used here, as text; empty if they can be used."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") else "there is no command ip"


class NetworkNamespace:
    """A network namespace that exists within the context.

    Attributes:
        address: the address of this host from inside the namespace.

    Raises:
        UnisonoError: the namespace cannot be made on this machine.
    """

    def __init__(self) -> None:
        self._name = f"unisono-{os.getpid()}"
        first = _NET + 4 * (os.getpid() % _NETS)
        self.address, self._other = str(IPv4Address(first + 1)), str(IPv4Address(first + 2))

    def command(self, words: Sequence[str]) -> list[str]:
        """`words` as a command that runs inside the namespace."""
        return ["ip", "netns", "exec", self._name, *words]

    def cut(self) -> None:
        """Drop all packets in both directions, without notification."""
        _ip("-n", self._name, "link", "set", _INSIDE, "down")

    def mend(self) -> None:
        """Restore the link."""
        _ip("-n", self._name, "link", "set", _INSIDE, "up")

    def __enter__(self) -> Self:
        here = f"uni{os.getpid()}"
        with suppress(UnisonoError):
            self._remove()  # a killed process with the same ID may have left it
        _ip("netns", "add", self._name)
        try:
            _ip("link", "add", here, "type", "veth", "peer", "name", _INSIDE, "netns", self._name)
            _ip("addr", "add", f"{self.address}/30", "dev", here)
            _ip("link", "set", here, "up")
            _ip("-n", self._name, "addr", "add", f"{self._other}/30", "dev", _INSIDE)
            for link in ("lo", _INSIDE):
                _ip("-n", self._name, "link", "set", link, "up")
        except UnisonoError:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        _ip("netns", "delete", self._name)  # deletes the link too


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise UnisonoError(f"no network namespace can be used here: ip {' '.join(words)}: {done.stderr.strip()}")
