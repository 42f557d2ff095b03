"""Where a coordinator listens."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import InvalidInput


@dataclass(frozen=True)
class Place:
    """Where a coordinator listens.

    Args:
        host: an address of this machine; others than loopback are reached from elsewhere.
        port: 0 takes a free one.
        certificate, key: files, for TLS; both or none.
    """

    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidInput("certificate", self.certificate, "TLS needs a certificate and its key", "give both")

    def url(self, port: int) -> str:
        """As workers are given it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.certificate else 'http'}://{host}:{port}"

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
