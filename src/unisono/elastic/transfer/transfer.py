"""State in memory, passed on from several holders at once, in bounded steps, and verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from unisono.checkpoint.fingerprint import raw_bytes
from unisono.checkpoint.ownership import ShardMap
from unisono.comm import Communicator
from unisono.comm.text import gather_text
from unisono.elastic.transfer.local_tensors import Inventory, LocalTensors
from unisono.elastic.transfer.transfer_plan import Move, plan, rounds
from unisono.errors import StateDamaged

ROUND_BYTES = 16 << 20
"""What one worker gives in one round."""
_ALIGNMENT_BYTES = 16  # any dtype may begin there
_DIGEST_BYTES = 16


def transfer_tensors(
    comm: Communicator,
    here: Sequence[LocalTensors],
    wanted: ShardMap,
    hosts: Sequence[str] = (),
    round_bytes: int = ROUND_BYTES,
) -> dict[str, Tensor]:
    """What this worker wants, by name, in CPU memory of its own; all call it alike, with what each has and wants.

    All tell all what they have; everybody finds the same plan; then several holders give at once. Whoever gives sends
    the xxh3 of each box along.

    Args:
        here: what this worker has; it may be more than others want, or nothing.
        wanted: what it wants; it may be nothing.
        hosts: where each worker is: who is near is asked first.
        round_bytes: bounds the memory that all this takes, beside the result: what a worker sends at a time, and each
            receives from every other.

    Raises:
        StateMissing: on all workers; names what nobody has.
        StateDamaged: on all workers; names a tensor and its holder.
        PeerLost: a worker was lost meanwhile.
    """
    texts = gather_text(comm, Inventory([each.shards for each in here], wanted).encode())
    read = {text: Inventory.decode(text) for text in set(texts)}  # equals say the same
    everybody = [read[text] for text in texts]
    moves = plan([said.here for said in everybody], [said.wants for said in everybody], hosts)
    found = {name: torch.empty(piece.box.size, dtype=piece.dtype) for name, piece in wanted.items()}
    damaged = ""
    for move in moves:
        if move.source == move.target == comm.rank:
            _place(found, wanted, move, _part(here, move))
    for together in rounds((move for move in moves if move.source != move.target), round_bytes):
        damaged = _exchange(comm, together, here, wanted, found) or damaged
    # Who has seen damage goes on until all have done: they would wait for it.
    for told in gather_text(comm, damaged):
        if told:
            raise StateDamaged(told)
    return found


def _exchange(
    comm: Communicator,
    moves: Sequence[Move],
    here: Sequence[LocalTensors],
    wanted: ShardMap,
    found: Mapping[str, Tensor],
) -> str:
    """One round; returns what is damaged of what came, if anything is."""
    ranks = range(comm.size)
    leaving = [[move for move in moves if (move.source, move.target) == (comm.rank, rank)] for rank in ranks]
    coming = [[move for move in moves if (move.source, move.target) == (rank, comm.rank)] for rank in ranks]
    sizes = [sum(_room(move) for move in each) for each in coming]
    arrived = comm.exchange([_packed(each, here) for each in leaving], [_bytes(size) for size in sizes]).wait()
    damaged = ""
    for rank in ranks:
        begin = 0
        for move in coming[rank]:
            data = arrived[rank][begin : begin + _DIGEST_BYTES + move.nbytes]
            begin += _room(move)
            if xxh3_128_digest(raw_bytes(data[_DIGEST_BYTES:])) != bytes(raw_bytes(data[:_DIGEST_BYTES])):
                damaged = f"{move.name} {move.box} came from worker {rank} to worker {comm.rank} as other bytes"
                continue
            _place(found, wanted, move, data[_DIGEST_BYTES:].view(move.dtype).view(move.box.size))
    return damaged


def _packed(moves: Sequence[Move], here: Sequence[LocalTensors]) -> Tensor:
    """What goes to one worker in one round: for each box its digest and its numbers, and what is needed to begin the
    next where any dtype may begin."""
    packed, begin = _bytes(sum(map(_room, moves))), 0
    for move in moves:
        numbers = packed[begin + _DIGEST_BYTES :][: move.nbytes]
        numbers.view(move.dtype).view(move.box.size).copy_(_part(here, move))
        digest = xxh3_128_digest(raw_bytes(numbers))
        packed[begin : begin + _DIGEST_BYTES] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        begin += _room(move)
    return packed


def _part(here: Sequence[LocalTensors], move: Move) -> Tensor:
    return next(part for held in here if (part := held.part(move.name, move.dtype, move.box)) is not None)


def _place(found: Mapping[str, Tensor], wanted: ShardMap, move: Move, numbers: Tensor) -> None:
    found[move.name][move.box.slices(wanted[move.name].box)].copy_(numbers)


def _room(move: Move) -> int:
    return _DIGEST_BYTES + -(-move.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)
