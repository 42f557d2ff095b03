"""Ring attention: keys and values are sent around a ring, so that no rank holds those of more than two ranks.

Liu et al. 2023, "Ring Attention with Blockwise Transformers"; results of blocks are merged by their log-sum-exp as in
Milakov & Gimelshein 2018. In backward, keys and values are sent around once more, followed by their gradients.

        worker 0        worker 1        worker 2
     k, v of 0  ──►  k, v of 0  ──►  k, v of 0        while a block is computed,
     k, v of 2  ──►  ...                              the next one is in flight
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.layout.context.group import Peers, PendingTensor
from unisono.layout.context.sequence_split import SequenceSplit


@dataclass(frozen=True)
class KeyBlock:
    """One block of the attention matrix: the local queries `rows`, and the first `stop` keys of one rank."""

    rows: slice
    stop: int
    mask: Tensor | None  # [..., rows, stop]; bool: True where a query attends to a key; floats are added to the scores


def ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    split: SequenceSplit,
    peers: Peers,
) -> Tensor:
    """Collective: the attention of the local queries to all keys, ``[..., local, value width]``.

    `mask` is ``[..., local or 1, length]`` and gets no gradient.
    """
    plan = _Plan(mask, is_causal, scale, split, peers)
    attended: Tensor = _Ring.apply(query, key, value, plan)  # type: ignore[no-untyped-call]
    return attended


@dataclass(frozen=True)
class _Plan:
    mask: Tensor | None
    is_causal: bool
    scale: float
    split: SequenceSplit
    peers: Peers

    def blocks(self, peer: int, device: torch.device) -> Iterator[KeyBlock]:
        if not self.is_causal:
            yield KeyBlock(slice(0, self.split.local), self.split.local, self._columns(peer))
            return
        for (start, end), stop, ends_here in self.split.visible(self.peers.rank, peer):
            size = end - start
            triangle = torch.ones(size, stop, dtype=torch.bool, device=device).tril(stop - size) if ends_here else None
            yield KeyBlock(slice(start, end), stop, triangle)

    def _columns(self, peer: int) -> Tensor | None:
        return None if self.mask is None else self.split.part(self.mask, -1, peer)

    def rotate(self, packet: Tensor, visit: Callable[[int, Tensor], None]) -> None:
        """Collective: call ``visit(rank, packet)`` with the packet of each rank, beginning with this rank's own.

        During a visit the next packet is received; after it, the visited packet is freed.
        """
        n = self.peers.size
        for step in range(n):
            pending = self.peers.ring_shift(packet) if step < n - 1 else None
            visit((self.peers.rank - step) % n, packet)
            if pending is not None:
                packet = pending.wait()
                del pending


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            wide = torch.promote_types(query.dtype, torch.float32)
            out = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=wide)
            lse = query.new_full(query.shape[:-1], -torch.inf, dtype=wide)

            def attend(peer: int, packet: Tensor) -> None:
                keys, values = _unpack(packet, key, value)
                for block in plan.blocks(peer, query.device):
                    _merge(out, lse, block, *_forward(query, keys, values, block, plan.scale))

            plan.rotate(_pack(key, value), attend)
            result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.plan = plan
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        # Backward may run inside `attending`, which must not redirect this arithmetic.
        with torch.autocast(query.device.type, enabled=False), torch._C.DisableTorchFunction():
            of_query = torch.zeros_like(query, dtype=lse.dtype)
            delta = (gradient.to(lse.dtype) * out).sum(-1)
            following: PendingTensor | None = None  # the gradients of the current packet, from ranks that had it before

            def attend(peer: int, packet: Tensor) -> None:
                nonlocal following
                keys, values = _unpack(packet, key, value)
                added = torch.zeros_like(packet, dtype=lse.dtype)
                of_keys, of_values = _unpack(added, key, value)
                for block in plan.blocks(peer, query.device):
                    _backward(
                        gradient, query, keys, values, lse, delta, block, plan.scale, of_query, of_keys, of_values
                    )
                following = plan.peers.ring_shift(added if following is None else added.add_(following.wait()))

            plan.rotate(_pack(key, value), attend)
            assert following is not None
            of_keys, of_values = _unpack(following.wait(), key, value)
        return of_query.to(query.dtype), of_keys.to(key.dtype), of_values.to(value.dtype), None


def _pack(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(packet: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return packet[: key.numel()].view(key.shape), packet[key.numel() :].view(value.shape)


def _forward(query: Tensor, key: Tensor, value: Tensor, block: KeyBlock, scale: float) -> tuple[Tensor, Tensor]:
    """The attention of a block's queries to its keys alone, and the log-sum-exp of their scores."""
    scores = _scores(query, key, block, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - _finite(lse)[..., None]).exp_()
    return _unfold(_fold(weights, key) @ value[..., : block.stop, :].to(weights.dtype), lse), lse


def _merge(out: Tensor, lse: Tensor, block: KeyBlock, new: Tensor, new_lse: Tensor) -> None:
    """Merge a block's result into `out`, weighted by the sums of exponentials."""
    old = lse[..., block.rows]
    both = torch.logaddexp(old, new_lse)
    kept, added = (old - _finite(both)).exp(), (new_lse - _finite(both)).exp()
    out[..., block.rows, :] = out[..., block.rows, :] * kept[..., None] + new * added[..., None]
    lse[..., block.rows] = both


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, delta: Tensor, block: KeyBlock,
    scale: float, of_query: Tensor, of_key: Tensor, of_value: Tensor,
) -> None:  # fmt: skip
    """Add a block's gradients to the last three tensors (Dao et al. 2022, appendix B.4)."""
    rows, stop, wide = block.rows, block.stop, lse.dtype
    weights = (_scores(query, key, block, scale) - _finite(lse[..., rows])[..., None]).exp_()
    outer = _fold(gradient[..., rows, :].to(wide), key)
    weights_folded = _fold(weights, key)
    of_value[..., :stop, :] += weights_folded.transpose(-1, -2) @ outer
    of_weights = _unfold(outer @ value[..., :stop, :].to(wide).transpose(-1, -2), lse[..., rows])
    of_scores = _fold(weights * (of_weights - delta[..., rows, None]) * scale, key)
    of_query[..., rows, :] += _unfold(of_scores @ key[..., :stop, :].to(wide), lse[..., rows])
    of_key[..., :stop, :] += of_scores.transpose(-1, -2) @ _fold(query[..., rows, :].to(wide), key)


def _scores(query: Tensor, key: Tensor, block: KeyBlock, scale: float) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    mine = query[..., block.rows, :]
    seen = key[..., : block.stop, :].to(wide).transpose(-1, -2)
    scores = _unfold(_fold(mine.to(wide), key) @ seen, mine[..., 0]) * scale
    if block.mask is None:
        return scores
    if block.mask.dtype == torch.bool:
        return scores.masked_fill_(~block.mask, -torch.inf)
    return scores.add_(block.mask)


def _fold(x: Tensor, key: Tensor) -> Tensor:
    """Queries whose heads share a key head, as more rows of that head ``[..., key heads, group * rows, E]``."""
    if key.dim() < 3 or x.shape[-3] == key.shape[-3]:
        return x
    return x.reshape(*x.shape[:-3], key.shape[-3], -1, x.shape[-1])


def _unfold(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_fold`: ``[..., heads, rows, E]`` with the heads and rows of `like` ``[..., heads, rows]``."""
    return x.reshape(*like.shape, x.shape[-1])


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf, the log-sum-exp of a query that attends to no key, by 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
