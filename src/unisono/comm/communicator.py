"""The contract of the wire between the replicas. The only door to the network and to the clock.

A verb *starts* an operation and returns a `Work` at once; `Work.wait` gives the result. Nothing needs a thread:
an operation moves on whenever anybody polls. All peers must start the same verbs in the same order on the same
lane. Every message carries a `Header`, and headers are compared before the payload is touched, so that a peer
that said something else is a `MessageMismatch` that names both sides, never an abort or a silent wrong sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, dtype

from unisono.comm.actor import Services
from unisono.comm.hierarchy import Hierarchy
from unisono.comm.work import Work as Work


@dataclass(frozen=True)
class Header:
    """What a message says of itself.

    `verb` is the method's name; `sequence` counts the verbs started on this lane, from 0; `numel` and `dtype`
    are those of the payload; `root` is the rank a broadcast comes from (-1 elsewhere); `to` is the dtype of a sum's
    result ("": that of the payload). Two peers' headers of the same sequence must be equal (for `exchange` and
    `swap`, whose sizes may differ by pair, `numel` is -1 and the sizes are checked pair by pair).
    """

    verb: str
    sequence: int
    numel: int
    dtype: str
    root: int = -1
    to: str = ""

    def __str__(self) -> str:
        size = f" of {self.numel} x {self.dtype}" if self.numel >= 0 else ""
        root = f" from worker {self.root}" if self.root >= 0 else ""
        to = f" to {self.to}" if self.to else ""
        return f"message {self.sequence}: {self.verb}{size}{root}{to}"


class Communicator(Services, Protocol):
    """The wire between the same part of all replicas. Ranks are ``0 .. size-1``.

    A tensor handed in belongs to the communicator until `wait` returns; after that it may hold anything, unless
    the verb says otherwise. Every `wait` may raise `PeerLost`. All floating dtypes, int64, int32 and uint8 are
    carried; any contiguous shape, empty included. Not thread-safe: one lane is used by one thread.
    """

    rank: int
    size: int

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that left this worker so far, on all lanes (shared memory counts what peers had to read)."""

    @property
    def waits_for(self) -> tuple[str, tuple[int, ...]]:
        """The operation that this worker waits for now, on whichever lane, and who has not come to it, as far as that
        can be told; empty: it does not wait. For any thread."""

    def allocate(self, numel: int, dtype: dtype) -> Tensor:
        """A zeroed flat tensor that `sum` takes without copying it. All peers allocate alike, in the same order."""

    def sum(self, x: Tensor, dtype: dtype | None = None) -> Work[Tensor]:
        """The sum over all peers, added in the order of ranks where the backend can promise an order.

        It is added in the dtype of `x`, and converted to `dtype` (None: that of `x`) once, after the last addition.
        The result has the shape of `x`, is to be read only, may be memory shared with peers or `x` itself, and is
        valid until this worker starts the next `sum` of the same `x`.
        """

    def gather(self, x: Tensor) -> Work[Tensor]:
        """Everybody's `x`, stacked: shape ``[size, *x.shape]``, row *r* from rank *r*. `x` is unchanged."""

    def broadcast(self, x: Tensor, root: int = 0) -> Work[Tensor]:
        """`x` of rank `root`, written into everybody's `x`, which is the result."""

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Work[list[Tensor]]:
        """Send ``xs[r]`` to rank *r*; result *r* is what rank *r* sent here, in the shape and dtype of ``like[r]``."""

    def swap(self, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> Work[dict[int, Tensor]]:
        """Send ``xs[r]`` to neighbour *r*, receive ``like[r]`` from neighbour *r*; only neighbours take part."""

    def channel(self, name: str) -> Communicator:
        """A second, independent conversation between the same peers (all open the same lanes in the same order)."""

    def tiers(self, name: str) -> Hierarchy | None:
        """Where workers share hosts, and there are several: the same peers on two levels, as a conversation of its
        own; else None. All call it alike, as `channel`."""

    def now(self) -> float:
        """Seconds on this communicator's clock."""

    def close(self) -> None:
        """Give back what the operating system lent. Never blocks on a peer. May be called twice."""
