"""Transfers the same boxes between the same ranks repeatedly, by a plan that is made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.checkpoint.ownership import ShardMap
from unisono.comm import Communicator
from unisono.elastic.transfer.transfer_plan import Move, plan


class Route:
    """Sends boxes from the ranks that have them to those that want them, without verification.

    Collective: all ranks construct it with the same arguments, and call it.

    Args:
        here: the shards of each rank.
        wanted: the shards that each rank wants; each is on some rank.
        device: the device of the tensors.
    """

    def __init__(
        self, comm: Communicator, here: Sequence[ShardMap], wanted: Sequence[ShardMap], device: torch.device
    ) -> None:
        moves, me, ranks = plan([[each] for each in here], wanted), comm.rank, range(comm.size)
        self._comm, self._device, self._here, self._wanted = comm, device, here[me], wanted[me]
        self._outgoing = [[m for m in moves if (m.source, m.target) == (me, rank)] for rank in ranks]
        self._incoming = [[m for m in moves if (m.source, m.target) == (rank, me)] for rank in ranks]

    def __call__(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collective: send boxes of the tensors `given`; returns new tensors with the wanted boxes, by name.

        A tensor that no rank has in `given` is left out. If only some ranks have it, the boxes of the other ranks are
        zeros. Raises `PeerLost`.
        """
        sends = [self._packed(moves, given) for moves in self._outgoing]
        like = [torch.empty(len(moves) + _nbytes(moves), dtype=torch.uint8, device=self._device)
                for moves in self._incoming]  # fmt: skip
        received: dict[str, Tensor] = {}
        given_names: set[str] = set()
        for moves, message in zip(self._incoming, self._comm.exchange(sends, like).wait()):
            present, *parts = message.split([len(moves), *(move.nbytes for move in moves)])
            for move, is_present, part in zip(moves, present.tolist(), parts):
                box = self._wanted[move.name].box
                shard = received.setdefault(move.name, torch.empty(box.size, dtype=move.dtype, device=self._device))
                shard[move.box.slices(box)] = part.clone().view(move.dtype).view(move.box.size)
                given_names |= {move.name} if is_present else set()
        return {name: received[name] for name in received if name in given_names}

    def _packed(self, moves: Sequence[Move], given: Mapping[str, Tensor]) -> Tensor:
        """The message for `moves`: one byte per box, whether it was given; then the bytes of all boxes, or zeros."""
        present = torch.tensor([move.name in given for move in moves], dtype=torch.uint8, device=self._device)
        return torch.cat([present, *(self._bytes(move, given.get(move.name)) for move in moves)])

    def _bytes(self, move: Move, tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return torch.zeros(move.nbytes, dtype=torch.uint8, device=self._device)
        return tensor[move.box.slices(self._here[move.name].box)].contiguous().view(-1).view(torch.uint8)


def _nbytes(moves: Sequence[Move]) -> int:
    return sum(move.nbytes for move in moves)
