"""A compressor that sends the factors of a low-rank matrix in place of a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from unisono.compress.cast import Cast
from unisono.compress.compressor import Codec, CollectiveVerbs, Compressor, Mean
from unisono.compress.memory import RESIDUAL, CompressorMemory, accumulated
from unisono.compress.span import Span


@dataclass(frozen=True)
class PowerSGD(Codec):
    """PowerSGD (Vogels et al. 2019, algorithms 1 and 2): sends a matrix M as ``P @ Q.T`` of rank `rank`.

    A mean takes one step of subspace iteration, from the Q of the previous mean, with error feedback. M_w is the matrix
    of worker w plus its residual::

        P = orthonormal basis of sum(M_w @ Q)      Q_w = M_w.T @ P      mean = P @ sum(Q_w).T
                                                                        new residual of w = M_w - P @ Q_w.T

    Two sums of ``rank * rows`` and ``rank * columns`` numbers replace one sum of ``rows * columns`` numbers. Every
    worker computes the basis from the same sum, so the result has the same bits on equal processors. Where `mean` is
    not used (servers, gossip), a message contains the P and Q of the sender's matrix.

    The rows of a parameter's matrix are its outermost dimension in memory (output features or channels). Vectors, small
    matrices and pieces without structure are sent whole, in the dtype of totals, at least fp32.

    Args:
        rank: the number of columns of P and Q.
        seed: the seed of the first Q.

    Raises:
        ValueError: `rank` is below 1, or `seed` is not a whole number from 0 to 2^31 - 1.
    """

    rank: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank={self.rank!r} is not a whole number from 1")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed!r} is not a whole number from 0 to 2^31 - 1")

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        pays = len(shape) > 1 and _pays(shape[0], math.prod(shape[1:]), self.rank)
        return self if pays else Cast()

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)  # residuals would be lost by rounding in a 16-bit sum

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        plan = _Plan.of(spans, numel, self.rank)
        return torch.empty(plan.left + plan.right, dtype=self.total_dtype(dtype), device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        plan = _Plan.of(spans, total.numel(), self.rank)
        return self._factors(plan, total.to(self.total_dtype(total.dtype)), memory)

    def encode_with_feedback(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        plan = _Plan.of(spans, total.numel(), self.rank)
        residual = accumulated(total, memory, RESIDUAL)
        message = self._factors(plan, residual, memory)
        plan.subtract(residual, message[: plan.left], message[plan.left :])
        return message

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        plan = _Plan.of(spans, numel, self.rank)
        wanted = self.blank(spans, numel, dtype, torch.device("meta"))
        if message.dtype != wanted.dtype or message.shape != wanted.shape:
            raise ValueError(
                f"a message of {tuple(message.shape)} {message.dtype}, where {tuple(wanted.shape)} {wanted.dtype} is "
                "expected"
            )
        total = torch.empty(numel, dtype=message.dtype, device=message.device)
        plan.multiply(message[: plan.left], message[plan.left :], total)
        return total.to(dtype)

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        plan = _Plan.of(spans, total.numel(), self.rank)
        residual = accumulated(total, memory, RESIDUAL)
        start = self._start(plan, memory, total)
        summed = yield comm.sum(plan.project(residual, start, total.new_empty(plan.left)))
        left = plan.orthonormal(summed)
        mine = plan.project_back(residual, left, total.new_empty(plan.right))
        work = comm.sum(mine.clone())
        plan.subtract(residual, left, mine)  # while the sum is in flight
        right = yield work
        _keep(memory, right, start)
        plan.multiply(left, right, total)
        return self.value(total, dtype)

    def _factors(self, plan: _Plan, total: Tensor, memory: CompressorMemory) -> Tensor:
        message = total.new_empty(plan.left + plan.right)
        left, right = message[: plan.left], message[plan.left :]
        start = self._start(plan, memory, total)
        left.copy_(plan.orthonormal(plan.project(total, start, left)))
        _keep(memory, plan.project_back(total, left, right), start)
        return message

    def _start(self, plan: _Plan, memory: CompressorMemory, like: Tensor) -> Tensor:
        kept: Tensor | None = memory.get("right")
        if kept is not None:
            return kept
        return torch.randn(plan.right, generator=torch.Generator().manual_seed(self.seed)).to(like)


@dataclass(frozen=True)
class _Matrix:
    """The range of a parameter in a total, ``rows * columns`` from `start`, and the ranges of its factors in messages.

    Factors are stored transposed, ``[rank, rows]`` from `left` and ``[rank, columns]`` from `right`: products are six
    times faster than in the other order.
    """

    rows: int
    columns: int
    rank: int
    start: int
    left: int
    right: int

    def inside(self, total: Tensor) -> Tensor:
        return total[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)

    def p(self, left: Tensor) -> Tensor:
        return left[self.left : self.left + self.rows * self.rank].view(self.rank, self.rows)

    def q(self, right: Tensor) -> Tensor:
        return right[self.right : self.right + self.columns * self.rank].view(self.rank, self.columns)


@dataclass(frozen=True)
class _Plan:
    """Which parts of a total are matrices; the rest is sent whole, behind the left factors."""

    matrices: tuple[_Matrix, ...]
    rest: tuple[tuple[int, int], ...]
    rank: int
    left: int
    right: int

    @classmethod
    def of(cls, spans: Sequence[Span], numel: int, rank: int) -> _Plan:
        """The plan for `spans`. Matrices are sorted by their rows, so that matrices of equal height are adjacent."""
        shapes = [(*_rows_and_columns(span), span) for span in spans]
        matrices, left, right = [], 0, 0
        for rows, columns, span in sorted((s for s in shapes if _pays(s[0], s[1], rank)), key=lambda s: s[0]):
            matrices.append(_Matrix(rows, columns, rank, span.start, left, right))
            left, right = left + rows * rank, right + columns * rank
        rest = tuple(_between(sorted((m.start, m.start + m.rows * m.columns) for m in matrices), numel))
        return cls(tuple(matrices), rest, rank, left + sum(stop - start for start, stop in rest), right)

    def project(self, total: Tensor, right: Tensor, left: Tensor) -> Tensor:
        """``M @ Q`` of all matrices and the rest of `total`, written into `left`."""
        for matrix in self.matrices:
            torch.mm(matrix.q(right), matrix.inside(total).T, out=matrix.p(left))
        if self.rest:
            torch.cat([total[start:stop] for start, stop in self.rest], out=self._rest(left))
        return left

    def project_back(self, total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """``M.T @ P`` of all matrices, written into `right`."""
        for matrix in self.matrices:
            torch.mm(matrix.p(left), matrix.inside(total), out=matrix.q(right))
        return right

    def orthonormal(self, left: Tensor) -> Tensor:
        """`left` with an orthonormal basis in place of every P."""
        parts = []
        for rows, group in groupby(self.matrices, key=lambda matrix: matrix.rows):
            equal = list(group)
            block = left[equal[0].left : equal[-1].left + rows * self.rank]
            reflectors = torch.geqrf(block.view(len(equal), self.rank, rows).mT)  # R of the QR is not needed
            parts.append(torch.linalg.householder_product(*reflectors).mT.reshape(-1))
        return torch.cat([*parts, self._rest(left)])

    def subtract(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """``M -= P @ Q.T`` for all matrices of `total`; the rest becomes 0."""
        for matrix in self.matrices:
            matrix.inside(total).addmm_(matrix.p(left).T, matrix.q(right), alpha=-1)
        for start, stop in self.rest:
            total[start:stop].zero_()

    def multiply(self, left: Tensor, right: Tensor, total: Tensor) -> None:
        """``M = P @ Q.T`` for all matrices of `total`; the rest is copied from `left`, in which it was sent."""
        for matrix in self.matrices:
            torch.mm(matrix.p(left).T, matrix.q(right), out=matrix.inside(total))
        position = left.numel() - self._rest(left).numel()
        for start, stop in self.rest:
            total[start:stop] = left[position : position + stop - start]
            position += stop - start

    def _rest(self, left: Tensor) -> Tensor:
        return left[sum(matrix.rows for matrix in self.matrices) * self.rank :]


def _pays(rows: int, columns: int, rank: int) -> bool:
    return rank * (rows + columns) < rows * columns


def _rows_and_columns(span: Span) -> tuple[int, int]:
    """The outermost dimension in memory, and the product of the others, whose order does not matter for the rank."""
    numel = span.stop - span.start
    rows = max(zip(span.stride, span.shape), default=(0, 1))[1] if numel else 1
    return rows, numel // rows


def _between(taken: Sequence[tuple[int, int]], numel: int) -> Iterator[tuple[int, int]]:
    """The gaps between the ranges `taken` in ``0 .. numel``."""
    end = 0
    for start, stop in [*taken, (numel, numel)]:
        if end < start:
            yield end, start
        end = stop


def _keep(memory: CompressorMemory, right: Tensor, start: Tensor) -> None:
    """Let the next step start from `right`. Entries that are 0 or not finite would stay so, and come from `start`."""
    memory.put("right", torch.where(right.isfinite() & (right != 0), right, start))
