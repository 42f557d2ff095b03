"""An operation that has been started: what every verb and every call gives back."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Work(Protocol[T_co]):
    """An operation under way."""

    def poll(self) -> bool:
        """Go on as far as possible without waiting; True when it is over (`wait` gives the result or the error)."""

    def wait(self) -> T_co:
        """The result. May be called again. Raises `PeerLost` or `MessageMismatch`, within the deadline."""
