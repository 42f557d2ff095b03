"""A coordinator's process on the launcher's host, which the launcher restarts when it exits.

The launcher holds the listening socket. A coordinator that is started again therefore has the same port, and clients
that connect in between wait instead of being refused. The new coordinator continues from the decisions of the previous
one, which are on disk.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unisono.errors import UnisonoError
from unisono.membership.endpoint import Endpoint
from unisono.membership.protocol import Policy
from unisono.system import atomic_files as atomic
from unisono.system import process
from unisono.system.backoff import Backoff
from unisono.system.exit_status import exit_clause

_START = (
    "import json, sys; options = json.load(sys.stdin); sys.path[:] = options.pop('path');"
    "from unisono.launch.coordinator_process import ServerOptions, serve; serve(ServerOptions(**options))"
)
_STOP_SECONDS = 3.0  # between SIGTERM and SIGKILL
_STABLE_SECONDS = 10.0  # a process that ran this long did not fail because of its start
_BACKOFF = Backoff(first_seconds=0.1, factor=2.0, longest_seconds=5.0)
_MAX_EXITS = 3  # with an error, in a row
_LOG_BYTES = 2000  # read for an error message


@dataclass(frozen=True)
class ServerOptions:
    """What the coordinator's process needs, as JSON values; `CoordinatorProcess` has the meanings.

    Args:
        launcher: pid of the parent process.
        name: first word of the process's name in ``ps``.
        descriptor: descriptor of the listening socket.
        policy, state, token, log, place: as for `CoordinatorProcess`.
        pause_seconds: time to wait before the coordinator starts.
    """

    launcher: int
    name: str
    descriptor: int
    policy: Mapping[str, Any]
    state: str
    token: str
    log: str
    place: Mapping[str, Any]
    pause_seconds: float


class CoordinatorProcess:
    """Runs a coordinator in a process, which is started again whenever it exits; a context manager, which ends it.

    The kernel kills the process if the thread that started it ends.

    Args:
        place: where the coordinator listens.
        policy: the run's rules for views.
        state: file for the coordinator's decisions.
        token: the run's token; every request must prove that its sender knows it.
        log: file that receives the coordinator's decisions as text.
        on_notice: called with a sentence for the user whenever the process is restarted.
        name: first word of the process's name in ``ps``.

    Raises:
        InvalidInput: `place` is not available.
    """

    def __init__(
        self, place: Endpoint, policy: Policy, state: Path, token: str, log: Path, on_notice: Callable[[str], None],
        name: str = "unisono",
    ) -> None:  # fmt: skip
        self._on_notice, self._log = on_notice, log
        self._listener = place.listen()
        self.url = place.url(self._listener.getsockname()[1])
        self._options = {
            "path": sys.path, "launcher": os.getpid(), "name": name, "descriptor": self._listener.fileno(),
            "policy": asdict(policy), "state": str(state), "token": token, "log": str(log.absolute()),
            "place": {field: value and str(value) for field, value in asdict(place).items()},
        }  # fmt: skip
        self._epoll = select.epoll()
        self._short_lifetimes = self._exits = 0
        self._start(0.0)

    @property
    def pid(self) -> int:
        """The pid of the current process."""
        return self._process.pid

    def fileno(self) -> int:
        """Descriptor that is readable when the process has exited."""
        return self._epoll.fileno()

    def on_readable(self) -> None:
        """Start another process in place of the one that has exited.

        Raises:
            UnisonoError: the process has exited with an error three times in a row.
        """
        status = self._process.wait()
        self._short_lifetimes = self._short_lifetimes + 1 if time.monotonic() - self._started < _STABLE_SECONDS else 0
        self._exits = self._exits + 1 if status > 0 else 0
        if self._exits >= _MAX_EXITS:
            raise UnisonoError(f"the coordinator cannot start: {self._last_log_line()}")
        pause = _BACKOFF.seconds(self._short_lifetimes - 1) if self._short_lifetimes > 1 else 0.0
        self._on_notice(
            f"the coordinator {_exit_clause(status)}: another coordinator is started, and training continues meanwhile"
        )
        self._epoll.unregister(self._pidfd)
        os.close(self._pidfd)
        self._start(pause)

    def close(self) -> None:
        """End the coordinator; may be called twice."""
        if self._listener.fileno() < 0:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._epoll.close()
        os.close(self._pidfd)
        self._listener.close()

    def __enter__(self) -> CoordinatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, pause_seconds: float) -> None:
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._listener.fileno()],
            process_group=0,  # the launcher handles Ctrl-C
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._epoll.register(self._pidfd, select.EPOLLIN)
        options = json.dumps(self._options | {"pause_seconds": pause_seconds}).encode()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has exited already: `on_readable` is called next
            self._process.stdin.write(options)
            self._process.stdin.close()

    def _last_log_line(self) -> str:
        with suppress(OSError):
            lines = self._log.read_bytes()[-_LOG_BYTES:].decode(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line), "") + f" (see {self._log})"
        return "its log is empty"


def serve(options: ServerOptions) -> None:
    """Run the coordinator in this process until it is asked to end."""
    process.exit_with_parent(options.launcher)
    _redirect_output(options.log)
    from setproctitle import setproctitle

    from unisono.membership.server.http_server import CoordinatorServer  # imports the web server

    setproctitle(f"{options.name} coordinator")
    time.sleep(options.pause_seconds)
    place, policy = options.place, Policy(**options.policy)
    certificate, key = (Path(place[kind]) if place[kind] else None for kind in ("certificate", "key"))
    endpoint = Endpoint(place["host"], certificate=certificate, key=key)
    listener = socket.socket(fileno=options.descriptor)
    CoordinatorServer(endpoint, policy, Path(options.state), options.token, _print, listener).run()
    os._exit(0)  # all decisions are on disk, and a regular exit would only delay the launcher


def _redirect_output(log: str) -> None:
    descriptor = atomic.open_to_append(log)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def _print(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)


def _exit_clause(status: int) -> str:
    return exit_clause(status) if status else "was asked to end"
