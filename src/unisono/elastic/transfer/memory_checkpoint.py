"""In-memory checkpoints on a buddy rank, for shards that are lost with a worker.

Each rank holds two versions of its own shard and two of its buddy's, of the same two steps: one that is complete on all
ranks, and one in flight. So after a loss there is one step for which all surviving ranks hold the shards that they
should hold. `transfer_tensors` sends the shards of that step to the ranks that need them.
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
from xxhash import xxh3_128_digest

from unisono.checkpoint.fingerprint import raw_bytes
from unisono.checkpoint.ownership import ShardMap, decode_shards, encode_shards
from unisono.comm import Communicator, Work
from unisono.comm.text import gather_text, gather_text_steps
from unisono.elastic.transfer.buddies import buddies
from unisono.elastic.transfer.flat_buffer import bytes_like, image_bytes, read_image, write_image
from unisono.elastic.transfer.local_tensors import LocalTensors

ROUND_BYTES = 4 << 20
LOG = logging.getLogger("unisono")
_Passing = Generator[Work[Any], Any, None]


@dataclass(frozen=True)
class MemoryCheckpoint:
    """One worker's state of one step.

    Args:
        owner: whose it is, by the rank that it had then.
        held: its tensors; they change when the second next state is offered.
        meta: what it gave beside them.
    """

    owner: int
    held: LocalTensors
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class _CopySlots:
    """Both states of one step, and the memory in which they lie."""

    kept: tuple[MemoryCheckpoint, MemoryCheckpoint]
    images: tuple[Tensor, Tensor]


class MemoryCheckpoints:
    """One worker's hand in them.

    All workers make it alike, and offer their states after the same steps. What is under way is moved by a thread, or
    by `poll`.

    Args:
        lane: a conversation for this alone, of two workers or more.
        hosts: where each worker is: a copy lies on another host where there is one.
        background: whether a thread moves what is under way; else `poll` does.
        round_bytes: what a worker sends at a time.
    """

    def __init__(
        self, lane: Communicator, hosts: Sequence[str], *, background: bool = True, round_bytes: int = ROUND_BYTES
    ) -> None:
        self._lane, self._background, self._round_bytes = lane, background, round_bytes
        chosen = buddies(hosts)
        self.buddy, self.owner = chosen[lane.rank], chosen.index(lane.rank)
        self._lock = threading.Lock()
        self._states: dict[int, _CopySlots] = {}
        self._spare: list[tuple[Tensor, Tensor]] = []
        self._passing: _Passing | None = None
        self._work: Work[Any] | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def ready(self) -> bool:
        """Whether the state that was offered last has arrived everywhere: the next one need not wait for it."""
        return self._passing is None

    def offer(self, step: int, held: LocalTensors, meta: Mapping[str, Any] | None = None) -> None:
        """Keep the state after `step`, here and at the keeper; all workers do so after the same step.

        It is copied before this returns. Where the former one is still under way, that is waited for first; if all
        were `ready`, nobody waits.

        Args:
            meta: numbers and words beside the tensors, as JSON carries them.

        Raises:
            PeerLost: a worker was lost meanwhile.
        """
        self._finish()
        image, other = self._spare.pop() if self._spare else (None, None)
        mine = bytes_like(image_bytes(held.shards), image)
        write_image(held, mine)
        own = MemoryCheckpoint(self._lane.rank, read_image(held.shards, mine), dict(meta or {}))
        self._passing, self._work = self._pass(step, own, mine, other), None
        if self._background:
            self._thread = threading.Thread(target=self._drain, name="copies", daemon=True)
            self._thread.start()

    def poll(self) -> bool:
        """Move what is under way, without waiting for anybody; True where nothing is.

        Raises:
            PeerLost: a worker was lost.
        """
        if self._thread is not None:
            if not self._thread.is_alive():
                self._finish()
            return self.ready
        while self._passing is not None and (self._work is None or self._work.poll()):
            self._go_on()
        return self.ready

    def steps(self) -> list[int]:
        """Those of which this worker has all that it should, its own state and its ward's."""
        with self._lock:
            return sorted(self._states)

    def at(self, step: int) -> tuple[MemoryCheckpoint, MemoryCheckpoint]:
        """What is here of that step: this worker's own state, and its ward's."""
        with self._lock:
            return self._states[step].kept

    def close(self) -> None:
        """What is here stays; the lane has been closed or broken off, or nothing is under way. May be called twice."""
        if self._thread is not None:
            self._thread.join()
        self._passing = self._work = self._thread = None

    def _finish(self) -> None:
        """Wait for what is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        while self._passing is not None:
            self._go_on()

    def _drain(self) -> None:
        try:
            while self._passing is not None:
                self._go_on()
        except BaseException as error:  # it is raised where somebody looks
            self._error = error

    def _go_on(self) -> None:
        """Wait for the work in hand and begin the next."""
        assert self._passing is not None
        try:
            self._work = self._passing.send(None if self._work is None else self._work.wait())
        except StopIteration:
            self._passing = self._work = None

    def _pass(self, step: int, own: MemoryCheckpoint, mine: Tensor, other: Tensor | None) -> _Passing:
        """Everybody's state to their keeper."""
        lane, owner = self._lane, self.owner
        said = yield from gather_text_steps(lane, json.dumps([encode_shards(own.held.shards), own.meta]))
        holdings, metas = zip(*map(_decode, said))
        theirs = bytes_like(image_bytes(holdings[owner]), other)
        yield from self._carry(mine, theirs, max(map(image_bytes, holdings)))
        digests = yield lane.gather(_digest(mine))
        sound = torch.equal(digests[owner], _digest(theirs))
        if sound:
            kept = MemoryCheckpoint(owner, read_image(holdings[owner], theirs), metas[owner])
            with self._lock:
                self._states[step] = _CopySlots((own, kept), (mine, theirs))
        everywhere = bool((yield lane.gather(torch.tensor([sound]))).all())
        if not everywhere:
            LOG.warning("a copy of the state after step %d came as other bytes: the former ones are kept", step)
        self._settle(step, everywhere)

    def _carry(self, mine: Tensor, theirs: Tensor, most_bytes: int) -> _Passing:
        """`mine` to the keeper and `theirs` from the ward, in rounds of which all make as many."""
        nothing = torch.empty(0, dtype=torch.uint8)
        for begin in range(0, most_bytes, self._round_bytes):
            part = slice(begin, begin + self._round_bytes)
            leaving, coming = [nothing] * self._lane.size, [nothing] * self._lane.size
            leaving[self.buddy] = mine[part].clone()  # what is handed in may be written to
            coming[self.owner] = theirs[part]
            theirs[part] = (yield self._lane.exchange(leaving, coming))[self.owner]

    def _settle(self, step: int, everywhere: bool) -> None:
        """Of two states one is needed no more: the former, where all have the new one; else the new one."""
        with self._lock:
            for each in [each for each in self._states if (each != step) == everywhere]:
                self._spare = [self._states.pop(each).images]


def newest(comm: Communicator, copies: MemoryCheckpoints | None) -> int | None:
    """The latest step of which everybody who has kept copies has all that they should; None where there is none. All
    call it alike, those who are new with None."""
    told = [json.loads(text) for text in gather_text(comm, json.dumps(copies.steps() if copies else None))]
    common = set.intersection(*found) if (found := [set(steps) for steps in told if steps is not None]) else set()
    return max(common, default=None)


def _decode(text: str) -> tuple[ShardMap, dict[str, Any]]:
    match json.loads(text):
        case [str(held), dict(meta)]:
            return decode_shards(held), meta
    raise ValueError("not what a worker says of its state")


def _digest(image: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(xxh3_128_digest(raw_bytes(image))), dtype=torch.uint8)
