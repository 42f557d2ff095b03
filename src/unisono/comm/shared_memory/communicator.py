"""A communicator of workers of one host, through memory that all of them map.

`unisono.comm.shared_memory.rounds` describes when memory may be read and written. Its two numbers per rank are enough
for the sum of an allocated tensor, in which each worker adds one slice of all buffers into a result that all read. A
worker may write its buffer again when all ranks are done with the sum's round. The result stays readable although a
peer may be ahead: the peer writes into it only when all ranks, this worker too, have posted a later sum of the same
tensor, and starting that sum ends the validity of the result. Where each worker wants the result in memory of its own,
a few workers add up whole buffers instead of slices: that reads less than a slice and then the result.

All other operations use mailboxes, of two halves per worker. A half is written again two rounds later, when all ranks
are done with the round that used it. A slot of the ring of headers is also written again once all ranks are done with
its round, but many rounds later.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from unisono.comm import header_record as record
from unisono.comm.operation_queue import ChannelSet, Operation, Steps
from unisono.comm.shared_memory.memfd import MemoryUnavailable, pages
from unisono.comm.shared_memory.memory_map import HALF_BYTES, RING, BufferSlice
from unisono.comm.shared_memory.rounds import HEADER, HostResources, RoundQueue

LOG = logging.getLogger("unisono")


class SharedMemory(RoundQueue):
    """A communicator of workers of one host; `connect.share_memory` builds it once all of them can share memory."""

    def __init__(
        self,
        rank: int,
        size: int,
        memory: Tensor,
        resources: HostResources,
        timeout_seconds: float,
        channels: ChannelSet,
    ) -> None:
        super().__init__(rank, size, memory, resources, timeout_seconds, channels)
        self._allocations: list[Tensor] = []
        self._slices: dict[tuple[int, int, torch.dtype, torch.dtype], BufferSlice] = {}
        self._halves: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Communicator.allocate`. Without memory to share, the tensor is private, and its sums are copied."""
        nbytes = numel * dtype.itemsize
        stride = pages(nbytes)
        header = self._header("allocate", numel, dtype)
        memory, reason = self._enqueue(
            "allocate", self._map_memory("allocate", header, stride * (self.size + 1))
        ).wait()
        if memory is None:
            if self.rank == 0:
                LOG.warning("no shared memory for a tensor of %d bytes (%s): its sums are copied", nbytes, reason)
            return torch.zeros(numel, dtype=dtype)
        self._allocations.append(memory)
        return memory[self.rank * stride :][:nbytes].view(dtype)

    def sum(self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Operation[Tensor]:
        to = dtype or x.dtype
        part = self._slice_of(x, to)
        header = self._header("sum", x.numel(), x.dtype, offset=part.place(out) if part else -1, to=to)
        steps = self._sum_in_place(header, x, part, out) if part else self._sum_by_mail(header, x.detach(), to, out)
        return self._enqueue("sum", steps)

    def gather(self, x: Tensor) -> Operation[Tensor]:
        return self._enqueue("gather", self._gather(self._header("gather", x.numel(), x.dtype), x.detach()))

    def broadcast(self, x: Tensor, root: int = 0) -> Operation[Tensor]:
        record.check_root(root, self.size)
        header = self._header("broadcast", x.numel(), x.dtype, root)
        return self._enqueue("broadcast", self._broadcast(header, x, root))

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Operation[list[Tensor]]:
        def steps() -> Steps[list[Tensor]]:
            arrived = yield from self._between_pairs("exchange", sequence, dict(enumerate(xs)), dict(enumerate(like)))
            return [arrived[rank] for rank in range(self.size)]

        record.check_all_ranks(xs, like, self.size)
        sequence = self._next_sequence()
        return self._enqueue("exchange", steps())

    def swap(self, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> Operation[dict[int, Tensor]]:
        record.check_neighbours(xs, like, self.rank, self.size)
        return self._enqueue("swap", self._between_pairs("swap", self._next_sequence(), dict(xs), dict(like)))

    def channel(self, name: str) -> SharedMemory:
        """See `Communicator.channel`. Raises `MemoryUnavailable` on all workers if mailboxes cannot be allocated."""
        header = self._header("channel", offset=zlib.crc32(name.encode()))
        memory, reason = self._enqueue("channel", self._map_memory("channel", header, self._memory_map.nbytes)).wait()
        if memory is None:
            raise MemoryUnavailable(f"no shared memory for channel {name!r}: {reason}")
        channel = SharedMemory(self.rank, self.size, memory, self._resources, self._timeout_seconds, self._channels)
        channel.name = name
        return channel

    def close(self) -> None:
        is_first = self._channels.queues[0] is self
        if is_first:
            self._channels.actor_host.close()
        for channel in list(self._channels.queues) if is_first else [self]:
            assert isinstance(channel, SharedMemory)
            channel._release()
        if is_first:
            self._resources.peers.close()
            self._resources.store, self._resources.words = None, memoryview(b"")

    def _communicator(self) -> SharedMemory:
        return self

    # The rounds of each operation.

    def _sum_in_place(self, header: bytes, x: Tensor, part: BufferSlice, out: Tensor | None) -> Steps[Tensor]:
        number = self._round + 1
        yield from self._until(self._done, number - RING, released=False)
        self._post(number, header)
        yield from self._until_posted(number, released=True)
        self._check(number, header)
        part.add_up(out)
        self._finish(number)
        yield from self._until(self._done, number, released=True)
        self._channels.bytes_sent += part.bytes_read(out)
        result = part.result(out)
        return result if x.dim() == 1 else result.view(x.shape)

    def _in_mail_rounds(
        self,
        header: bytes,
        rounds: int,
        fill: Callable[[int, int], None],
        drain: Callable[[int, int], None],
    ) -> Steps[None]:
        """Rounds ``0 .. rounds-1``: each calls ``fill(i, number)``, waits for all ranks, calls ``drain(i, number)``."""
        for i in range(rounds):
            number = self._round + 1
            yield from self._until(self._done, number - 2, released=False)
            fill(i, number)
            self._post(number, header if i == 0 else b"")
            yield from self._until_posted(number, released=i == rounds - 1)
            if i == 0:
                self._check(number, header)
            drain(i, number)
            self._finish(number)

    def _sum_by_mail(self, header: bytes, x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Steps[Tensor]:
        """Sum through mailboxes: every rank adds all inputs, with one wait; to add one slice each would take two."""
        whole = x.to(torch.float32) if _is_narrow(x.dtype) else x
        flat = whole.reshape(-1)
        halves = self._typed_halves(flat.dtype)
        chunk = HALF_BYTES // flat.element_size()
        chunks = torch.split(flat, chunk) if flat.numel() else (flat,)

        def fill(i: int, number: int) -> None:
            halves[number % 2][self.rank][: chunks[i].numel()].copy_(chunks[i])

        def drain(i: int, number: int) -> None:
            target = chunks[i]
            first, second, *others = [half[: target.numel()] for half in halves[number % 2]]
            torch.add(first, second, out=target)
            for other in others:
                target.add_(other)

        yield from self._in_mail_rounds(header, len(chunks), fill, drain)
        self._channels.bytes_sent += (self.size - 1) * flat.nbytes
        summed = flat.to(x.dtype)
        return (summed.to(dtype) if out is None else out.copy_(summed)).view(x.shape)

    def _gather(self, header: bytes, x: Tensor) -> Steps[Tensor]:
        rows = torch.empty((self.size, *x.shape), dtype=x.dtype)
        own, halves = _chunks(x), self._typed_halves(torch.uint8)
        received = [_chunks(row) for row in rows]

        def fill(i: int, number: int) -> None:
            halves[number % 2][self.rank][: own[i].numel()].copy_(own[i])

        def drain(i: int, number: int) -> None:
            for half, chunks in zip(halves[number % 2], received, strict=True):
                chunks[i].copy_(half[: chunks[i].numel()])

        yield from self._in_mail_rounds(header, len(own), fill, drain)
        self._channels.bytes_sent += (self.size - 1) * x.nbytes
        return rows

    def _broadcast(self, header: bytes, x: Tensor, root: int) -> Steps[Tensor]:
        whole = x.detach().contiguous()
        chunks, halves = _chunks(whole), self._typed_halves(torch.uint8)

        def fill(i: int, number: int) -> None:
            if self.rank == root:
                halves[number % 2][root][: chunks[i].numel()].copy_(chunks[i])

        def drain(i: int, number: int) -> None:
            if self.rank != root:
                chunks[i].copy_(halves[number % 2][root][: chunks[i].numel()])

        yield from self._in_mail_rounds(header, len(chunks), fill, drain)
        self._channels.bytes_sent += (self.size - 1) * x.nbytes if self.rank == root else 0
        if not x.is_contiguous():
            x.detach().copy_(whole)
        return x

    def _between_pairs(
        self, verb: str, sequence: int, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]
    ) -> Steps[dict[int, Tensor]]:
        """The rounds of `exchange` and `swap`: a half has a segment for each reader, so large messages take several."""
        size, me, segment = self.size, self.rank, self._memory_map.segment_bytes
        header = HEADER.pack(*record.agreed_part(verb, sequence))
        sends, expects = record.pairs(size, xs), record.pairs(size, like)
        arrived = {rank: torch.empty(x.shape, dtype=x.dtype) for rank, x in like.items()}
        outgoing = {rank: _chunks(x, segment) for rank, x in xs.items() if rank != me}
        incoming = {rank: _chunks(x, segment) for rank, x in arrived.items() if rank != me}
        halves = self._typed_halves(torch.uint8)
        rounds, i = 1, 0
        while i < rounds:
            number = self._round + 1
            yield from self._until(self._done, number - 2, released=False)
            for rank, chunks in outgoing.items():
                if i < len(chunks):
                    halves[number % 2][me][rank * segment :][: chunks[i].numel()].copy_(chunks[i])
            self._post(number, *((header, sends + expects) if i == 0 else ()))
            # The number of rounds is known only when the headers of the first round have arrived.
            yield from self._until_posted(number, released=0 < i == rounds - 1)
            if i == 0:
                self._check(number, header)
                records = [self._record(rank, number) for rank in range(size)]
                sent_pairs = [row[record.AGREED : record.AGREED + size] for row in records]
                expected_pairs = [row[record.AGREED + size :] for row in records]
                record.check_pairs(sequence, verb, sent_pairs, expected_pairs)
                rounds = max(1, *(-(-record.pair_bytes(pair) // segment) for row in sent_pairs for pair in row))
            for rank, chunks in incoming.items():
                if i < len(chunks):
                    chunks[i].copy_(halves[number % 2][rank][me * segment :][: chunks[i].numel()])
            self._finish(number)
            i += 1
        self._channels.bytes_sent += sum(x.nbytes for rank, x in xs.items() if rank != me)
        if me in arrived:
            arrived[me].copy_(xs[me].detach())
        return arrived

    # The memory of tensors.

    def _typed_halves(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """The mailbox halves of all ranks, of even and of odd rounds."""
        if dtype not in self._halves:
            even, odd = (
                [
                    self._memory[self._memory_map.half(rank, parity) :][:HALF_BYTES].view(dtype)
                    for rank in range(self.size)
                ]
                for parity in range(2)
            )
            self._halves[dtype] = even, odd
        return self._halves[dtype]

    def _slice_of(self, x: Tensor, dtype: torch.dtype) -> BufferSlice | None:
        """This worker's slice of the sum of `x`, if `x` is (part of) an allocated tensor with room for `dtype`."""
        key = x.data_ptr(), x.numel(), x.dtype, dtype
        known = self._slices.get(key)
        if known is not None or not x.numel() or dtype.itemsize > x.element_size():
            return known
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

    def _release(self) -> None:
        super()._release()
        self._allocations, self._slices, self._halves = [], {}, {}


def _chunks(x: Tensor, chunk_bytes: int = HALF_BYTES) -> tuple[Tensor, ...]:
    """The bytes of `x` in one or more chunks, which share memory with `x` if it is contiguous.

    If `x` is empty, there is one empty chunk.
    """
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    return torch.split(flat, chunk_bytes) if flat.numel() else (flat,)


def _is_narrow(dtype: torch.dtype) -> bool:
    """Whether `dtype` is a floating dtype of 8 bits; a CPU cannot add tensors of such a dtype."""
    return dtype.is_floating_point and dtype.itemsize == 1
