"""Events of a run, one JSON object per line of ``events.jsonl``."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.system import atomic_files as atomic

FILE = "events.jsonl"
_log = logging.getLogger("unisono.observe")


class EventLog:
    """Appends events to a run directory; a failing disk is reported once in the log, and never raises.

    Args:
        directory: the run directory; the file in it is private, and is appended to after a resume.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._failed = False
        try:
            self._file = atomic.open_to_append(self._path)
        except OSError as error:
            self._file = -1
            self._report(error)

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append one event with the time, in seconds since 1970; one write call, so that lines never mix."""
        if self._file < 0:
            return
        try:
            os.write(self._file, encode_event(time.time(), event, fields))
        except OSError as error:
            self._report(error)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _report(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            _log.warning("events are not written to %s: %s; the run continues", self._path, error.strerror)


def encode_event(seconds: float, event: str, fields: Mapping[str, Any]) -> bytes:
    """One event as a line of JSON, with `plain` values."""
    record = {"time": round(seconds, 6), "event": event, **{key: plain(value) for key, value in fields.items()}}
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def plain(value: Any) -> Any:
    """`value` as JSON can represent it: numbers that are not finite, and other objects, as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)
