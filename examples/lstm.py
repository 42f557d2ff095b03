"""A recurrent network on text: LSTMs learn to say the next byte.

    unisono train examples/lstm.py:lstm --layers 2
    unisono train examples/lstm.py:lstm --text README.md docs --workers 2 --sync 'LocalSGD(every=4)'
    unisono train examples/lstm.py:lstm --workers 2 --layout 'Layout(shard=2)'

A state passes from byte to byte, so `context` refuses it; matrices of an LSTM stay whole under `tensor`.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono import Cosine, Evaluation, Task
from unisono.tasks.builtin.text import Corpus, collate, held_out_windows, standard_library, text_files, training_windows


class Block(nn.Module):
    """One layer of LSTM, added to its input; a layout may keep or gather each block by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(width), nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(self.norm(x))
        return x + y


class Network(nn.Module):
    """Bytes (N, T) to logits of the byte that follows each (N, T, 256)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def bits(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), batch[1], reduction="none").mean(1) / math.log(2)


def lstm(*, layers: int = 2, width: int = 128, context: int = 64, text: tuple[str, ...] = ()) -> Task:
    """Train on files and directories named by `text`, or on the standard library's sources; the last twentieth is
    held out."""
    corpus = Corpus([file for path in text for file in text_files(path)] or standard_library())
    return Task(
        name="lstm",
        model=partial(Network, layers, width),
        data=partial(training_windows, corpus, context),
        collate=collate,  # bytes in, and the byte that follows each
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        evaluate=Evaluation(partial(held_out_windows, corpus, context), {"bits_per_byte": bits}, batch=32),
        schedule=Cosine(warmup=20, floor=0.1),
        defaults={"steps": 300, "global_batch": 32, "micro_batch": 8, "clip": 1.0},
    )
