"""Torch's key-value store for scripts that call ``torch.distributed.init_process_group`` themselves.

The launcher holds the listening socket from before the first worker starts until the last one has ended: no other
process can take the port in between, and only the loopback address is bound. The process that serves the store is
started when a worker connects, so that scripts without it do not pay for it.
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

from unisono.launch import process
from unisono.launch.cluster_environment import LOOPBACK

_START = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given.pop('path');"
    "from unisono.launch.torch_store import serve; serve(**given)"
)
_BACKLOG = 1024  # workers that connect while the process starts


class TorchStore:
    """A context: leaving it ends the store. The thread that calls `attend` must live as long.

    Attributes:
        port: at which it can be reached on this host.
    """

    def __init__(self, name: str = "unisono") -> None:
        self._socket = socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = select.epoll()
        self._watch.register(self._socket, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when a first worker connects."""
        return self._watch.fileno()

    def attend(self) -> None:
        """Start the process, which takes over the socket and whoever has connected."""
        self._watch.unregister(self._socket)
        given = {"path": sys.path, "launcher": os.getpid(), "name": self._name, "port": self.port}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(given | {"descriptor": self._socket.fileno()})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._socket.fileno()],
            process_group=0,  # Ctrl-C is the launcher's
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def close(self) -> None:
        """No store any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._watch.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(*, launcher: int, name: str, port: int, descriptor: int) -> None:
    """The life of the process."""
    process.die_with(launcher)
    from setproctitle import setproctitle
    from torch._C._distributed_c10d import TCPStore

    setproctitle(f"{name} torch store")
    store = TCPStore(
        LOOPBACK, port, None, True, timedelta(minutes=1), wait_for_workers=False, master_listen_fd=descriptor
    )
    while store:
        signal.pause()
