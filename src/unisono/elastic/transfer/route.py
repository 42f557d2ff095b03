"""The same boxes on the same way, again and again: who gives what to whom is found out once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.checkpoint.ownership import ShardMap
from unisono.comm import Communicator
from unisono.elastic.transfer.transfer_plan import Move, plan


class Route:
    """From those who have boxes `here` to those who want them; nothing is verified. All make it alike, and call it
    alike.

    Args:
        here: what each worker has.
        wanted: what each wants, which somebody has.
        device: where its tensors lie.
    """

    def __init__(
        self, comm: Communicator, here: Sequence[ShardMap], wanted: Sequence[ShardMap], device: torch.device
    ) -> None:
        moves, me, ranks = plan([[each] for each in here], wanted), comm.rank, range(comm.size)
        self._comm, self._device, self._here, self._wanted = comm, device, here[me], wanted[me]
        self._leaving = [[m for m in moves if (m.source, m.target) == (me, rank)] for rank in ranks]
        self._coming = [[m for m in moves if (m.source, m.target) == (rank, me)] for rank in ranks]

    def __call__(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What was wanted, by name, in memory of its own. Of what nobody has `given`, nothing comes; where only some
        have, the rest is zeros. Raises `PeerLost`."""
        sends = [self._packed(moves, given) for moves in self._leaving]
        like = [torch.empty(len(moves) + _nbytes(moves), dtype=torch.uint8, device=self._device)
                for moves in self._coming]  # fmt: skip
        found: dict[str, Tensor] = {}
        came: set[str] = set()
        for moves, message in zip(self._coming, self._comm.exchange(sends, like).wait()):
            there, *parts = message.split([len(moves), *(move.nbytes for move in moves)])
            for move, is_there, part in zip(moves, there.tolist(), parts):
                box = self._wanted[move.name].box
                whole = found.setdefault(move.name, torch.empty(box.size, dtype=move.dtype, device=self._device))
                whole[move.box.slices(box)] = part.clone().view(move.dtype).view(move.box.size)
                came |= {move.name} if is_there else set()
        return {name: found[name] for name in found if name in came}

    def _packed(self, moves: Sequence[Move], given: Mapping[str, Tensor]) -> Tensor:
        """For each box, whether it is there; then the bytes of all, zeros where it is not."""
        there = torch.tensor([move.name in given for move in moves], dtype=torch.uint8, device=self._device)
        return torch.cat([there, *(self._bytes(move, given.get(move.name)) for move in moves)])

    def _bytes(self, move: Move, numbers: Tensor | None) -> Tensor:
        if numbers is None:
            return torch.zeros(move.nbytes, dtype=torch.uint8, device=self._device)
        return numbers[move.box.slices(self._here[move.name].box)].contiguous().view(-1).view(torch.uint8)


def _nbytes(moves: Sequence[Move]) -> int:
    return sum(move.nbytes for move in moves)
