"""An operation in flight, as every collective operation and every call of an actor returns it."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Work(Protocol[T_co]):
    """An operation that has been started."""

    def poll(self) -> bool:
        """Continue the operation as far as possible without waiting; True once `wait` would not wait any more."""

    def wait(self) -> T_co:
        """Wait for the result, and return it; may be called again.

        Raises `PeerLost` or `MessageMismatch`, at the latest when the deadline has passed.
        """
