"""What travels in place of a tensor, and how a mean is taken with it.

A compressor turns a flat *total* (what one worker has summed of its micro-batches) into a flat *message* and back.
Most also leave something out. What adds up at the far end (gradients, walks) is sent by `owe`, which adds what earlier
messages left out; what replaces (weights) is sent by `encode`, as the difference to what the other side already holds.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span


class CollectiveVerbs(Protocol):
    """The communicator's verbs, as far as a compressor uses them; each returns a work with `poll` and `wait`."""

    rank: int
    size: int

    @property
    def bytes_sent(self) -> int: ...
    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Any: ...
    def gather(self, x: Tensor) -> Any: ...
    def exchange(self, xs: Any, like: Any) -> Any: ...
    def now(self) -> float: ...


Mean = Generator[Any, Any, Tensor]
"""The steps of taking a mean, written as if they blocked: each ``yield work`` waits for a verb and gives its result;
the return value is the mean. Whoever drives it (a synchronizer) may poll in between and go on computing."""


class Buffered(Protocol):
    """Gradients that are added many at once: each is written into a buffer, and the buffer is folded into a total.
    That gives the bits of `Compressor.add`."""

    def buffer_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of a buffer for gradients of `dtype`."""

    def writes(self, weight: float) -> bool:
        """Whether `write` takes gradients of that weight; `Compressor.add` takes all."""

    def write(self, buffer: Tensor, gradient: Tensor, weight: float) -> None:
        """``weight * gradient`` as `fold` takes it, in place of what `buffer` held. Both of the same shape."""

    def fold(self, total: Tensor, buffer: Tensor, first: bool) -> None:
        """Add what was written into `buffer`, of the shape of `total`; `first` overwrites what `total` held. What
        `buffer` holds then is undefined. Raises as `Compressor.add` does."""


class Compressor(Protocol):
    """A frozen value that keeps nothing.

    Totals are flat, of dtype `total_dtype`; `spans` say which parameters lie where in one (empty where it is a piece
    without structure). Inside a worker, micro-batches are summed by `add`; between workers, `mean` takes the weighted
    sum of all totals (weights already add up to 1, so that the sum is the mean). What a total's last elements carry
    besides gradients (the control word) survives only where `is_one_sum` is true.
    """

    @property
    def adds_up(self) -> bool:
        """True where messages can be added like totals, so that `mean` is one `sum`."""

    @property
    def owes(self) -> bool:
        """True where `owe` adds what earlier messages left out."""

    @property
    def finite(self) -> bool:
        """True where `add` refuses numbers that are not finite."""

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        """The compressor for parameter `name`; itself, unless it treats parameters differently."""

    def for_sums_of(self, addends: int) -> Compressor:
        """The compressor for totals that add up at most `addends` gradients, over all workers; itself, unless the
        range of its numbers depends on that."""

    def is_one_sum(self, memory: CompressorMemory) -> bool:
        """Whether the next `mean` with `memory` is one `sum`: always where `adds_up` is true, and perhaps for a while
        where a choice is made. All workers know it alike."""

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are summed inside a worker."""

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether gradients of `dtype` come out of `mean` over one peer as they went in, bit for bit."""

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        """``total += weight * gradient``, in place; `first` overwrites what `total` held. Both of the same shape.

        Raises:
            ValueError: `gradient` holds values that this compressor cannot represent (names the largest).
        """

    @property
    def buffered(self) -> Buffered | None:
        """How to add many gradients at once, or None: then `add` costs no more for each by itself."""

    def value(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of `dtype` that `total` stands for (`total` itself, where nothing changes)."""

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the message of a total of `numel` elements for gradients of `dtype`: its length and dtype depend
        on nothing else."""

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        """The message for `total`, which is left as it is (the message may be `total` itself)."""

    def owe(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        """The message for `total` and what earlier messages of `memory` left out; `total` may be written into."""

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        """The total that `message` stands for, ``[numel]`` (`message` itself, where nothing changes).

        Raises:
            ValueError: a message that `encode` cannot have made.
        """

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        """The sum of all workers' totals, as gradients of `dtype`, the same bits on all. `total` may be written
        into."""


def bits(compress: Compressor, spans: Sequence[Span], numel: int, dtype: torch.dtype = torch.float32) -> int:
    """Bits of the message for `numel` gradients of `dtype`, one way."""
    message = compress.blank(spans, numel, dtype, torch.device("meta"))
    return message.numel() * message.element_size() * 8


class Codec:
    """What most compressors share: totals are plain sums, what is left out is owed, a mean takes two hops.

    A subclass gives `blank`, `encode` and `decode`.
    """

    @property
    def adds_up(self) -> bool:
        return False

    @property
    def owes(self) -> bool:
        return True

    @property
    def finite(self) -> bool:
        return False

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        return self

    def for_sums_of(self, addends: int) -> Compressor:
        return self

    def is_one_sum(self, memory: CompressorMemory) -> bool:
        return self.adds_up

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def keeps(self, dtype: torch.dtype) -> bool:
        return False

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        if first:
            torch.mul(gradient, weight, out=total)
        else:
            total.add_(gradient, alpha=weight)

    @property
    def buffered(self) -> Buffered | None:
        return None

    def value(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return total.to(dtype)

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        raise NotImplementedError

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        raise NotImplementedError

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def owe(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        """Error feedback (Seide et al. 2014; Karimireddy et al. 2019, algorithm 1): the residual of this message
        is added to the next total."""
        owed = memory.get("owed")
        if owed is not None:
            total.add_(owed)
        message = self.encode(total, spans, memory)
        arrives = self.decode(message, spans, total.numel(), total.dtype)
        memory.put("owed", torch.sub(total, arrives, out=memory.spare("owed")))
        return message

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        """Two hops: each worker sums one piece of everybody's total, then sends the sum round. Both hops owe what
        they leave out (Tang et al. 2019, "DoubleSqueeze", algorithm 1)."""
        if comm.size == 1:
            message = self.owe(total, spans, memory)
            return self.value(self.decode(message, spans, total.numel(), total.dtype), dtype)
        pieces = list(total.tensor_split(comm.size))
        messages = [self.owe(piece, (), memory.part(f"to {peer}")) for peer, piece in enumerate(pieces)]
        mine = pieces[comm.rank].numel()
        arrived = yield comm.exchange(messages, [self.blank((), mine, dtype, total.device)] * comm.size)
        summed = self.decode(arrived[0], (), mine, total.dtype).clone()
        for message in arrived[1:]:
            summed.add_(self.decode(message, (), mine, total.dtype))
        longest = pieces[0].numel()  # all messages of a gather are of one length
        padded = torch.cat([summed, summed.new_zeros(longest - mine)]) if mine < longest else summed
        rows = yield comm.gather(self.owe(padded, (), memory.part("round")))
        whole = [self.decode(row, (), longest, total.dtype)[: piece.numel()] for row, piece in zip(rows, pieces)]
        return self.value(torch.cat(whole), dtype)
