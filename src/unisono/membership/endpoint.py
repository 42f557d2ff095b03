"""Where a coordinator listens, and where a run finds its own."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from unisono.errors import InvalidInput
from unisono.membership.protocol import LOOPBACK, CoordinatorAddress


@dataclass(frozen=True)
class Endpoint:
    """Where a coordinator listens.

    Args:
        host: an address of this machine; others than loopback are reached from elsewhere.
        port: 0 takes a free one.
        certificate, key: files, for TLS; both or none.
        makes_certificate: it is to have one of its own, see `unisono.membership.certificate`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    key: Path | None = None
    makes_certificate: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidInput("certificate", self.certificate, "TLS needs a certificate and its key", "give both")

    def url(self, port: int) -> str:
        """As workers are given it."""
        host = socket.gethostname() if self._everywhere else self.host
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self.certificate else 'http'}://{host}:{port}"

    @property
    def _everywhere(self) -> bool:
        with suppress(ValueError):  # it is a name
            return ip_address(self.host).is_unspecified
        return False

    @property
    def private(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in LOOPBACK

    def open(self) -> socket.socket:
        """A socket that listens here.

        Raises:
            InvalidInput: nobody can.
        """
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise InvalidInput(
                "listen", f"{self.host}:{self.port}", str(error.strerror), "choose another address or port"
            ) from error


@dataclass(frozen=True)
class CoordinatorOptions:
    """Where the workers of a run that is to be started find its coordinator.

    Args:
        place: where one is started, that ends with the run; on loopback only this host's workers reach it.
        token: that it asks for; empty: one that nobody has seen.
        authority: see `CoordinatorAddress`; empty where the coordinator makes its certificate: that one.
        elsewhere: one that is up already, in place of that.
    """

    place: Endpoint = Endpoint()
    token: str = field(default="", repr=False)
    authority: str = ""
    elsewhere: CoordinatorAddress | None = None
