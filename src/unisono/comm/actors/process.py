"""An actor in a process of its own: how a worker starts it.

The worker opens the listening sockets and hands them down, so that everybody knows where the server will be while
it still starts. Everything else comes through its standard input, two lines of JSON; the end of that input is
the end of the process, and so is the end of the worker.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from setproctitle import getproctitle

from unisono.comm.actor import Actor
from unisono.comm.actors.client import ActorAddress

_PATIENCE_SECONDS = 5.0
_MAIN = "unisono.comm.actors.process_main"


class ServerProcess:
    """The worker's side.

    Args:
        order: number, service, config, token, encrypted and timeout_seconds; see `unisono.comm.actors.process_main`.
        doors: where the actor will answer.
    """

    def __init__(self, order: Mapping[str, Any], doors: Sequence[socket.socket]) -> None:
        fds = [door.fileno() for door in doors]
        title = f"{getproctitle()} server {order['number']}"
        # A thread that started a process takes it along when it ends; the main thread ends with the worker.
        follow = threading.current_thread() is threading.main_thread()
        whole = {**order, "fds": fds, "title": title, "path": sys.path, "parent": os.getpid() if follow else 0}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C is for workers
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MAIN],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=fds,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid
        self._say(whole)

    def tell_places(self, places: Sequence[ActorAddress]) -> None:
        """Where it finds its colleagues; from then on it answers."""
        self._say([vars(place) for place in places])

    def close(self) -> None:
        """End the process and wait until it has ended. May be called twice."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it may have ended, or been closed, already
            self._process.stdin.write(b"\n")  # the end alone is not seen where a fork of ours has the pipe too
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _say(self, what: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: whoever connects sees it
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()


def load(service: str, number: int, config: Mapping[str, Any]) -> Actor:
    """The actor that ``module:function`` makes."""
    module, _, name = service.partition(":")
    return cast(Actor, getattr(importlib.import_module(module), name)(number, config))
