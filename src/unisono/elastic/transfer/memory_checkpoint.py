"""Keeps memory checkpoints of each rank's shard on its buddy, in case the rank is lost.

Each rank holds its own shard, and the shard of the rank whose buddy it is. It holds both shards of two steps: of one
step whose shards are complete on all ranks, and of one whose shards are in flight. So after a loss there is one step
for which all surviving ranks hold the shards that they should hold. `transfer_tensors` sends the shards of that step to
the ranks that need them.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.fingerprint import checksum
from unisono.checkpoint.ownership import ShardMap, decode_shards, encode_shards
from unisono.comm import Communicator, Work
from unisono.comm.text import gather_text, gather_text_steps
from unisono.elastic.transfer.buddies import buddies
from unisono.elastic.transfer.flat_buffer import image_bytes, read_image, reuse_or_allocate, write_image
from unisono.elastic.transfer.local_tensors import LocalTensors

ROUND_BYTES = 4 << 20
LOG = logging.getLogger("unisono")
_Sending = Generator[Work[Any], Any, None]


@dataclass(frozen=True)
class MemoryCheckpoint:
    """The shard of one rank after one step.

    Args:
        owner: the rank to which the shard belongs, in the view in which the memory checkpoint was taken.
        held: the tensors of the shard; overwritten when the second next state is offered.
        meta: numbers and texts that belong to the shard.
    """

    owner: int
    held: LocalTensors
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class _CopySlots:
    """The two memory checkpoints of one step on this rank, and their buffers."""

    kept: tuple[MemoryCheckpoint, MemoryCheckpoint]
    images: tuple[Tensor, Tensor]


class MemoryCheckpoints:
    """The memory checkpoints on one rank.

    Collective: all ranks construct it alike, and offer their states after the same steps. A thread sends and receives
    in the background, or `poll` does.

    Args:
        channel: a channel for these messages only, with at least two ranks.
        hosts: the host of each rank; see `buddies`.
        background: whether a thread sends and receives; else `poll` does.
        round_bytes: how many bytes a rank sends in one round.

    Attributes:
        buddy: the rank that holds this rank's checkpoint.
        owner: the rank whose checkpoint this rank holds.
    """

    def __init__(
        self, channel: Communicator, hosts: Sequence[str], *, background: bool = True, round_bytes: int = ROUND_BYTES
    ) -> None:
        self._channel, self._background, self._round_bytes = channel, background, round_bytes
        chosen = buddies(hosts)
        self.buddy, self.owner = chosen[channel.rank], chosen.index(channel.rank)
        self._lock = threading.Lock()
        self._states: dict[int, _CopySlots] = {}
        self._spare: list[tuple[Tensor, Tensor]] = []
        self._sending: _Sending | None = None
        self._work: Work[Any] | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def ready(self) -> bool:
        """Whether nothing is in flight, so that the next `offer` need not wait."""
        return self._sending is None

    def offer(self, step: int, held: LocalTensors, meta: Mapping[str, Any] | None = None) -> None:
        """Collective: store the state after `step` on this rank and on its buddy.

        The state is copied before `offer` returns. If the previous state is still in flight, `offer` first waits for
        it; if all ranks were `ready`, none waits.

        Args:
            meta: numbers and texts that belong to the tensors, as JSON values.

        Raises:
            PeerLost: a worker was lost meanwhile.
        """
        self._finish()
        image, other = self._spare.pop() if self._spare else (None, None)
        mine = reuse_or_allocate(image_bytes(held.shards), image)
        write_image(held, mine)
        own = MemoryCheckpoint(self._channel.rank, read_image(held.shards, mine), dict(meta or {}))
        self._sending, self._work = self._send(step, own, mine, other), None
        if self._background:
            self._thread = threading.Thread(target=self._drain, name="copies", daemon=True)
            self._thread.start()

    def poll(self) -> bool:
        """Continue sending and receiving, without waiting. Returns whether nothing is in flight.

        Raises:
            PeerLost: a worker was lost.
        """
        if self._thread is not None:
            if not self._thread.is_alive():
                self._finish()
            return self.ready
        while self._sending is not None and (self._work is None or self._work.poll()):
            self._advance()
        return self.ready

    def steps(self) -> list[int]:
        """The steps of which this rank has both checkpoints, its own and the owner's."""
        with self._lock:
            return sorted(self._states)

    def at(self, step: int) -> tuple[MemoryCheckpoint, MemoryCheckpoint]:
        """The checkpoints of `step`: this rank's own, and the owner's."""
        with self._lock:
            return self._states[step].kept

    def close(self) -> None:
        """End the thread; the checkpoints remain. May be called twice.

        The channel must be closed or aborted before this call, unless nothing is in flight.
        """
        if self._thread is not None:
            self._thread.join()
        self._sending = self._work = self._thread = None

    def _finish(self) -> None:
        """Wait until nothing is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        while self._sending is not None:
            self._advance()

    def _drain(self) -> None:
        try:
            while self._sending is not None:
                self._advance()
        except BaseException as error:  # raised by the next call that waits
            self._error = error

    def _advance(self) -> None:
        """Wait for the current operation and start the next."""
        assert self._sending is not None
        try:
            self._work = self._sending.send(None if self._work is None else self._work.wait())
        except StopIteration:
            self._sending = self._work = None

    def _send(self, step: int, own: MemoryCheckpoint, mine: Tensor, other: Tensor | None) -> _Sending:
        """Send this rank's state to its buddy and receive the owner's state, with one operation per iteration."""
        channel, owner = self._channel, self.owner
        texts = yield from gather_text_steps(channel, json.dumps([encode_shards(own.held.shards), own.meta]))
        holdings, metas = zip(*map(_decode, texts))
        theirs = reuse_or_allocate(image_bytes(holdings[owner]), other)
        yield from self._exchange(mine, theirs, max(map(image_bytes, holdings)))
        digests = yield channel.gather(_digest(mine))
        sound = torch.equal(digests[owner], _digest(theirs))
        if sound:
            kept = MemoryCheckpoint(owner, read_image(holdings[owner], theirs), metas[owner])
            with self._lock:
                self._states[step] = _CopySlots((own, kept), (mine, theirs))
        everywhere = bool((yield channel.gather(torch.tensor([sound]))).all())
        if not everywhere:
            LOG.warning("a memory checkpoint of step %d arrived with other bytes than were sent: all ranks keep the "
                        "previous memory checkpoints", step)  # fmt: skip
        self._settle(step, everywhere)

    def _exchange(self, mine: Tensor, theirs: Tensor, most_bytes: int) -> _Sending:
        """Send `mine` to the buddy and receive `theirs` from the owner, in the same number of rounds on all ranks."""
        nothing = torch.empty(0, dtype=torch.uint8)
        for begin in range(0, most_bytes, self._round_bytes):
            part = slice(begin, begin + self._round_bytes)
            outgoing, incoming = [nothing] * self._channel.size, [nothing] * self._channel.size
            outgoing[self.buddy] = mine[part].clone()  # `exchange` may overwrite its arguments
            incoming[self.owner] = theirs[part]
            theirs[part] = (yield self._channel.exchange(outgoing, incoming))[self.owner]

    def _settle(self, step: int, everywhere: bool) -> None:
        """Drop the checkpoints of the old step if all ranks have the new ones (`everywhere`), else the new ones."""
        with self._lock:
            for each in [each for each in self._states if (each != step) == everywhere]:
                self._spare = [self._states.pop(each).images]


def newest(comm: Communicator, copies: MemoryCheckpoints | None) -> int | None:
    """Collective: the newest step that is complete on all ranks that have memory checkpoints; None if there is none.

    Ranks that are new in the view pass None.
    """
    steps_of_ranks = [json.loads(text) for text in gather_text(comm, json.dumps(copies.steps() if copies else None))]
    common = (
        set.intersection(*found) if (found := [set(steps) for steps in steps_of_ranks if steps is not None]) else set()
    )
    return max(common, default=None)


def _decode(text: str) -> tuple[ShardMap, dict[str, Any]]:
    match json.loads(text):
        case [str(shards), dict(meta)]:
            return decode_shards(shards), meta
    raise ValueError("not the description of a memory checkpoint")


def _digest(image: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(checksum(image)), dtype=torch.uint8)
