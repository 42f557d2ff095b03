"""A byte-level GPT: a pre-norm causal transformer, as a value (`GPT`) and as the network that it builds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


@dataclass(frozen=True)
class GPT:
    """The shape of the network; the default has about 1M parameters, ``GPT(layers=12, width=256)`` about 10M.

    Args:
        layers: the number of transformer blocks.
        width: the number of features per position; a multiple of `heads`.
        heads: the number of attention heads.
        context: the number of bytes that a position attends to, itself included.
        dropout: the fraction of features that training drops.
        experts: the number of perceptrons in each block, of which each position uses some (Shazeer et al. 2017, without
            their load-balancing loss); 0: one perceptron for all positions.
        experts_per_token: the number of experts that a position uses.
    """

    layers: int = 5
    width: int = 128
    heads: int = 4
    context: int = 128
    dropout: float = 0.0
    experts: int = 0
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is below 1")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} is not in [0, 1)")
        if self.experts < 0 or self.experts == 1:
            raise ValueError(f"experts={self.experts!r} is neither 0 nor at least 2")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token!r} is not in 1..{self.experts}")

    def build(self) -> Network:
        """The network with fresh weights."""
        return Network(self)


class Network(nn.Module):
    """A GPT: from bytes (N, T), the logits (N, T, 256) of the byte after each, for any T up to the context."""

    def __init__(self, shape: GPT) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.apply(_initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.2.weight", "mlp.experts.down")):
                # keeps the variance of the residual stream independent of depth (Radford et al. 2019, 2.3)
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then a two-layer perceptron or a mixture of them, each added to its input."""

    def __init__(self, shape: GPT) -> None:
        super().__init__()
        width = shape.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(shape)
        self.mlp = Mixture(shape) if shape.experts else perceptron(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class Attention(nn.Module):
    """Causal self-attention with several heads (Vaswani et al. 2017, 3.2)."""

    def __init__(self, shape: GPT) -> None:
        super().__init__()
        self.head_width, self.dropout = shape.width // shape.heads, shape.dropout
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.query_key_value(x).view(n, t, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        y = F.dropout(self.output(y.transpose(1, 2).reshape(n, t, width)), dropout)
        return y


def perceptron(shape: GPT) -> nn.Module:
    """A perceptron of two layers on positions (N, T, width), with ``4 * width`` hidden features."""
    return nn.Sequential(
        nn.Linear(shape.width, 4 * shape.width),
        nn.GELU(approximate="tanh"),
        nn.Linear(4 * shape.width, shape.width),
        nn.Dropout(shape.dropout),
    )


class Mixture(nn.Module):
    """A mixture of perceptrons: each position uses the most likely ones, weighted by their probability."""

    def __init__(self, shape: GPT) -> None:
        super().__init__()
        self.chosen, self.dropout = shape.experts_per_token, shape.dropout
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.chosen)
        y: Tensor = self.experts(tokens, chosen, weights / weights.sum(-1, keepdim=True))
        return F.dropout(y.view_as(x), self.dropout, self.training)


class Experts(nn.Module):
    """All perceptrons of a mixture.

    From tokens (N, width), expert indices (N, k) and weights (N, k), it computes the weighted sum of the experts'
    outputs (N, width).
    """

    def __init__(self, shape: GPT) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(shape.experts, 4 * shape.width, shape.width))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.width, 4 * shape.width))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            wide = F.gelu(F.linear(tokens[token], self.up[expert]), approximate="tanh")
            y = F.linear(wide, self.down[expert]) * weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, Experts):
        nn.init.normal_(module.up, std=0.02)
        nn.init.normal_(module.down, std=0.02)


def parameters(model: nn.Module) -> int:
    """The number of parameters of `model`."""
    return sum(p.numel() for p in model.parameters())
