"""Tasks with models of every kind for layout tests, each with SGD with momentum or AdamW.

They are tiny, but deep and wide enough for four stages and four heads. They can be learned, so that losses change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from unisono import Task
from unisono.tasks.builtin.gpt import GPT
from unisono.tasks.builtin.text import text

VOCABULARY, LENGTH, SAMPLES = 64, 16, 320
IGNORED = -100
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.02),  # sees tensors whole
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": LENGTH,
}  # fmt: skip
STEPS: dict[str, Any] = {"steps": 20, "global_batch": 32, "micro_batch": 4}


def gpt(*, optimizer: str = "sgd") -> Task:
    """The built-in task, on its own source."""
    task = text(text=(__file__,), model=GPT(layers=4, width=32, heads=4, context=LENGTH))
    return replace(task, optimizer=OPTIMIZERS[optimizer], schedule=None, evaluate=None, defaults=STEPS)


def llama(*, optimizer: str = "sgd") -> Task:
    """A causal model of transformers with fewer keys than queries; it looks whether positions are those of one text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**SIZES, "num_attention_heads": 8}, num_key_value_heads=4, use_cache=False)
    return _task("llama", lambda: LlamaForCausalLM(config), Sentences(), optimizer, inputs=_named, loss=_next)


def bert(*, optimizer: str = "sgd") -> Task:
    """A masked model of transformers, which looks for padding; micro-batches have unequally many targets."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    task = _task("bert", lambda: BertForMaskedLM(config), Sentences(masked=True), optimizer, inputs=_padded, loss=_next)
    return replace(task, weight=_targets)


def bart(*, optimizer: str = "sgd") -> Task:
    """An encoder and a decoder of transformers, of texts of unequal lengths; it makes masks of ones itself."""
    from transformers import BartConfig, BartForConditionalGeneration

    sides = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=32, max_position_embeddings=LENGTH, dropout=0.0, use_cache=False, **sides
    )
    model = lambda: BartForConditionalGeneration(config)
    return _task("bart", model, Sentences(), optimizer, inputs=_translated, loss=_next)


def cnn(*, optimizer: str = "sgd") -> Task:
    """Convolutions with batch normalisation."""
    return _task("cnn", _convolutions, Pictures(), optimizer)


def lstm(*, optimizer: str = "sgd") -> Task:
    """A recurrent network: its state passes along the sequence."""
    return _task("lstm", Recurrent, Sentences(), optimizer, inputs=_given, loss=_next)


def odd(*, optimizer: str = "sgd", dropout: float = 0.0, noise: float = 0.0, pause: int = -1) -> Task:
    """Tied, frozen and unused weights; in step `pause`, counted from 0, nothing is learned."""
    task = _task("odd", lambda: Odd(dropout), Sentences(noise=noise), optimizer, inputs=_given, loss=_next)
    return replace(task, schedule=lambda step, steps: float(step != pause))


def drops(*, optimizer: str = "sgd") -> Task:
    """`odd` with dropout."""
    return odd(optimizer=optimizer, dropout=0.1)


class Sentences(Dataset[Any]):
    """Each word follows from the one before, but for every tenth; some words are to be guessed where `masked`, and
    each is replaced with a probability of `noise`, anew whenever it is fetched."""

    def __init__(self, masked: bool = False, noise: float = 0.0) -> None:
        self.noise = noise
        random = torch.Generator().manual_seed(0)
        words = torch.randint(VOCABULARY - 1, (SAMPLES, LENGTH + 1), generator=random)
        for at in range(LENGTH):
            known = torch.rand(SAMPLES, generator=random) < 0.9
            words[:, at + 1] = torch.where(known, (5 * words[:, at] + 3) % (VOCABULARY - 1), words[:, at + 1])
        self.given, self.wanted = words[:, :-1].clone(), words[:, 1:].clone()
        if masked:
            hidden = torch.rand(SAMPLES, LENGTH, generator=random) < 0.3
            self.wanted = self.given.masked_fill(~hidden, IGNORED)
            self.given = self.given.masked_fill(hidden, VOCABULARY - 1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        given = self.given[i]
        if self.noise:
            given = torch.where(torch.rand(LENGTH) < self.noise, torch.randint(VOCABULARY, (LENGTH,)), given)
        return {"input_ids": given, "labels": self.wanted[i]}


class Pictures(Dataset[Any]):
    """Noise with a bright corner, which is the label."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.labels = torch.randint(4, (SAMPLES,), generator=random)
        self.pictures = torch.randn(SAMPLES, 3, 8, 8, generator=random)
        for i, label in enumerate(self.labels.tolist()):
            self.pictures[i, :, 4 * (label // 2) :, 4 * (label % 2) :] += 0.5

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.pictures[i], self.labels[i]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.tokens(tokens))
        logits: Tensor = self.head(states)
        return logits


class Odd(nn.Module):
    """Blocks that add to a stream; the head is the embedding, a block and a table do not learn, and
    nobody uses two more."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(LENGTH, 32)
        self.blocks = nn.ModuleList(Mixing(32, dropout) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.unused, self.spare = nn.Linear(3, 3), nn.Parameter(torch.ones(2))
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.positions.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Mixing(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return out


def _convolutions() -> nn.Module:
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    return nn.Sequential(
        block(3, 8), block(8, 8), nn.AvgPool2d(2), block(8, 16), block(16, 16), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(64, 4)
    )  # fmt: skip


def _task(name: str, model: Callable[[], nn.Module], data: Dataset[Any], optimizer: str, **more: Any) -> Task:
    loss = lambda output, batch: F.cross_entropy(output, batch[1])
    rest = {"loss": loss, **more}
    return Task(model=model, data=data, optimizer=OPTIMIZERS[optimizer], defaults=STEPS, name=name, **rest)


def _given(batch: dict[str, Tensor]) -> Tensor:
    return batch["input_ids"]


def _named(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"input_ids": batch["input_ids"]}


def _translated(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    words = batch["input_ids"]
    return {"input_ids": words[:, : LENGTH - 4], "decoder_input_ids": words}


def _padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}


def _next(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = output.logits if hasattr(output, "logits") else output
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def _targets(batch: dict[str, Tensor]) -> float:
    return float((batch["labels"] != IGNORED).sum())
