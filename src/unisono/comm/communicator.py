"""The contract of a communicator, through which all collective communication and all reading of the clock goes.

A method *starts* an operation and returns a `Work` at once; `Work.wait` returns the result. No thread is needed: an
operation makes progress whenever it is polled. All peers start the same operations in the same order on a channel.
Every message has a `Header`. Headers are compared before the payload is touched. So a peer that started another
operation causes a `MessageMismatch` that names both sides, never an abort or a wrong sum.
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
    """The description of one operation, which must be equal on all peers.

    For `exchange` and `swap`, whose sizes may differ by pair, `numel` is -1, and sizes are compared pair by pair.

    Args:
        verb: the name of the method.
        sequence: the number of the operation on its channel, from 0.
        numel, dtype: the payload's number of elements, and their dtype.
        root: the rank that a broadcast comes from; -1 for all other methods.
        to: the dtype of a sum's result; empty: the dtype of the payload.
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
    """The collective operations of one process group. Ranks are ``0 .. size-1``.

    A tensor that is passed in belongs to the communicator until `wait` returns. After that its content is undefined,
    unless the method says otherwise. Every `wait` may raise `PeerLost`. Payloads have any floating dtype, int64, int32
    or uint8, and any contiguous shape, also an empty one. Not thread-safe: one thread uses a channel.
    """

    rank: int
    size: int

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this worker has sent so far, on all channels; in shared memory, those that peers read."""

    @property
    def waits_for(self) -> tuple[str, tuple[int, ...]]:
        """The operation that this worker waits for, on any channel, and the ranks that have not started it, as far as
        they are known. Both are empty while this worker does not wait. Any thread may read this."""

    def allocate(self, numel: int, dtype: dtype) -> Tensor:
        """Collective: a zeroed flat tensor, which `sum` takes without copying it."""

    def sum(self, x: Tensor, dtype: dtype | None = None) -> Work[Tensor]:
        """The sum over all peers, added in the order of ranks where the backend can promise an order.

        Additions are in the dtype of `x`; the sum is converted to `dtype` (None: the dtype of `x`) once, after the last
        addition. The result has the shape of `x`. It may be memory shared with peers, or `x` itself, so the caller must
        not write into it. It is valid until this worker starts the next `sum` of the same `x`.
        """

    def gather(self, x: Tensor) -> Work[Tensor]:
        """The `x` of all ranks, with shape ``[size, *x.shape]``; row *r* is from rank *r*. `x` is unchanged."""

    def broadcast(self, x: Tensor, root: int = 0) -> Work[Tensor]:
        """Copy `x` of rank `root` into the `x` of every rank, which is the result."""

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Work[list[Tensor]]:
        """Send ``xs[r]`` to rank *r*; result *r* is what rank *r* sent here, in the shape and dtype of ``like[r]``."""

    def swap(self, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> Work[dict[int, Tensor]]:
        """Send ``xs[r]`` to each neighbour *r*, and receive a tensor of the shape and dtype of ``like[r]`` from it.

        The neighbours are the ranks in `xs`, which are also those in `like`; messages go between neighbours only.
        Result *r* is what rank *r* sent here.
        """

    def channel(self, name: str) -> Communicator:
        """Collective: a duplicate of this communicator; its messages do not wait for messages of other channels."""

    def hierarchy(self, name: str) -> Hierarchy | None:
        """Collective: a duplicate of this communicator on two levels, if there are several hosts with several workers
        each; else None."""

    def wait_without_deadline(self) -> None:
        """From now on, operations on all channels wait for a peer for as long as it is not known to be lost."""

    def now(self) -> float:
        """Seconds on this communicator's clock."""

    def close(self) -> None:
        """Release sockets, memory and processes. Never blocks on a peer. May be called twice."""
