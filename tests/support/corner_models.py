"""Tasks with unusual models for layout tests: what they call, share, skip, choose and receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.layout_models import IGNORED, LENGTH, OPTIMIZERS, SIZES, STEPS, VOCABULARY, Pictures, Sentences
from unisono import Task

WIDTH = 32


class Block(nn.Module):
    """Causal attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out

    def encode(self, x: Tensor) -> Tensor:
        """`forward` by another name."""
        return self.forward(x)


class Stack(nn.Module):
    """Embeddings through `blocks`; subclasses define how."""

    def __init__(self, block: Callable[[], nn.Module] = Block, sparse: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.through(self.tokens(tokens))))
        return logits

    def through(self, x: Tensor) -> Tensor:
        """All blocks, one after the other."""
        for block in self.blocks:
            x = block(x)
        return x


class Methods(Stack):
    """A block is called by another method, another one by both."""

    def through(self, x: Tensor) -> Tensor:
        return super().through(self.blocks[1].encode(self.blocks[0].encode(x)))


class Borrowing(Stack):
    """The model uses a block's weight, and a part of another block."""

    def through(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.blocks[0].up.weight)[..., :WIDTH]
        return super().through(x) + self.blocks[2].norm(x)


class Sharing(Stack):
    """Two blocks share a matrix, and one block is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[3] = self.blocks[1]


class Gated(Block):
    """With parameters of fewer rows than there are workers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.scale = nn.Linear(WIDTH, 1), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x) * torch.sigmoid(self.gate(x))


class Small(Stack):
    """Parameters of one row, one number, and none."""

    def __init__(self) -> None:
        super().__init__(Gated)
        self.scale, self.row = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(1, WIDTH))
        self.one, self.none = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.tensor(1.0))

    def through(self, x: Tensor) -> Tensor:
        return super().through(x) * self.scale * self.row * self.one + self.none.sum()


class Deciding(Stack):
    """Numbers decide which blocks are called, and whether a layer outside of them is."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def through(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i % 2 == 0 or x.sum() > 0:
                x = block(x)
        return x + self.other(x) if x.sum() > 0 else x


class Choosy(Block):
    """Numbers decide whether a layer in it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.other(x) if x.sum() > 0 else x


class Experts(Stack):
    """Samples choose one of a list of experts each."""

    def through(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        chosen, out = x.mean(1).argmax(-1) % 3, torch.zeros_like(x)
        for i, expert in enumerate(self.blocks[1:]):
            mine = (chosen == i).nonzero().flatten()
            if mine.numel():
                out = out.index_add(0, mine, expert(x[mine]))
        return x + out


class Dropped(Stack):
    """In training blocks are left out at random (LayerDrop)."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.4:
                x = block(x)
        return x


class Ignored(Stack):
    """In training what blocks compute is left out at random."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(x)
            x = out if not self.training or torch.rand(()) > 0.4 else x
        return x


class Doubting(Stack):
    """Dropout between blocks, in code that looks at sizes."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if x.shape[1] == 1:
                break
            x = F.dropout(block(x), 0.1, self.training)
        return x


class Convolutions(nn.Module):
    """Blocks with batch normalisation, left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.5:
                x = x + block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Placed(Stack):
    """With a row of a table for each position."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(window, WIDTH)

    def through(self, x: Tensor) -> Tensor:
        return super().through(x + self.positions.weight[: x.shape[1]])


class Unequal(Sentences):
    """Sentences of these `lengths`, one after the other; the first ones have the first length."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = lengths

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        length = self.lengths[i % len(self.lengths) if i >= 8 else 0]
        return {name: words.repeat(2)[:length] for name, words in super().__getitem__(i).items()}


def _padded(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    longest += -longest % 8  # so that it can be cut for 2 workers, and for 4

    def stacked(name: str, with_what: int) -> Tensor:
        return torch.stack([F.pad(s[name], (0, longest - len(s[name])), value=with_what) for s in samples])

    samples = [{**sample, "attention_mask": torch.ones_like(sample["input_ids"])} for sample in samples]
    return {"input_ids": stacked("input_ids", 0), "attention_mask": stacked("attention_mask", 0),
            "labels": stacked("labels", IGNORED)}  # fmt: skip


def _loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = output.logits if hasattr(output, "logits") else output
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def _targets(batch: dict[str, Tensor]) -> float:
    return float((batch["labels"] != IGNORED).sum())


def _words(batch: dict[str, Tensor]) -> Tensor:
    return batch["input_ids"]


def _given(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def _stack(build: Callable[[], nn.Module], *, optimizer: str = "sgd") -> Task:
    return Task(
        model=build, data=Sentences(), optimizer=OPTIMIZERS[optimizer], inputs=_words, loss=_loss, defaults=STEPS
    )


methods, borrowing, sharing = partial(_stack, Methods), partial(_stack, Borrowing), partial(_stack, Sharing)
small, doubting = partial(_stack, Small), partial(_stack, Doubting)
deciding, experts, choosy = partial(_stack, Deciding), partial(_stack, Experts), partial(_stack, partial(Stack, Choosy))
dropped, ignored = partial(_stack, Dropped), partial(_stack, Ignored)


def sparse(*, optimizer: str = "sgd") -> Task:
    """An embedding with sparse gradients, which not all optimizers take."""
    makers = {"sgd": partial(torch.optim.SGD, lr=0.2), "adamw": partial(torch.optim.Adagrad, lr=0.02)}
    return replace(_stack(partial(Stack, sparse=True)), optimizer=makers[optimizer])


def pictures(*, optimizer: str = "sgd") -> Task:
    """`Convolutions`."""
    return Task(model=Convolutions, data=Pictures(), loss=lambda output, batch: F.cross_entropy(output, batch[1]),
                optimizer=OPTIMIZERS[optimizer], defaults=STEPS)  # fmt: skip


def lengths(*, optimizer: str = "sgd") -> Task:
    """Micro-batches of several lengths."""
    return _of_lengths(partial(Placed, 2 * LENGTH), (16, 16, 16, 8, 24), _words, optimizer)


def long(*, optimizer: str = "sgd") -> Task:
    """Micro-batches that are later longer than the model's table of positions."""
    return _of_lengths(partial(Placed, LENGTH), (16, 16, 16, 24), _words, optimizer)


def padded(*, optimizer: str = "sgd") -> Task:
    """A masked model of transformers, whose first samples have no padding."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _of_lengths(lambda: BertForMaskedLM(config), (16, 16, 10, 5), _given, optimizer)


def gpt2(*, optimizer: str = "sgd") -> Task:
    """A model of transformers with dropout after its embedding and in its blocks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=4, n_head=4, n_positions=LENGTH, attn_pdrop=0.0, use_cache=False,
        bos_token_id=1, eos_token_id=2)  # fmt: skip
    task = _stack(lambda: GPT2LMHeadModel(config), optimizer=optimizer)
    return replace(task, inputs=lambda batch: {"input_ids": batch["input_ids"]})


def _of_lengths(build: Callable[[], nn.Module], lengths: Sequence[int], inputs: Any, optimizer: str) -> Task:
    task = replace(_stack(build, optimizer=optimizer), data=Unequal(lengths), collate=_padded, inputs=inputs)
    return replace(task, weight=_targets)
