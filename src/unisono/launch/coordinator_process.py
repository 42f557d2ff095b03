"""The coordinator's process beside a launcher.

The launcher holds the socket at which it listens, so that a coordinator that is started again listens at the same port,
and whoever connects in between waits instead of being turned away. What it decided is on disk, and is gone on with.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono.errors import UnisonoError
from unisono.launch import process
from unisono.membership.endpoint import Endpoint
from unisono.membership.protocol import Policy
from unisono.system import atomic_files as atomic
from unisono.system import exit_status as exits
from unisono.system.backoff import Backoff

_START = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given.pop('path');"
    "from unisono.launch.coordinator_process import serve; serve(**given)"
)
_END_SECONDS = 3.0  # between SIGTERM and SIGKILL
_SETTLED_SECONDS = 10.0  # whoever lived as long did not die of its start
_BACKOFF = Backoff(first_seconds=0.1, factor=2.0, longest_seconds=5.0)
_REFUSALS = 3  # ends by itself in a row, after which there will be no coordinator
_SHOWN_BYTES = 2000  # of its log


class CoordinatorProcess:
    """Starts a coordinator, and another one whenever it dies. A context: leaving it ends it.

    The calling thread must live as long, since the process follows it into death.

    Args:
        place: where it listens.
        policy: what the user decided.
        state: the file where its decisions lie.
        token: that every call has to bear.
        log: takes what it decides, in words.
        told: called with what happened to it, in words.
        name: first word of the process's name in ``ps``.

    Raises:
        InvalidInput: nobody can listen there.
    """

    def __init__(
        self, place: Endpoint, policy: Policy, state: Path, token: str, log: Path, told: Callable[[str], None],
        name: str = "unisono",
    ) -> None:  # fmt: skip
        self._told, self._log = told, log
        self._door = place.open()
        self.url = place.url(self._door.getsockname()[1])
        self._given = {
            "path": sys.path, "launcher": os.getpid(), "name": name, "descriptor": self._door.fileno(),
            "policy": asdict(policy), "state": str(state), "token": token, "log": str(log.absolute()),
            "place": {field: value and str(value) for field, value in asdict(place).items()},
        }  # fmt: skip
        self._watch = select.epoll()
        self._short = self._refusals = 0
        self._start(0.0)

    @property
    def pid(self) -> int:
        """Of the latest process."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when `attend` has something to do."""
        return self._watch.fileno()

    def attend(self) -> None:
        """The process has ended: another one takes its place.

        Raises:
            UnisonoError: it ended by itself each time.
        """
        status = self._process.wait()
        self._short = self._short + 1 if time.monotonic() - self._began < _SETTLED_SECONDS else 0
        self._refusals = self._refusals + 1 if status > 0 else 0
        if self._refusals >= _REFUSALS:
            raise UnisonoError(f"no coordinator comes up: {self._last_words()}")
        pause = _BACKOFF.seconds(self._short - 1) if self._short > 1 else 0.0
        self._told(f"the coordinator {_ended(status)}: another one is started, and training goes on meanwhile")
        self._watch.unregister(self._pidfd)
        os.close(self._pidfd)
        self._start(pause)

    def close(self) -> None:
        """No coordinator any more; may be called twice."""
        if self._door.fileno() < 0:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._watch.close()
        os.close(self._pidfd)
        self._door.close()

    def __enter__(self) -> CoordinatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, pause_seconds: float) -> None:
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._door.fileno()],
            process_group=0,  # Ctrl-C is the launcher's
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._watch.register(self._pidfd, select.EPOLLIN)
        given = json.dumps(self._given | {"pause_seconds": pause_seconds}).encode()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead already, as will be seen
            self._process.stdin.write(given)
            self._process.stdin.close()

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = self._log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line), "") + f" (see {self._log})"
        return "it said nothing"


def serve(
    path: str = "", *, launcher: int, name: str, descriptor: int, policy: Mapping[str, Any], state: str, token: str,
    log: str, place: Mapping[str, Any], pause_seconds: float,
) -> None:  # fmt: skip
    """The life of the process."""
    process.die_with(launcher)
    _write_to(log)
    from setproctitle import setproctitle

    from unisono.membership.server.http_server import CoordinatorServer  # imports the web server

    setproctitle(f"{name} coordinator")
    time.sleep(pause_seconds)
    certificate, key = (Path(place[kind]) if place[kind] else None for kind in ("certificate", "key"))
    where = Endpoint(place["host"], certificate=certificate, key=key)
    door = socket.socket(fileno=descriptor)
    CoordinatorServer(where, Policy(**policy), Path(state), token, _print, door).run()
    os._exit(0)  # all is on disk, and taking the interpreter down in order would cost the launcher a moment


def _write_to(log: str) -> None:
    descriptor = atomic.open_to_append(log)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def _print(words: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), words, flush=True)


def _ended(status: int) -> str:
    return exits.ended(status) if status else "was asked to end"
