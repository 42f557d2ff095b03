"""Serves torch's key-value store for scripts that call ``torch.distributed.init_process_group`` themselves.

The launcher holds the listening socket from before the first worker starts until the last one has exited. No other
process can take the port in between, and only the loopback address is bound. The process that serves the store starts
when a worker connects, so scripts that do not use it do not pay for it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Self

from unisono.launch.cluster_environment import LOOPBACK
from unisono.system import process

_START = (
    "import json, sys; options = json.loads(sys.argv[1]); sys.path[:] = options.pop('path');"
    "from unisono.launch.torch_store import serve; serve(**options)"
)
_BACKLOG = 1024  # workers that connect while the process starts


class TorchStore:
    """torch's key-value store, served on the launcher's host; a context manager, which ends the store.

    The kernel kills the process that serves the store if the thread that called `on_readable` ends.

    Attributes:
        port: the store's port on the loopback address.
    """

    def __init__(self, name: str = "unisono") -> None:
        self._socket = socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)

    def fileno(self) -> int:
        """Descriptor that is readable when the first worker connects."""
        return self._epoll.fileno()

    def on_readable(self) -> None:
        """Start the process that serves the store; it inherits the socket and the pending connections."""
        self._epoll.unregister(self._socket)
        options = {"path": sys.path, "launcher": os.getpid(), "name": self._name, "port": self.port}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(options | {"descriptor": self._socket.fileno()})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._socket.fileno()],
            process_group=0,  # the launcher handles Ctrl-C
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def close(self) -> None:
        """End the store."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._epoll.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(*, launcher: int, name: str, port: int, descriptor: int) -> None:
    """Serve the store until the process is killed."""
    process.exit_with_parent(launcher)
    from setproctitle import setproctitle
    from torch._C._distributed_c10d import TCPStore

    setproctitle(f"{name} torch store")
    store = TCPStore(
        LOOPBACK, port, None, True, timedelta(minutes=1), wait_for_workers=False, master_listen_fd=descriptor
    )
    while store:
        signal.pause()
