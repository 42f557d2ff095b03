"""The contract of compressors: what travels in place of a tensor, and how a mean is taken with it.

A compressor turns a flat *total* (the sum over one worker's micro-batches) into a flat *message* and back. Most
compressors are lossy. Tensors that the receiver adds up (gradients, local updates) are sent by `encode_with_feedback`,
which adds what earlier messages left out. Tensors that replace others (weights) are sent by `encode`, as the difference
to what the receiver already has.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.compress.memory import RESIDUAL, CompressorMemory
from unisono.compress.span import Span


class CollectiveVerbs(Protocol):
    """The collective operations that a compressor uses; each returns a work with `poll` and `wait`."""

    rank: int
    size: int

    @property
    def bytes_sent(self) -> int: ...
    def sum(self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Any: ...
    def gather(self, x: Tensor) -> Any: ...
    def exchange(self, xs: Any, like: Any) -> Any: ...
    def now(self) -> float: ...


Mean = Generator[Any, Any, Tensor]
"""The steps of taking a mean, as a coroutine: each ``yield work`` receives the result of a collective operation, and
the return value is the mean. The synchronizer that runs it may compute between two polls."""


class Buffered(Protocol):
    """Adds many gradients at once: each is written into a buffer, and the buffer is folded into a total.

    The result has the same bits as that of `Compressor.add`.
    """

    def buffer_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a buffer for gradients of `dtype`."""

    def writes(self, weight: float) -> bool:
        """Whether `write` accepts gradients of that weight; `Compressor.add` accepts any weight."""

    def write(self, buffer: Tensor, gradient: Tensor, weight: float) -> None:
        """Overwrite `buffer` with ``weight * gradient`` in the form that `fold` reads. Both have the same shape."""

    def fold(self, total: Tensor, buffer: Tensor, first: bool) -> None:
        """Add `buffer`, of the shape of `total`, to `total`; `first` overwrites `total` instead.

        The content of `buffer` is undefined afterwards. Raises as `Compressor.add` does.
        """


class Compressor(Protocol):
    """Turns totals into messages and back, as a frozen value. The state of a sender is in its `CompressorMemory`.

    Totals are flat, of dtype `total_dtype`. `spans` names the parameters in a total with their ranges; it is empty for
    a piece of a total, whose structure is unknown. Inside a worker, `add` sums micro-batches. Between workers, `mean`
    sums all totals, whose gradients have weights that already add up to 1. Numbers behind the gradients in a total (the
    control word) are summed correctly only if `is_one_sum` is true.
    """

    @property
    def is_additive(self) -> bool:
        """Whether messages can be added like totals, so that `mean` is one `sum`."""

    @property
    def keeps_residual(self) -> bool:
        """Whether `encode_with_feedback` adds what earlier messages left out."""

    @property
    def finite(self) -> bool:
        """Whether `add` refuses numbers that are not finite."""

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        """The compressor for parameter `name`: this one, unless it compresses different parameters differently."""

    def for_sums_of(self, addends: int) -> Compressor:
        """The compressor for totals that add up at most `addends` gradients, over all workers: this one, unless the
        range of numbers that it can represent depends on `addends`."""

    def is_one_sum(self, memory: CompressorMemory) -> bool:
        """Whether the next `mean` with `memory` is one `sum`; the same on all workers.

        Always true if `is_additive` is. It may change from step to step if the compressor chooses between others.
        """

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are summed inside a worker."""

    def is_lossless(self, dtype: torch.dtype) -> bool:
        """Whether `mean` over a single worker returns gradients of `dtype` bit for bit."""

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        """``total += weight * gradient``, in place; `first` overwrites `total` instead. Both have the same shape.

        Raises:
            ValueError: `gradient` holds values that this compressor cannot represent (names the largest).
        """

    @property
    def buffered(self) -> Buffered | None:
        """How to add many gradients at once; None if that is no faster than `add` for each gradient."""

    def value(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of `dtype` that `total` represents; may be `total` itself."""

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty message for a total of `numel` elements of gradients of `dtype`.

        The length and dtype of a message depend on nothing else.
        """

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        """The message for `total`, which is unchanged; the message may be `total` itself."""

    def encode_with_feedback(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        """The message for `total` plus the residual in `memory`; may write into `total`."""

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        """The total that `message` represents, ``[numel]``; may be `message` itself.

        Raises:
            ValueError: `encode` cannot have made `message`.
        """

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        """Collective: the sum of all workers' totals as gradients of `dtype`, with the same bits on all workers.

        May write into `total`.
        """


def bits(compress: Compressor, spans: Sequence[Span], numel: int, dtype: torch.dtype = torch.float32) -> int:
    """The size in bits of one message for `numel` gradients of `dtype`."""
    message = compress.blank(spans, numel, dtype, torch.device("meta"))
    return message.numel() * message.element_size() * 8


class Codec:
    """Base of most compressors: sums gradients plainly, applies error feedback, and takes the mean in two hops.

    A subclass defines `blank`, `encode` and `decode`.
    """

    @property
    def is_additive(self) -> bool:
        return False

    @property
    def keeps_residual(self) -> bool:
        return True

    @property
    def finite(self) -> bool:
        return False

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        return self

    def for_sums_of(self, addends: int) -> Compressor:
        return self

    def is_one_sum(self, memory: CompressorMemory) -> bool:
        return self.is_additive

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def is_lossless(self, dtype: torch.dtype) -> bool:
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

    def encode_with_feedback(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        """Error feedback (Seide et al. 2014; Karimireddy et al. 2019, algorithm 1).

        The residual of this message is added to the next total.
        """
        residual = memory.get(RESIDUAL)
        if residual is not None:
            total.add_(residual)
        message = self.encode(total, spans, memory)
        decoded = self.decode(message, spans, total.numel(), total.dtype)
        memory.put(RESIDUAL, torch.sub(total, decoded, out=memory.spare(RESIDUAL)))
        return message

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        """A mean in two hops, both with error feedback (Tang et al. 2019, "DoubleSqueeze", algorithm 1).

        Each worker receives its piece of all totals, and sends the sum of these pieces to all others.
        """
        if comm.size == 1:
            message = self.encode_with_feedback(total, spans, memory)
            return self.value(self.decode(message, spans, total.numel(), total.dtype), dtype)
        pieces = list(total.tensor_split(comm.size))
        messages = [
            self.encode_with_feedback(piece, (), memory.part(f"to {peer}")) for peer, piece in enumerate(pieces)
        ]
        mine = pieces[comm.rank].numel()
        received = yield comm.exchange(messages, [self.blank((), mine, dtype, total.device)] * comm.size)
        summed = self.decode(received[0], (), mine, total.dtype).clone()
        for message in received[1:]:
            summed.add_(self.decode(message, (), mine, total.dtype))
        longest = pieces[0].numel()  # all messages of a gather have the same length
        padded = torch.cat([summed, summed.new_zeros(longest - mine)]) if mine < longest else summed
        rows = yield comm.gather(self.encode_with_feedback(padded, (), memory.part("round")))
        whole = [self.decode(row, (), longest, total.dtype)[: piece.numel()] for row, piece in zip(rows, pieces)]
        return self.value(torch.cat(whole), dtype)
