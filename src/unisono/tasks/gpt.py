"""A byte-level GPT: a pre-norm causal transformer, as a value (`GPT`) and as the network that it builds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


@dataclass(frozen=True)
class GPT:
    """The shape of the network; the default has about 1M parameters, ``GPT(layers=12, width=256)`` about 10M.

    Args:
        layers: transformer blocks.
        width: features per position; a multiple of `heads`.
        heads: attention heads.
        context: bytes that a position can look back on, itself included.
        dropout: share of features that training leaves out.
    """

    layers: int = 5
    width: int = 128
    heads: int = 4
    context: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is below 1")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} is not in [0, 1)")

    def build(self) -> Network:
        """The network with fresh weights."""
        return Network(self)


class Network(nn.Module):
    """Bytes (N, T) to logits of the byte that follows each (N, T, 256), for any T up to the context."""

    def __init__(self, shape: GPT) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.apply(_initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.2.weight")):
                # the stream that blocks add to keeps its size, however deep (Radford et al. 2019, 2.3)
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, shape: GPT) -> None:
        super().__init__()
        width = shape.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(shape)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(shape.dropout),
        )

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


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def parameters(model: nn.Module) -> int:
    """How many numbers `model` learns."""
    return sum(p.numel() for p in model.parameters())
