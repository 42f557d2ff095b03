"""Where a coordinator listens, and which coordinator a run uses."""

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
        host: a name or an address of this machine; other hosts can reach any address but that of loopback.
        port: 0 selects a free port.
        certificate, key: the files for TLS; give both or neither.
        create_certificate: whether the coordinator creates its certificate, see `unisono.membership.certificate`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    key: Path | None = None
    create_certificate: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidInput("certificate", self.certificate, "TLS needs a certificate and its key", "give both")

    def url(self, port: int) -> str:
        """The URL by which workers reach the coordinator, which listens on `port`."""
        host = socket.gethostname() if self._is_unspecified else self.host
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self.certificate else 'http'}://{host}:{port}"

    @property
    def _is_unspecified(self) -> bool:
        with suppress(ValueError):  # `host` is a name, not an address
            return ip_address(self.host).is_unspecified
        return False

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the coordinator."""
        return self.host in LOOPBACK

    def listen(self) -> socket.socket:
        """Open a listening socket.

        Raises:
            InvalidInput: the address is not available.
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
    """Which coordinator a run uses.

    Args:
        endpoint: where the run's own coordinator listens; on loopback only workers of this host can reach it.
        token: the run's token; empty: a new one is drawn.
        authority: see `CoordinatorAddress`; not needed if the coordinator creates its certificate.
        existing: a coordinator that is already running, in place of the run's own.
    """

    endpoint: Endpoint = Endpoint()
    token: str = field(default="", repr=False)
    authority: str = ""
    existing: CoordinatorAddress | None = None
