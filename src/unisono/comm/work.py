"""An operation in flight, as every collective operation and every call of an actor returns it."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Work(Protocol[T_co]):
    """An operation that has been started."""

    def poll(self) -> bool:
        """Continue as far as possible without waiting; True once `wait` returns or raises at once."""

    def wait(self) -> T_co:
        """The result. May be called again. Raises `PeerLost` or `MessageMismatch`, within the deadline."""
