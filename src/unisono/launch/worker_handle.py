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

_MAX_LINE_BYTES = 1 << 26  # of one message
_RECEIVE_BYTES = 1 << 16


@dataclass
class WorkerHandle:
    """A process that the fork server was asked for.

    Attributes:
        channel: socket by which the worker reports.
        pid: its number, once it has started.
        started_seconds: when it was asked for, on the monotonic clock.
        returned: the worker has reported its `result`.
        failed: the worker has reported its failure.
        disconnected: the worker sends no more messages.
        exited: the process has exited.
        script_exit: how its script exited, if that was no failure.
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
        """Rank, and slot at the launcher."""
        return self.spec.rank

    def receive(self) -> list[Mapping[str, Any]] | None:
        """Messages that have arrived; None if the worker has closed the channel.

        Raises:
            WorkerFailed: a message is too long.
            OSError: no message has arrived, or the channel is broken.
        """
        chunk = self.channel.recv(_RECEIVE_BYTES)
        if not chunk:
            return None
        *lines, rest = (self._partial_line + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise WorkerFailed(self.rank, f"reported more than {_MAX_LINE_BYTES} bytes at once")
        self._partial_line = rest
        return [json.loads(line) for line in lines]
