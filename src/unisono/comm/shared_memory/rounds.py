"""Rounds: how peers of one host agree, through numbers in shared memory, on what may be read and written.

All operations consist of *rounds*, which each worker counts from 1. ``posted[r] = t``: the input of rank *r* to round
*t* may be read. ``done[r] = t``: rank *r* has read all that it needs of round *t*, and has written its part of the
result. A worker reads the inputs of round *t* only when all ranks have posted *t*.

The numbers are plain memory: this relies on a processor that makes stores visible in program order.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono.comm import header_record as record
from unisono.comm.operation_queue import Blocked, ChannelSet, Operation, OperationQueue, Steps
from unisono.comm.shared_memory.memfd import create, open_of
from unisono.comm.shared_memory.memory_map import RING, SharedMemoryMap
from unisono.comm.shared_memory.peer_processes import PeerProcesses
from unisono.errors import CommunicationError, PeerLost
from unisono.system.backoff import Backoff

HEADER = struct.Struct(f"={record.AGREED}q")
_CHECK_SECONDS = 0.002
_YIELDS = 40
_BACKOFF = Backoff(first_seconds=20e-6, factor=1.15, longest_seconds=200e-6)
_UNKNOWN_RANKS = 1 << 62


@dataclass
class HostResources:
    """What the channels of one communicator share on a host.

    Attributes:
        store: the store of the rendezvous, kept open because slower peers may still read from it.
        peers: the processes of the peers, which are watched.
        first_pid: the number of worker 0's process.
        words: the flags and headers of the first channel, where lost ranks are marked for all channels.
        checked_at: when the peers were last checked.
    """

    store: c10d.Store | None
    peers: PeerProcesses
    first_pid: int
    words: memoryview
    checked_at: float = 0.0


class RoundQueue(OperationQueue):
    """A queue of operations that consist of rounds; the only code that reads and writes numbers in shared memory.

    Args:
        memory: memory that all peers map, with the layout of `SharedMemoryMap`, and zeroed at first.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory: Tensor,
        resources: HostResources,
        timeout_seconds: float,
        channels: ChannelSet,
    ) -> None:
        super().__init__(channels, timeout_seconds)
        self.rank, self.size = rank, size
        self._memory_map, self._resources, self._memory = SharedMemoryMap(size), resources, memory
        self._words = self._memory_map.words(memory)
        self._bytes = self._words.cast("B")
        self._posted, self._done = self._memory_map.posted, self._memory_map.done
        self._round = 0
        self._sequence = 0

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _header(
        self, verb: str, numel: int = -1, dtype: torch.dtype | None = None, root: int = -1, offset: int = -1,
        to: torch.dtype | None = None,
    ) -> bytes:  # fmt: skip
        return HEADER.pack(*record.agreed_part(verb, self._next_sequence(), numel, dtype, root, offset, to))

    def _reached(self, offsets: tuple[int, ...], number: int) -> bool:
        words = self._words
        for offset in offsets:  # noqa: SIM110 (a generator would double the cost of the hottest line)
            if words[offset] < number:
                return False
        return True

    def _until(self, offsets: tuple[int, ...], number: int, released: bool) -> Steps[None]:
        """Blocks until every rank's word at `offsets` has reached the round `number`."""
        if not self._reached(offsets, number):
            blocked = Blocked(released, (offsets, number))
            yield blocked
            while not self._reached(offsets, number):
                yield blocked
        self._progress += 1

    def _until_posted(self, number: int, released: bool) -> Steps[None]:
        """Blocks until all ranks have posted round `number`, and this worker is done with all earlier rounds.

        The second condition is needed: this worker may find that round *t* is not posted, and then, when it checks the
        next operation, that round *t + 1* is. To enter *t + 1* would set ``done`` for both, although *t* is not read.
        """
        own = self._done[self.rank]
        while not (self._words[own] == number - 1 and self._reached(self._posted, number)):
            yield Blocked(released, (self._posted, number))
        self._progress += 1

    def _post(self, number: int, header: bytes = b"", more: Sequence[int] = ()) -> None:
        """Post round `number`: write first the header, then the number that makes it readable."""
        start = self._memory_map.slot(self.rank, number)
        if header:
            self._bytes[start * 8 : start * 8 + len(header)] = header
        for offset, value in enumerate(more, start + record.AGREED):
            self._words[offset] = value
        self._round = number
        self._words[self._posted[self.rank]] = number
        self._progress += 1

    def _finish(self, number: int) -> None:
        self._words[self._done[self.rank]] = number
        self._progress += 1

    def _check(self, number: int, header: bytes) -> None:
        """Raises `MessageMismatch` unless all headers of round `number` begin with `header`."""
        for rank in range(self.size):
            start = self._memory_map.slot(rank, number) * 8
            if self._bytes[start : start + len(header)] != header:
                record.check_agreed([self._record(other, number)[: record.AGREED] for other in range(self.size)])

    def _record(self, rank: int, number: int) -> list[int]:
        start = self._memory_map.slot(rank, number)
        return self._words[start : start + record.length(self.size)].tolist()

    def _map_memory(self, verb: str, header: bytes, nbytes: int) -> Steps[tuple[Tensor | None, str]]:
        """Memory that all peers map, or None and the reason why one of them could not map it.

        There are two rounds, so that every worker knows whether all have mapped the memory.

        Raises:
            PeerLost: worker 0 has exited, or has failed and closed the file, whose number another file may have by now.
        """
        number, memory, failure = 0, None, 0
        if self.rank == 0:
            try:
                number = create(nbytes) + 1
            except OSError as error:
                failure = error.errno or -1
        try:
            first, second = self._round + 1, self._round + 2
            yield from self._until(self._done, second - RING, released=False)
            self._post(first, header, [number])
            yield from self._until_posted(first, released=False)
            self._check(first, header)
            file_number = self._record(0, first)[record.AGREED]
            if file_number:
                self._check_first_open(verb)
                try:
                    memory = open_of(self._resources.first_pid, file_number - 1, nbytes)
                except FileNotFoundError as error:  # worker 0 closes the file when all ranks are done, or by exiting
                    self._check_first_open(verb)
                    raise PeerLost([0], verb, "its process is gone") from error
                except OSError as error:
                    self._check_first_open(verb)
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

    # Waiting and failures.

    def _pause(self, attempt: int, operation: Operation[Any]) -> None:
        """Yield the processor to peers at first; sleep if that has not helped."""
        for channel in self._siblings():
            channel.advance()
        if attempt < _YIELDS:
            os.sched_yield()
        else:
            time.sleep(_BACKOFF.seconds(attempt - _YIELDS))

    def _behind(self, operation: Operation[Any]) -> set[int]:
        assert operation.blocked is not None
        offsets, number = operation.blocked.on
        return {rank for rank, offset in enumerate(offsets) if self._words[offset] < number}

    def _missing(self, operation: Operation[Any]) -> tuple[int, ...]:
        return tuple(sorted(self._behind(operation) - {self.rank})) if operation.blocked else ()

    def _lost(self, now: float, operation: Operation[Any]) -> PeerLost | None:
        if now - self._resources.checked_at < _CHECK_SECONDS:
            return None
        self._resources.checked_at = now
        if error := self._lost_to_others(operation.verb):
            return error
        # A peer that has exited after it finished its part is not missing.
        behind = self._behind(operation)
        if exited := self._resources.peers.lost() & behind:
            return PeerLost(exited, operation.verb, "its process is gone")
        if closed := {rank for rank in behind if self._words[self._memory_map.closed[rank]]}:
            return PeerLost(closed, operation.verb, "it has closed its end")
        return None

    def _lost_to_others(self, verb: str) -> PeerLost | None:
        """The error if another worker has marked ranks as lost."""
        marked = self._resources.words[SharedMemoryMap.broken]
        ranks = [rank for rank in range(self.size) if marked >> rank & 1]
        return PeerLost(ranks, verb, "another worker found it lost") if marked else None

    def _check_first_open(self, verb: str) -> None:
        """Raises `PeerLost` if worker 0 has failed or closed its end, and with it the files that peers open."""
        if error := self._lost_to_others(verb):
            raise error
        if self._words[self._memory_map.closed[0]]:
            raise PeerLost([0], verb, "it has closed its end")

    def _overdue(self, operation: Operation[Any]) -> PeerLost:
        detail = f"no answer within the deadline of {self._timeout_seconds:g} s"
        return PeerLost(self._behind(operation), operation.verb, detail)

    def _fail(self, error: CommunicationError) -> None:
        self._notify_peers(error)  # before files are closed, so that a peer that cannot open one sees the reason
        super()._fail(error)

    def _notify_peers(self, error: CommunicationError) -> None:
        if isinstance(error, PeerLost):
            self._resources.words[SharedMemoryMap.broken] |= (
                sum(1 << rank for rank in error.ranks if rank < 62) | _UNKNOWN_RANKS
            )

    def _release(self) -> None:
        """Close this end. The memory is unmapped with the last tensor that uses it."""
        if not self._words:
            return
        self._words[self._memory_map.closed[self.rank]] = 1
        self._end()
        self._memory, self._words, self._bytes = torch.empty(0), memoryview(b""), memoryview(b"")
