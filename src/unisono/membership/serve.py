"""The coordinator's process: where it listens, and for how long."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from unisono.errors import InvalidInput
from unisono.membership.coordinator import Coordinator
from unisono.membership.service import Service, application
from unisono.membership.store import Store
from unisono.membership.values import Policy


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
        return f"{'https' if self.certificate else 'http'}://{self.host}:{port}"


class Serving:
    """A coordinator that listens from now on, and answers while `run` does.

    Args:
        state: the file where its decisions lie; what is there is gone on with.
        token: that every call has to bear.
        told: called with each decision in words.

    Raises:
        InvalidInput: nobody can listen there.
    """

    def __init__(
        self, place: Place, policy: Policy, state: Path, token: str, told: Callable[[str], None] = lambda words: None
    ) -> None:
        try:
            self._door = socket.create_server((place.host, place.port))
        except OSError as error:
            raise InvalidInput(
                "listen", f"{place.host}:{place.port}", str(error.strerror), "choose another address or port"
            ) from error
        self.url = place.url(self._door.getsockname()[1])
        store = Store(state)
        service = Service(Coordinator(policy, store.load(), began=time.monotonic()), store, told=told)
        config = uvicorn.Config(
            application(service, token), log_level="warning", access_log=False, lifespan="on", ws="none",
            ssl_certfile=place.certificate, ssl_keyfile=place.key, timeout_graceful_shutdown=1)  # fmt: skip
        self._server, self._store = uvicorn.Server(config), store

    def run(self) -> None:
        """Answers until this process is asked to stop, or `stop` is called."""
        self._server.run(sockets=[self._door])
        self._store.close()

    def stop(self) -> None:
        """From any thread."""
        self._server.should_exit = True
