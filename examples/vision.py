"""Images: a vision transformer or a residual convolutional network learns to read handwritten digits.

    unisono train examples/vision.py:images --model vit
    unisono train examples/vision.py:images --model cnn --workers 2
    unisono train examples/vision.py:images --model vit --workers 4 --layout 'Layout(shard=2, tensor=2)'

Every fifth image is held out, and tells the accuracy.
"""

from functools import partial
from typing import Literal

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from unisono import Cosine, Evaluation, Task


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = lambda y: y.unflatten(2, (-1, self.head_width)).transpose(1, 2)  # as many heads as lie here
        y = F.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)))
        return self.output(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Images (N, 1, 8, 8) in patches of 2 x 2 to logits (N, 10)."""

    def __init__(self, layers: int, width: int, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.learned = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.learned(x))


def cnn(layers: int, width: int) -> nn.Module:
    """Images (N, 1, 8, 8) to logits (N, 10)."""
    blocks = (Residual(width) for _ in range(layers))
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(4 * width, 10),
    )  # fmt: skip


def digits(*, held_out: bool) -> TensorDataset:
    """1,797 real images that scikit-learn brings along; every fifth is held out."""
    pixels, labels = load_digits(return_X_y=True)
    chosen = (torch.arange(len(labels)) % 5 == 0) == held_out
    x, y = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels).long()
    return TensorDataset(x[chosen], y[chosen])


def images(*, model: Literal["vit", "cnn"] = "vit", layers: int = 3, width: int = 32) -> Task:
    return Task(
        name=model,
        model=partial({"vit": ViT, "cnn": cnn}[model], layers, width),
        data=partial(digits, held_out=False),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01),
        evaluate=Evaluation(
            partial(digits, held_out=True), {"accuracy": lambda output, batch: output.argmax(1) == batch[1]}
        ),
        schedule=Cosine(warmup=20),
        defaults={"steps": 240, "global_batch": 64, "micro_batch": 16},
    )
