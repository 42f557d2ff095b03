"""Transfers state between memories and verifies it, from several sources at once, in rounds of bounded size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.checkpoint.fingerprint import CHECKSUM_BYTES, checksum, raw_bytes
from unisono.checkpoint.ownership import ShardMap
from unisono.comm import Communicator
from unisono.comm.text import gather_text
from unisono.elastic.transfer.flat_buffer import aligned
from unisono.elastic.transfer.local_tensors import Inventory, LocalTensors
from unisono.elastic.transfer.transfer_plan import Move, plan, rounds
from unisono.errors import StateDamaged

ROUND_BYTES = 16 << 20
"""How many bytes one rank sends in one round."""


def transfer_tensors(
    comm: Communicator,
    here: Sequence[LocalTensors],
    wanted: ShardMap,
    hosts: Sequence[str] = (),
    round_bytes: int = ROUND_BYTES,
) -> dict[str, Tensor]:
    """Collective: the shards that this rank wants, by name, as new tensors in CPU memory.

    Ranks gather their inventories and compute the same plan; then several sources send at once. With each box its
    source sends the xxh3 digest.

    Args:
        here: the shards that this rank has; may be more than others want, or none.
        wanted: the shards that this rank wants; may be none.
        hosts: the host of each rank; a source on the same host is preferred.
        round_bytes: how many bytes a rank sends in one round, and at most receives from each other rank. It bounds the
            memory that the transfer takes besides the result.

    Raises:
        StateMissing: no rank has some boxes; raised on all ranks, and names these boxes.
        StateDamaged: a box arrived damaged; raised on all ranks, and names a tensor and its source.
        PeerLost: a worker was lost meanwhile.
    """
    texts = gather_text(comm, Inventory([local.shards for local in here], wanted).encode())
    decoded = {text: Inventory.decode(text) for text in set(texts)}  # ranks of one kind send equal texts
    inventories = [decoded[text] for text in texts]
    moves = plan([each.here for each in inventories], [each.wants for each in inventories], hosts)
    received = {name: torch.empty(shard.box.size, dtype=shard.dtype) for name, shard in wanted.items()}
    damaged = ""
    for move in moves:
        if move.source == move.target == comm.rank:
            _store(received, wanted, move, _view(here, move))
    for batch in rounds((move for move in moves if move.source != move.target), round_bytes):
        damaged = _exchange(comm, batch, here, wanted, received) or damaged
    # A rank that found damage completes all rounds, since the others would wait for it.
    for report in gather_text(comm, damaged):
        if report:
            raise StateDamaged(report)
    return received


def _exchange(
    comm: Communicator,
    moves: Sequence[Move],
    here: Sequence[LocalTensors],
    wanted: ShardMap,
    received: Mapping[str, Tensor],
) -> str:
    """Collective: one round. Returns a sentence on a box that arrived damaged, or an empty text."""
    ranks = range(comm.size)
    outgoing = [[move for move in moves if (move.source, move.target) == (comm.rank, rank)] for rank in ranks]
    incoming = [[move for move in moves if (move.source, move.target) == (rank, comm.rank)] for rank in ranks]
    sizes = [sum(map(_slot_bytes, batch)) for batch in incoming]
    arrived = comm.exchange([_packed(batch, here) for batch in outgoing], [_bytes(size) for size in sizes]).wait()
    damaged = ""
    for rank in ranks:
        begin = 0
        for move in incoming[rank]:
            data = arrived[rank][begin : begin + CHECKSUM_BYTES + move.nbytes]
            begin += _slot_bytes(move)
            if checksum(data[CHECKSUM_BYTES:]) != bytes(raw_bytes(data[:CHECKSUM_BYTES])):
                damaged = (
                    f"{move.name} {move.box} arrived from worker {rank} at worker {comm.rank} with other bytes than "
                    "were sent"
                )
                continue
            _store(received, wanted, move, data[CHECKSUM_BYTES:].view(move.dtype).view(move.box.size))
    return damaged


def _packed(moves: Sequence[Move], here: Sequence[LocalTensors]) -> Tensor:
    """The message to one rank in one round: for each box its digest and its elements, padded to the alignment."""
    packed, begin = _bytes(sum(map(_slot_bytes, moves))), 0
    for move in moves:
        elements = packed[begin + CHECKSUM_BYTES :][: move.nbytes]
        elements.view(move.dtype).view(move.box.size).copy_(_view(here, move))
        packed[begin : begin + CHECKSUM_BYTES] = torch.frombuffer(bytearray(checksum(elements)), dtype=torch.uint8)
        begin += _slot_bytes(move)
    return packed


def _view(here: Sequence[LocalTensors], move: Move) -> Tensor:
    return next(view for local in here if (view := local.view(move.name, move.dtype, move.box)) is not None)


def _store(received: Mapping[str, Tensor], wanted: ShardMap, move: Move, elements: Tensor) -> None:
    received[move.name][move.box.slices(wanted[move.name].box)].copy_(elements)


def _slot_bytes(move: Move) -> int:
    return CHECKSUM_BYTES + aligned(move.nbytes)


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)
