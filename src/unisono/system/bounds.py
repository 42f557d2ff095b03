"""Bounds of values that other processes send, checked where a message is decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any


class Bounds:
    """The bounds of a value, as metadata of its `Annotated` type.

    Keywords are those of pydantic's core schemas: ``ge``, ``lt``, ``min_length``, ``max_length``, ``pattern``,
    ``allow_inf_nan``. Pydantic applies them to what it decodes; a constructor that is called directly checks nothing.
    This module does not import pydantic: the import takes time, also in processes that decode nothing.
    """

    def __init__(self, **bounds: object) -> None:
        self._bounds = bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), **self._bounds}


# Text without control characters, line ends, invisible characters, and characters that change the direction of text.
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]*$"
Count = Annotated[int, Bounds(ge=0, lt=1 << 62)]
Seconds = Annotated[float, Bounds(ge=0, lt=1e12, allow_inf_nan=False)]

STRICT: dict[str, Any] = {"extra": "forbid", "strict": True}
"""Pydantic's configuration of a dataclass that is decoded from JSON: no further keys, no conversions of types."""
