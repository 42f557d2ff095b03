"""The coordinator's process: where it listens, and for how long."""

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
from unisono.membership.server.heartbeat_protocol import FastHeartbeatProtocol
from unisono.membership.server.request_timeout import SELDOM, HurriedLoop, allow_connections
from unisono.membership.server.service import HeartbeatRoute, Service, application
from unisono.membership.server.store import Store

BACKLOG = 4096  # connections that may come at once
_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 128 << 10  # of glibc's malloc.h
KEPT_SECONDS = 600  # a connection on which nothing is said: a worker's second is used when the view changes


class CoordinatorServer:
    """A coordinator that listens from now on, and answers while `run` does.

    Args:
        state: the file where its decisions lie; what is there is gone on with.
        token: that every call has to bear.
        told: called with each decision in words.
        door: a socket that listens there already; else one is opened.

    Raises:
        InvalidInput: nobody can listen there.
    """

    def __init__(
        self,
        place: Endpoint,
        policy: Policy,
        state: Path,
        token: str,
        told: Callable[[str], None] = lambda words: None,
        door: socket.socket | None = None,
    ) -> None:
        self._door = door or place.open()
        self.url = place.url(self._door.getsockname()[1])
        store = Store(state)
        service = Service(Coordinator(policy, store.load(), began=time.monotonic()), store, told=told)
        guard = application(service, token)
        config = uvicorn.Config(
            guard,
            http=cast(Any, partial(FastHeartbeatProtocol, guard=guard, ear=HeartbeatRoute(service))),
            loop=cast(Any, HurriedLoop),
            log_level="warning",
            access_log=False,
            lifespan="on",
            ws="none",
            server_header=False,
            proxy_headers=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEPT_SECONDS,
            timeout_graceful_shutdown=1,
            ssl_certfile=place.certificate,
            ssl_keyfile=place.key,
        )
        logging.getLogger("uvicorn.error").addFilter(SELDOM)  # the same one is added once
        self._server, self._store = _Server(config, service.release), store

    def run(self) -> None:
        """Answers until this process is asked to stop, or `stop` is called."""
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal goes away
                signal.signal(signal.SIGHUP, lambda *_: self.stop())
            for number in (signal.SIGINT, signal.SIGTERM):  # the server raises them again once it has ended
                if signal.signal(number, lambda *_: None) is signal.SIG_IGN:
                    self._server.ignored.add(number)
            gc.set_threshold(100_000, 50, 100)  # of what thousands of workers are, little is ever garbage
        allow_connections()
        _return_memory()
        try:
            self._server.run(sockets=[self._door])
        finally:
            self._store.close()

    def stop(self) -> None:
        """From any thread."""
        self._server.end()


class _Server(uvicorn.Server):
    """uvicorn's, which by itself wakes up ten times a second to see whether it is to end: a step waits for whoever
    takes the processor of one of its workers."""

    def __init__(self, config: uvicorn.Config, release: Callable[[], None]) -> None:
        super().__init__(config)
        self._release = release
        self.ignored: set[int] = set()  # signals
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        """Until it is told to end."""
        self._asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)
        if not self.should_exit:
            await self._asked.wait()
        self._release()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal asks for it."""
        if sig not in self.ignored:
            super().handle_exit(sig, frame)
            self.end()

    def end(self) -> None:
        """From any thread."""
        self.should_exit = True
        if self._loop:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._asked.set)


def _return_memory() -> None:
    """Have the buffers of TLS connections, of 256 KiB each, returned to the system when these end. Once one is freed,
    glibc takes further ones from its heap, which grows with each flood of connections."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
