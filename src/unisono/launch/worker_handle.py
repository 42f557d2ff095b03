"""A worker as its launcher knows it: its spec, its messages, and how it ended."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.errors import WorkerFailed
from unisono.launch.worker_main import WorkerSpec

_MAX_LINE_BYTES = 1 << 26  # the size of one message, at most
_RECEIVE_BYTES = 1 << 16


@dataclass
class WorkerHandle:
    """A worker process that the fork server was asked for.

    Attributes:
        channel: the socket by which the worker reports.
        pid: the process's number; None until it has started.
        started_seconds: when the fork server was asked for the process, on the monotonic clock.
        returned: whether the worker has reported its `result`.
        failed: whether the worker has reported its failure.
        disconnected: whether the worker sends no more messages.
        exited: whether the process has exited.
        script_exit: how the worker's script exited, if that was not a failure; else empty.
    """

    spec: WorkerSpec
    channel: socket.socket
    pid: int | None = None
    started_seconds: float = field(default_factory=time.monotonic)
    returned: bool = False
    result: Any = None
    failed: bool = False
    disconnected: bool = False
    exited: bool = False
    script_exit: str = ""
    _partial_line: bytearray = field(default_factory=bytearray)

    @property
    def rank(self) -> int:
        """The worker's rank, which is also its slot at the launcher."""
        return self.spec.rank

    def receive(self) -> list[Mapping[str, Any]] | None:
        """The messages that have arrived; None if the worker has closed the channel.

        Raises:
            WorkerFailed: a message is too long.
            OSError: nothing has arrived, or the channel is broken.
        """
        chunk = self.channel.recv(_RECEIVE_BYTES)
        if not chunk:
            return None
        *lines, rest = (self._partial_line + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise WorkerFailed(self.rank, f"reported more than {_MAX_LINE_BYTES} bytes at once")
        self._partial_line = rest
        return [json.loads(line) for line in lines]
