"""An actor in a process of its own: the side of the worker that starts it.

The worker opens the listening sockets, which the actor's process inherits. So the address is known while that process
still starts. The process reads two lines of JSON from its standard input. It exits when that input ends, and when the
worker exits.
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

_EXIT_SECONDS = 5.0
_MAIN = "unisono.comm.actors.process_main"


class ServerProcess:
    """An actor's process, as the worker that starts it sees it.

    Args:
        start_message: values for `unisono.comm.actors.process_main`, with the keys ``number``, ``service``,
            ``config``, ``token``, ``encrypted`` and ``timeout_seconds``.
        sockets: the actor's listening sockets.
    """

    def __init__(self, start_message: Mapping[str, Any], sockets: Sequence[socket.socket]) -> None:
        fds = [each.fileno() for each in sockets]
        title = f"{getproctitle()} server {start_message['number']}"
        # The kernel kills a process when the *thread* that started it ends; only the main thread ends with the worker.
        in_main_thread = threading.current_thread() is threading.main_thread()
        full_message = {
            **start_message,
            "fds": fds,
            "title": title,
            "path": sys.path,
            "parent": os.getpid() if in_main_thread else 0,
        }
        # The process inherits the mask: Ctrl-C is for workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
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
        self._send(full_message)

    def send_addresses(self, addresses: Sequence[ActorAddress]) -> None:
        """Send the addresses of all actors of the service, after which the actor connects to them and answers."""
        self._send([vars(address) for address in addresses])

    def close(self) -> None:
        """End the process and wait for its exit. May be called twice."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # the process may have exited, or the pipe be closed, already
            # The process does not see that the pipe is closed while a forked process has the pipe open as well.
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has exited, which callers notice when they connect
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()


def load(service: str, number: int, config: Mapping[str, Any]) -> Actor:
    """Import ``module:function``, which `service` names, and call it; returns the actor that it returns."""
    module, _, name = service.partition(":")
    return cast(Actor, getattr(importlib.import_module(module), name)(number, config))
