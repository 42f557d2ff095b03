"""Another host, as far as the network is concerned: a namespace, at the other end of a cable that can be pulled."""

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

_NET = int(IPv4Address("198.18.0.0"))  # for tests of networks, routed nowhere (RFC 2544)
_NETS = 1 << 15  # of four addresses each
_INSIDE = "eth0"


def unavailable() -> str:
    """Why there can be none here, in words; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") else "there is no command ip"


class NetworkNamespace:
    """It is there inside the context, and gone after it.

    Attributes:
        address: of this host, as the other one reaches it.

    Raises:
        UnisonoError: this machine refuses.
    """

    def __init__(self) -> None:
        self._name = f"unisono-{os.getpid()}"
        first = _NET + 4 * (os.getpid() % _NETS)
        self.address, self._other = str(IPv4Address(first + 1)), str(IPv4Address(first + 2))

    def command(self, words: Sequence[str]) -> list[str]:
        """`words`, to be run there."""
        return ["ip", "netns", "exec", self._name, *words]

    def cut(self) -> None:
        """Nothing gets through, in neither direction, and nobody is told."""
        _ip("-n", self._name, "link", "set", _INSIDE, "down")

    def mend(self) -> None:
        """Everything gets through again."""
        _ip("-n", self._name, "link", "set", _INSIDE, "up")

    def __enter__(self) -> Self:
        here = f"uni{os.getpid()}"
        with suppress(UnisonoError):
            self._remove()  # of a process of the same number that was killed
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
        _ip("netns", "delete", self._name)  # the cable goes with it


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise UnisonoError(f"no other host can be played here: ip {' '.join(words)}: {done.stderr.strip()}")
