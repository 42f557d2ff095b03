"""Mixtures of experts to be laid out: our own, one of transformers, and some that are written in other ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from unisono import Evaluation, Task
from unisono.tasks.gpt import GPT

VOCABULARY, CONTEXT = 64, 16
OURS = GPT(layers=2, width=32, heads=4, context=CONTEXT, experts=4)


def ours() -> nn.Module:
    """Our own network."""
    return OURS.build()


def mixtral() -> nn.Module:
    """A tiny Mixtral, which gives logits."""
    return Logits(_mixtral())


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=CONTEXT,
        )
    )  # fmt: skip


class Logits(nn.Module):
    """A language model that is asked for nothing but logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


class Lists(nn.Module):
    """Experts in a list, those without tokens left out."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        best = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number in best.unique().tolist():
            out[best == number] = self.experts[number](x[best == number])
        return out


class Mixing(nn.Module):
    """No mixture of experts that can be split: each one's output depends on who else is there."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        each = torch.einsum("nd,nkde->nke", tokens, self.matrices[chosen])
        return (each * weights[..., None]).sum(1) + self.matrices.mean()


MODELS = {"ours": ours, "mixtral": mixtral, "lists": Lists, "mixing": Mixing}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
}


def learning(*, model: str = "ours", optimizer: str = "adamw") -> Task:
    """To say the next of made-up tokens."""
    random = torch.Generator().manual_seed(0)
    # Not all equally likely, so that there is something to learn.
    tokens = torch.rand(96, CONTEXT + 1, generator=random).pow(3).mul(VOCABULARY).long()
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    held_out = Evaluation(TensorDataset(*data[:20]), batch=6)
    return Task(
        model=MODELS[model], data=data, loss=loss,
        optimizer=OPTIMIZERS[optimizer], evaluate=held_out,
        defaults={"global_batch": 24, "micro_batch": 3, "schedule": "Constant()"}, name="learning",
    )  # fmt: skip


def loss(output: Tensor, batch: Any) -> Tensor:
    """The mean over tokens."""
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())
