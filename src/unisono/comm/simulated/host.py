"""A host on the virtual clock, and the time that a message takes between two hosts."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.comm.link_model import Link


@dataclass
class SimulatedHost:
    """A virtual host, whose link carries one message at a time in each direction.

    `rank` is the rank of the worker on this host, or -1 if an actor of `Services.serve` runs there.
    """

    link: Link
    rank: int = -1
    sends_free_at: float = 0.0
    receives_free_at: float = 0.0

    @property
    def free_at(self) -> float:
        """The time at which both directions are free."""
        return max(self.sends_free_at, self.receives_free_at)

    def hold_until(self, time: float) -> None:
        """Occupy both directions until `time`, for a collective."""
        self.sends_free_at = max(self.sends_free_at, time)
        self.receives_free_at = max(self.receives_free_at, time)


def carry(sender: SimulatedHost, receiver: SimulatedHost, size_bytes: float, now: float) -> float:
    """The arrival time of a message that is ready `now`. A message of a host to itself takes no time.

    Bytes leave when the sender's link is free, and arrive when the receiver's is, as far as possible at the same
    time. A message that waits for the receiver does not occupy the sender's link. The latency occupies no link.
    """
    if sender is receiver:
        return now
    leaves = max(now, sender.sends_free_at)
    sender.sends_free_at = leaves + size_bytes / sender.link.bytes_per_second
    enters = max(leaves, receiver.receives_free_at)
    receiver.receives_free_at = enters + size_bytes / receiver.link.bytes_per_second
    latency_seconds = max(sender.link.latency_seconds, receiver.link.latency_seconds)
    return max(sender.sends_free_at, receiver.receives_free_at) + latency_seconds
