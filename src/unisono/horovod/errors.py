"""Errors under the names and base classes that programs written for Horovod catch."""

from __future__ import annotations

from unisono.errors import CommunicationError, InvalidInput, PeerLost, UnisonoError


class HorovodInternalError(CommunicationError, RuntimeError):
    """A collective operation failed: workers asked for different things, or one of them is lost."""


class WorkersLost(HorovodInternalError):
    """A worker is lost, or has shut down; `elastic.run` goes on without it."""


def failure(error: Exception) -> HorovodInternalError:
    """What a program is told of `error`, which has ended an operation."""
    if isinstance(error, PeerLost):
        return WorkersLost(str(error))
    return HorovodInternalError(f"{type(error).__name__}: {error}")


class HostsUpdatedInterrupt(UnisonoError, RuntimeError):
    """Workers join or leave: `elastic.run` begins again with the new group, without going back to the last commit."""


class InvalidArgument(InvalidInput, ValueError):
    """An argument that cannot work, or a call at the wrong time; also a `ValueError`, as in Horovod."""
