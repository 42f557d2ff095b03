"""Which tokens of a sequence each worker has: arithmetic and slicing only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.errors import InvalidInput

Span = tuple[int, int]


@dataclass(frozen=True)
class SequenceSplit:
    """How a sequence of `length` tokens is divided among `size` workers.

    If `balanced`, there are 2 * size chunks, of which worker r has chunks r and 2 * size - 1 - r. Under a causal mask,
    where later tokens attend to more keys, all workers then have equal work. Otherwise there are `size` chunks, and
    worker r has chunk r. A worker's tokens keep their order in both cases.

    Args:
        length: the number of tokens of the whole sequence.
        size: the number of workers that share it.
        balanced: whether each worker has two chunks instead of one.

    Raises:
        InvalidInput: the sequence cannot be cut into equal chunks.
    """

    length: int
    size: int
    balanced: bool = True

    def __post_init__(self) -> None:
        if self.length < 1 or self.length % self.pieces:
            nearest = max(1, round(self.length / self.pieces)) * self.pieces
            what = f"{self.pieces} chunks of equal length" if self.pieces > 1 else "tokens"
            raise InvalidInput(
                "sequence length",
                self.length,
                f"context = {self.size} needs {what}, a multiple of {self.pieces}",
                f"pad or cut sequences: the nearest length that works is {nearest}",
            )

    @property
    def pieces(self) -> int:
        """The number of chunks of all workers, which divides the length."""
        return 2 * self.size if self.balanced and self.size > 1 else self.size

    @property
    def chunk(self) -> int:
        """Tokens per chunk."""
        return self.length // self.pieces

    @property
    def local(self) -> int:
        """Tokens per worker."""
        return self.length // self.size

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of worker `rank`, in the order of the sequence."""
        return (rank,) if self.pieces == self.size else (rank, self.pieces - 1 - rank)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Where the chunks of worker `rank` begin and end in the sequence."""
        return tuple((c * self.chunk, (c + 1) * self.chunk) for c in self.chunks(rank))

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """The position of each token of worker `rank` in the sequence, int64 (local,)."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.spans(rank)])

    def part(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """The tokens of worker `rank`, of a tensor with the whole sequence along `dim`."""
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in self.spans(rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole sequence along `dim`, from every worker's part, by rank."""
        pieces = {
            c: part.narrow(dim, i * self.chunk, self.chunk)
            for rank, part in enumerate(parts)
            for i, c in enumerate(self.chunks(rank))
        }
        return torch.cat([pieces[c] for c in sorted(pieces)], dim)

    def visible(self, rank: int, peer: int) -> Iterator[tuple[Span, int, bool]]:
        """The keys of `peer` that the queries of `rank` attend to under a causal mask, block by block.

        Yields a span of local queries, and the number of the peer's keys, from its first, to which they attend. A third
        value is true if the last chunk of these keys is visible only up to each query's own token. Empty blocks are
        omitted.
        """
        for i, mine in enumerate(self.chunks(rank)):
            seen = sum(theirs <= mine for theirs in self.chunks(peer))
            if seen:
                yield (i * self.chunk, (i + 1) * self.chunk), seen * self.chunk, mine in self.chunks(peer)
