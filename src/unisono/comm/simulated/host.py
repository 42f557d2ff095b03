"""The end of a link on the made-up clock, and how long a message takes from one such end to another."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.comm.link_model import Link


@dataclass
class SimulatedHost:
    """A virtual host: its link carries one message at a time in each direction.

    `rank` is that of the worker that lives there, -1 where a server does.
    """

    link: Link
    rank: int = -1
    sends_free_at: float = 0.0
    receives_free_at: float = 0.0

    @property
    def free_at(self) -> float:
        """When both directions are free."""
        return max(self.sends_free_at, self.receives_free_at)

    def hold_until(self, time: float) -> None:
        """A collective has both directions until then."""
        self.sends_free_at = max(self.sends_free_at, time)
        self.receives_free_at = max(self.receives_free_at, time)


def carry(sender: SimulatedHost, receiver: SimulatedHost, size_bytes: float, now: float) -> float:
    """When a message that is ready `now` has arrived. What a host sends to itself is free.

    Bytes leave as the sender's link has room and come in as the receiver's has, at the same time as far as may
    be; who waits for the receiver holds up nobody at the sender. The latency holds up no link.
    """
    if sender is receiver:
        return now
    leaves = max(now, sender.sends_free_at)
    sender.sends_free_at = leaves + size_bytes / sender.link.bytes_per_second
    enters = max(leaves, receiver.receives_free_at)
    receiver.receives_free_at = enters + size_bytes / receiver.link.bytes_per_second
    latency_seconds = max(sender.link.latency_seconds, receiver.link.latency_seconds)
    return max(sender.sends_free_at, receiver.receives_free_at) + latency_seconds
