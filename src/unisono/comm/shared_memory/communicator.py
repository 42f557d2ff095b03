"""Peers of one host that talk through memory which all of them map.

All operations are *rounds*, counted from 1 by each worker. ``posted[r] = t`` says: what rank *r* gives to
round *t* is there to be read. ``done[r] = t`` says: rank *r* has read all that it needs of round *t* (and
has written its part of the result). A worker reads what others gave to round *t* only when all have posted
*t*.

These two numbers are enough for the sum of an allocated tensor, where each worker adds up one slice of
everybody's buffer into a result that all read. A worker may write its buffer again when all are done with
*t*: nobody reads it any more. It may still read the result of *t*, although a faster peer is ahead: that
peer writes into the result only when all have posted a later sum of the same tensor, this worker too, and
starting that is what ends the validity.

Everything else goes through mailboxes, two halves for each worker. A half is written again two rounds later,
when all are done with the round that used it; so is a slot of the ring of headers, many rounds later.

The numbers are plain memory: this relies on a processor that shows stores in the order in which they were
made.
"""

from __future__ import annotations

import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono.comm import header_record as record
from unisono.comm.actors.services import ActorHost
from unisono.comm.operation_queue import Blocked, ChannelSet, Operation, OperationQueue, Steps
from unisono.comm.shared_memory.memfd import MemoryUnavailable, create, open_of, pages
from unisono.comm.shared_memory.memory_map import HALF_BYTES, RING, BufferSlice, SharedMemoryMap
from unisono.comm.shared_memory.peer_processes import PeerProcesses
from unisono.errors import CommunicationError, PeerLost
from unisono.system.backoff import Backoff

LOG = logging.getLogger("unisono")
_HEAD = struct.Struct(f"={record.AGREED}q")
_CHECK_SECONDS = 0.002
_YIELDS = 40
_BACKOFF = Backoff(first_seconds=20e-6, factor=1.15, longest_seconds=200e-6)
_UNKNOWN_RANKS = 1 << 62


@dataclass
class Host:
    """What the lanes of one communicator share.

    `peers` are watched; `words` are the first lane's, where it stands who is lost; `store` is kept because
    slower peers may still read what worker 0 serves.
    """

    store: c10d.Store | None
    peers: PeerProcesses
    first_pid: int
    words: memoryview
    checked_at: float = 0.0


class SharedMemory(OperationQueue):
    """Peers of one host. `share_memory` builds it, which first makes sure that all peers can.

    `memory` holds what `SharedMemoryMap` says, zeroed at first, and is mapped by all peers.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory: Tensor,
        host: Host,
        timeout_seconds: float,
        channels: ChannelSet | None = None,
    ) -> None:
        super().__init__(channels or ChannelSet(actor_host=ActorHost(timeout_seconds=timeout_seconds)), timeout_seconds)
        self.rank, self.size = rank, size
        self._board, self._host, self._memory = SharedMemoryMap(size), host, memory
        self._words = self._board.words(memory)
        self._bytes = self._words.cast("B")
        self._posted, self._done = self._board.posted, self._board.done
        self._turn = 0
        self._sequence = 0
        self._allocations: list[Tensor] = []
        self._slices: dict[tuple[int, int, torch.dtype, torch.dtype], BufferSlice] = {}
        self._halves: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}

    # The verbs.

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """As the contract says; where there is no memory to share, private memory, whose sums are copied."""
        nbytes = numel * dtype.itemsize
        stride = pages(nbytes)
        head = self._head("allocate", numel, dtype)
        memory, reason = self._enqueue("allocate", self._map("allocate", head, stride * (self.size + 1))).wait()
        if memory is None:
            if self.rank == 0:
                LOG.warning("no shared memory for a tensor of %d bytes (%s): its sums are copied", nbytes, reason)
            return torch.zeros(numel, dtype=dtype)
        self._allocations.append(memory)
        return memory[self.rank * stride :][:nbytes].view(dtype)

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Operation[Tensor]:
        to = dtype or x.dtype
        part = self._slice_of(x, to)
        head = self._head("sum", x.numel(), x.dtype, place=part.place if part else -1, to=to)
        return self._enqueue(
            "sum", self._sum_in_place(head, x, part) if part else self._sum_by_mail(head, x.detach(), to)
        )

    def gather(self, x: Tensor) -> Operation[Tensor]:
        return self._enqueue("gather", self._gather(self._head("gather", x.numel(), x.dtype), x.detach()))

    def broadcast(self, x: Tensor, root: int = 0) -> Operation[Tensor]:
        record.check_root(root, self.size)
        head = self._head("broadcast", x.numel(), x.dtype, root)
        return self._enqueue("broadcast", self._broadcast(head, x, root))

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Operation[list[Tensor]]:
        def steps() -> Steps[list[Tensor]]:
            arrived = yield from self._between_pairs("exchange", sequence, dict(enumerate(xs)), dict(enumerate(like)))
            return [arrived[rank] for rank in range(self.size)]

        record.check_everybody(xs, like, self.size)
        sequence = self._next()
        return self._enqueue("exchange", steps())

    def swap(self, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> Operation[dict[int, Tensor]]:
        record.check_neighbours(xs, like, self.rank, self.size)
        return self._enqueue("swap", self._between_pairs("swap", self._next(), dict(xs), dict(like)))

    def channel(self, name: str) -> SharedMemory:
        """Raises `MemoryUnavailable`, on all workers, where there is no memory for its mailboxes."""
        head = self._head("lane", place=zlib.crc32(name.encode()))
        memory, reason = self._enqueue("lane", self._map("lane", head, self._board.nbytes)).wait()
        if memory is None:
            raise MemoryUnavailable(f"no shared memory for lane {name!r}: {reason}")
        lane = SharedMemory(self.rank, self.size, memory, self._host, self._timeout_seconds, self._channels)
        lane.name = name
        return lane

    def close(self) -> None:
        first = self._channels.queues[0] is self
        if first:
            self._channels.actor_host.close()
        for lane in list(self._channels.queues) if first else [self]:
            assert isinstance(lane, SharedMemory)
            lane._let_go()
        if first:
            self._host.peers.close()
            self._host.store, self._host.words = None, memoryview(b"")

    def _communicator(self) -> SharedMemory:
        return self

    # Rounds: the only code that touches flags.

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _head(
        self, verb: str, numel: int = -1, dtype: torch.dtype | None = None, root: int = -1, place: int = -1,
        to: torch.dtype | None = None,
    ) -> bytes:  # fmt: skip
        return _HEAD.pack(*record.agreed_part(verb, self._next(), numel, dtype, root, place, to))

    def _reached(self, places: tuple[int, ...], turn: int) -> bool:
        words = self._words
        for place in places:  # noqa: SIM110 (a generator would double the cost of the hottest line)
            if words[place] < turn:
                return False
        return True

    def _until(self, places: tuple[int, ...], turn: int, released: bool) -> Steps[None]:
        """Blocks until every rank's number in `places` has reached `turn`."""
        if not self._reached(places, turn):
            blocked = Blocked(released, (places, turn))
            yield blocked
            while not self._reached(places, turn):
                yield blocked
        self._progress += 1

    def _until_posted(self, turn: int, released: bool) -> Steps[None]:
        """Blocks until all have posted round `turn`, and this worker is done with all rounds before it.

        The second matters: the last peer may post two rounds between a look at the first and a look at the second. To
        go into the second one then would say ``done`` for both, and peers would take the first for read.
        """
        mine = self._done[self.rank]
        while not (self._words[mine] == turn - 1 and self._reached(self._posted, turn)):
            yield Blocked(released, (self._posted, turn))
        self._progress += 1

    def _post(self, turn: int, head: bytes = b"", more: Sequence[int] = ()) -> None:
        """Show what this worker gives to round `turn`: first the header, then the number that says that it
        is there."""
        start = self._board.slot(self.rank, turn)
        if head:
            self._bytes[start * 8 : start * 8 + len(head)] = head
        for offset, number in enumerate(more, start + record.AGREED):
            self._words[offset] = number
        self._turn = turn
        self._words[self._posted[self.rank]] = turn
        self._progress += 1

    def _finish(self, turn: int) -> None:
        self._words[self._done[self.rank]] = turn
        self._progress += 1

    def _check(self, turn: int, head: bytes) -> None:
        """Raises `MessageMismatch` unless all headers of round `turn` begin like `head`."""
        for rank in range(self.size):
            start = self._board.slot(rank, turn) * 8
            if self._bytes[start : start + len(head)] != head:
                record.check_agreed([self._record(other, turn)[: record.AGREED] for other in range(self.size)])

    def _record(self, rank: int, turn: int) -> list[int]:
        start = self._board.slot(rank, turn)
        return self._words[start : start + record.length(self.size)].tolist()

    # What each verb does in its rounds.

    def _sum_in_place(self, head: bytes, x: Tensor, part: BufferSlice) -> Steps[Tensor]:
        turn = self._turn + 1
        yield from self._until(self._done, turn - RING, released=False)
        self._post(turn, head)
        yield from self._until_posted(turn, released=True)
        self._check(turn, head)
        part.add_up()
        self._finish(turn)
        yield from self._until(self._done, turn, released=True)
        self._channels.bytes_sent += part.bytes_read
        return part.result if x.dim() == 1 else part.result.view(x.shape)

    def _mail(
        self,
        head: bytes,
        rounds: int,
        fill: Callable[[int, int], None],
        drain: Callable[[int, int], None],
    ) -> Steps[None]:
        """`rounds` rounds: each calls ``fill(i, turn)``, waits for the others, and calls
        ``drain(i, turn)``."""
        for i in range(rounds):
            turn = self._turn + 1
            yield from self._until(self._done, turn - 2, released=False)
            fill(i, turn)
            self._post(turn, head if i == 0 else b"")
            yield from self._until_posted(turn, released=i == rounds - 1)
            if i == 0:
                self._check(turn, head)
            drain(i, turn)
            self._finish(turn)

    def _sum_by_mail(self, head: bytes, x: Tensor, dtype: torch.dtype) -> Steps[Tensor]:
        """Everybody adds up everybody's mail: one wait, where slices would need two."""
        whole = x.to(torch.float32) if _is_narrow(x.dtype) else x
        flat = whole.reshape(-1)
        halves = self._typed_halves(flat.dtype)
        chunk = HALF_BYTES // flat.element_size()
        chunks = torch.split(flat, chunk) if flat.numel() else (flat,)

        def fill(i: int, turn: int) -> None:
            halves[turn % 2][self.rank][: chunks[i].numel()].copy_(chunks[i])

        def drain(i: int, turn: int) -> None:
            target = chunks[i]
            first, second, *others = [half[: target.numel()] for half in halves[turn % 2]]
            torch.add(first, second, out=target)
            for other in others:
                target.add_(other)

        yield from self._mail(head, len(chunks), fill, drain)
        self._channels.bytes_sent += (self.size - 1) * flat.nbytes
        return flat.view(x.shape).to(x.dtype).to(dtype)

    def _gather(self, head: bytes, x: Tensor) -> Steps[Tensor]:
        rows = torch.empty((self.size, *x.shape), dtype=x.dtype)
        mine, halves = _chunks(x), self._typed_halves(torch.uint8)
        theirs = [_chunks(row) for row in rows]

        def fill(i: int, turn: int) -> None:
            halves[turn % 2][self.rank][: mine[i].numel()].copy_(mine[i])

        def drain(i: int, turn: int) -> None:
            for half, chunks in zip(halves[turn % 2], theirs, strict=True):
                chunks[i].copy_(half[: chunks[i].numel()])

        yield from self._mail(head, len(mine), fill, drain)
        self._channels.bytes_sent += (self.size - 1) * x.nbytes
        return rows

    def _broadcast(self, head: bytes, x: Tensor, root: int) -> Steps[Tensor]:
        whole = x.detach().contiguous()
        chunks, halves = _chunks(whole), self._typed_halves(torch.uint8)

        def fill(i: int, turn: int) -> None:
            if self.rank == root:
                halves[turn % 2][root][: chunks[i].numel()].copy_(chunks[i])

        def drain(i: int, turn: int) -> None:
            if self.rank != root:
                chunks[i].copy_(halves[turn % 2][root][: chunks[i].numel()])

        yield from self._mail(head, len(chunks), fill, drain)
        self._channels.bytes_sent += (self.size - 1) * x.nbytes if self.rank == root else 0
        if not x.is_contiguous():
            x.detach().copy_(whole)
        return x

    def _between_pairs(
        self, verb: str, sequence: int, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]
    ) -> Steps[dict[int, Tensor]]:
        """Each half is cut into one segment for each reader; who has the most to say decides how many rounds
        there are."""
        size, me, segment = self.size, self.rank, self._board.segment_bytes
        head = _HEAD.pack(*record.agreed_part(verb, sequence))
        sends, expects = record.pairs(size, xs), record.pairs(size, like)
        arrived = {rank: torch.empty(x.shape, dtype=x.dtype) for rank, x in like.items()}
        outgoing = {rank: _chunks(x, segment) for rank, x in xs.items() if rank != me}
        incoming = {rank: _chunks(x, segment) for rank, x in arrived.items() if rank != me}
        halves = self._typed_halves(torch.uint8)
        rounds, i = 1, 0
        while i < rounds:
            turn = self._turn + 1
            yield from self._until(self._done, turn - 2, released=False)
            for rank, chunks in outgoing.items():
                if i < len(chunks):
                    halves[turn % 2][me][rank * segment :][: chunks[i].numel()].copy_(chunks[i])
            self._post(turn, *((head, sends + expects) if i == 0 else ()))
            # Nobody knows how many rounds there are before the headers of the first are there.
            yield from self._until_posted(turn, released=0 < i == rounds - 1)
            if i == 0:
                self._check(turn, head)
                records = [self._record(rank, turn) for rank in range(size)]
                said = [one[record.AGREED : record.AGREED + size] for one in records]
                wanted = [one[record.AGREED + size :] for one in records]
                record.check_pairs(sequence, verb, said, wanted)
                rounds = max(1, *(-(-record.pair_bytes(number) // segment) for one in said for number in one))
            for rank, chunks in incoming.items():
                if i < len(chunks):
                    chunks[i].copy_(halves[turn % 2][rank][me * segment :][: chunks[i].numel()])
            self._finish(turn)
            i += 1
        self._channels.bytes_sent += sum(x.nbytes for rank, x in xs.items() if rank != me)
        if me in arrived:
            arrived[me].copy_(xs[me].detach())
        return arrived

    def _map(self, verb: str, head: bytes, nbytes: int) -> Steps[tuple[Tensor | None, str]]:
        """Memory that all peers map, or None and why; two rounds, so that all know whether all have it.

        Raises:
            PeerLost: worker 0 has died, or given up and closed the file: its number may be another file's by now.
        """
        number, memory, failure = 0, None, 0
        if self.rank == 0:
            try:
                number = create(nbytes) + 1
            except OSError as error:
                failure = error.errno or -1
        try:
            first, second = self._turn + 1, self._turn + 2
            yield from self._until(self._done, second - RING, released=False)
            self._post(first, head, [number])
            yield from self._until_posted(first, released=False)
            self._check(first, head)
            number_there = self._record(0, first)[record.AGREED]
            if number_there:
                self._check_open(verb)
                try:
                    memory = open_of(self._host.first_pid, number_there - 1, nbytes)
                except FileNotFoundError as error:  # worker 0 closes it when all are done, or by dying
                    self._check_open(verb)
                    raise PeerLost([0], verb, "its process is gone") from error
                except OSError as error:
                    self._check_open(verb)
                    failure = error.errno or -1
            self._finish(first)
            self._post(second, b"", [failure])
            yield from self._until_posted(second, released=False)
            failures = [self._record(rank, second)[record.AGREED] for rank in range(self.size)]
            self._finish(second)
        finally:
            if number:
                os.close(number - 1)
        for rank, code in enumerate(failures):
            if code:
                return None, f"worker {rank}: {os.strerror(code) if code > 0 else 'cannot be opened'}"
        return memory, ""

    # Where tensors lie.

    def _typed_halves(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Everybody's mailbox half of even and of odd rounds."""
        if dtype not in self._halves:
            even, odd = (
                [self._memory[self._board.half(rank, parity) :][:HALF_BYTES].view(dtype) for rank in range(self.size)]
                for parity in range(2)
            )
            self._halves[dtype] = even, odd
        return self._halves[dtype]

    def _slice_of(self, x: Tensor, dtype: torch.dtype) -> BufferSlice | None:
        """What to add up where `x` lies in allocated memory, and has room for the sum as `dtype`; a part of an
        allocated tensor will do."""
        key = x.data_ptr(), x.numel(), x.dtype, dtype
        found = self._slices.get(key)
        if found is not None or not x.numel() or dtype.itemsize > x.element_size():
            return found
        for index, memory in enumerate(self._allocations):
            stride = memory.numel() // (self.size + 1)
            offset = x.data_ptr() - memory.data_ptr() - self.rank * stride
            if 0 <= offset < stride and x.is_contiguous():
                *buffers, room = (memory[owner * stride + offset :][: x.nbytes] for owner in range(self.size + 1))
                result = room[: x.numel() * dtype.itemsize].view(dtype)
                self._slices[key] = BufferSlice(
                    [b.view(x.dtype) for b in buffers], result, self.rank, (index << 40) + offset
                )
                return self._slices[key]
        return None

    # Waiting, and what may come of it.

    def _pause(self, attempt: int, operation: Operation[Any]) -> None:
        """Give the processor to peers at once; sleep when that has not helped."""
        for lane in self._siblings():
            lane.advance()
        if attempt < _YIELDS:
            os.sched_yield()
        else:
            time.sleep(_BACKOFF.seconds(attempt - _YIELDS))

    def _behind(self, operation: Operation[Any]) -> set[int]:
        assert operation.blocked is not None
        places, turn = operation.blocked.on
        return {rank for rank, place in enumerate(places) if self._words[place] < turn}

    def _missing(self, operation: Operation[Any]) -> tuple[int, ...]:
        return tuple(sorted(self._behind(operation) - {self.rank})) if operation.blocked else ()

    def _lost(self, now: float, operation: Operation[Any]) -> PeerLost | None:
        if now - self._host.checked_at < _CHECK_SECONDS:
            return None
        self._host.checked_at = now
        if broken := self._broken(operation.verb):
            return broken
        # A peer that ended after it had done its part is not missed.
        behind = self._behind(operation)
        if gone := self._host.peers.lost() & behind:
            return PeerLost(gone, operation.verb, "its process is gone")
        if closed := {rank for rank in behind if self._words[self._board.closed[rank]]}:
            return PeerLost(closed, operation.verb, "it has closed its end")
        return None

    def _broken(self, verb: str) -> PeerLost | None:
        """What another worker has found."""
        broken = self._host.words[SharedMemoryMap.broken]
        ranks = [rank for rank in range(self.size) if broken >> rank & 1]
        return PeerLost(ranks, verb, "another worker found it lost") if broken else None

    def _check_open(self, verb: str) -> None:
        """Raises `PeerLost` if worker 0 has given up, or closed its end, and with it the files that peers open."""
        if broken := self._broken(verb):
            raise broken
        if self._words[self._board.closed[0]]:
            raise PeerLost([0], verb, "it has closed its end")

    def _overdue(self, operation: Operation[Any]) -> PeerLost:
        detail = f"silent beyond the deadline of {self._timeout_seconds:g} s"
        return PeerLost(self._behind(operation), operation.verb, detail)

    def _fail(self, error: CommunicationError) -> None:
        self._notify_peers(error)  # before a file is closed: a peer that does not find it any more can see why
        super()._fail(error)

    def _notify_peers(self, error: CommunicationError) -> None:
        if isinstance(error, PeerLost):
            self._host.words[SharedMemoryMap.broken] |= (
                sum(1 << rank for rank in error.ranks if rank < 62) | _UNKNOWN_RANKS
            )

    def _let_go(self) -> None:
        """The memory itself goes when the last tensor that lies in it does."""
        if not self._words:
            return
        self._words[self._board.closed[self.rank]] = 1
        self._end()
        self._allocations, self._slices, self._halves = [], {}, {}
        self._memory, self._words, self._bytes = torch.empty(0), memoryview(b""), memoryview(b"")


def _chunks(x: Tensor, chunk_bytes: int = HALF_BYTES) -> tuple[Tensor, ...]:
    """The bytes of `x` in pieces, one empty piece at least; they share memory with a contiguous `x`."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    return torch.split(flat, chunk_bytes) if flat.numel() else (flat,)


def _is_narrow(dtype: torch.dtype) -> bool:
    """Types of 8 bits that cannot be added on a CPU."""
    return dtype.is_floating_point and dtype.itemsize == 1
