"""One worker, as its launcher knows it: what it was told to do, what it says, and how it ended."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.errors import WorkerFailed
from unisono.launch.worker_main import WorkerSpec

_LARGEST_LINE = 1 << 26  # bytes of one report
_PIECE = 1 << 16  # bytes


@dataclass
class WorkerHandle:
    """A process that was asked for; `pid` once it is there.

    Attributes:
        returned: it said that it is done, with `result`.
        failed: it said that it is not, and why.
        silent: it says no more.
        ended: the process is gone.
        ending: how its script ended, where that was no failure.
    """

    order: WorkerSpec
    channel: socket.socket
    pid: int | None = None
    began_seconds: float = field(default_factory=time.monotonic)
    returned: bool = False
    result: Any = None
    failed: bool = False
    silent: bool = False
    ended: bool = False
    ending: str = ""
    _heard: bytearray = field(default_factory=bytearray)

    @property
    def rank(self) -> int:
        """Also its place among the members."""
        return self.order.rank

    def hear(self) -> list[Mapping[str, Any]] | None:
        """What it has said since; None if it will say no more.

        Raises:
            WorkerFailed: more than it may say at once.
            OSError: nothing has come, or the channel was cut.
        """
        piece = self.channel.recv(_PIECE)
        if not piece:
            return None
        *lines, rest = (self._heard + piece).split(b"\n")
        if len(rest) > _LARGEST_LINE:
            raise WorkerFailed(self.rank, f"reported more than {_LARGEST_LINE} bytes at once")
        self._heard = rest
        return [json.loads(line) for line in lines]
