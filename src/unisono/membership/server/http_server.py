"""The coordinator's process: the HTTP server, until it is asked to stop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn

from unisono.membership.coordinator import Coordinator
from unisono.membership.endpoint import Endpoint as Endpoint
from unisono.membership.protocol import Policy
from unisono.membership.server.app import application
from unisono.membership.server.heartbeat_protocol import FastHeartbeatProtocol
from unisono.membership.server.request_timeout import WARNING_THINNER, TimeoutLoop, allow_connections
from unisono.membership.server.service import HeartbeatRoute, Service
from unisono.membership.server.store import Store

BACKLOG = 4096  # connections that may arrive at once
_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 128 << 10  # an option of glibc's mallopt, and the value to set
KEEP_ALIVE_SECONDS = 600  # a worker's second connection is idle until the view changes


class CoordinatorServer:
    """A coordinator that listens from now on, and responds while `run` is active.

    Args:
        endpoint: where it listens.
        policy: the user's rules for views.
        state: the path of the file for its decisions; decisions that are in the file already are taken over.
        token: the run's token; every request must prove that its sender knows it.
        log: called with each decision as text.
        listener: a socket that listens at `endpoint` already; None: a socket is opened.

    Raises:
        InvalidInput: the address is not available.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        policy: Policy,
        state: Path,
        token: str,
        log: Callable[[str], None] = lambda text: None,
        listener: socket.socket | None = None,
    ) -> None:
        self._listener = listener or endpoint.listen()
        self.url = endpoint.url(self._listener.getsockname()[1])
        store = Store(state)
        service = Service(Coordinator(policy, store.load(), started_at=time.monotonic()), store, log=log)
        auth = application(service, token)
        config = uvicorn.Config(
            auth,
            http=cast(Any, partial(FastHeartbeatProtocol, auth=auth, route=HeartbeatRoute(service))),
            loop=cast(Any, TimeoutLoop),
            log_config=None,  # uvicorn's own would close the handlers of other libraries in this process
            log_level="warning",
            access_log=False,
            lifespan="on",
            ws="none",
            server_header=False,
            proxy_headers=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
            ssl_certfile=endpoint.certificate,
            ssl_keyfile=endpoint.key,
        )
        logging.getLogger("uvicorn.error").addFilter(WARNING_THINNER)  # adding it again has no effect
        self._server, self._store = _Server(config, service.release_all), store

    def run(self) -> None:
        """Respond until this process is asked to stop, or `stop` is called."""
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal closes
                signal.signal(signal.SIGHUP, lambda *_: self.stop())
            for number in (signal.SIGINT, signal.SIGTERM):  # the server raises them again after its end
                if signal.signal(number, lambda *_: None) is signal.SIG_IGN:
                    self._server.ignored.add(number)
            gc.set_threshold(100_000, 50, 100)  # records of thousands of workers are hardly ever garbage
        allow_connections()
        _return_memory()
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._store.close()

    def stop(self) -> None:
        """Stop `run`. Any thread may call this."""
        self._server.end()


class _Server(uvicorn.Server):
    """uvicorn's server, but woken to end, where uvicorn's own polls ten times a second whether it should.

    Every process that takes the processor from a worker delays the training step.
    """

    def __init__(self, config: uvicorn.Config, release: Callable[[], None]) -> None:
        super().__init__(config)
        self._release = release
        self.ignored: set[int] = set()  # numbers of signals
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        """Wait for `end`."""
        self._end_requested = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)
        if not self.should_exit:
            await self._end_requested.wait()
        self._release()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End because of signal `sig`, unless that is ignored."""
        if sig not in self.ignored:
            super().handle_exit(sig, frame)
            self.end()

    def end(self) -> None:
        """End the main loop. Any thread may call this."""
        self.should_exit = True
        if self._loop:
            with suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._end_requested.set)


def _return_memory() -> None:
    """Let glibc return the buffers of TLS connections, of 256 KiB each, to the system when they are freed.

    By default, once such a buffer is freed, glibc takes further ones from its heap, which grows with each flood of
    connections.
    """
    with suppress(AttributeError, OSError):  # the C library is not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
