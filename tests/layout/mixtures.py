"""Mixtures of experts for layout tests: ours, one of transformers, and other implementations."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.support.training_runs import HERE, differ, losses
from unisono import Evaluation, Task
from unisono.tasks.builtin.gpt import GPT, Experts
from unisono.tasks.source import NamedTask

VOCABULARY, CONTEXT = 64, 16
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": CONTEXT,
}  # fmt: skip
OURS = GPT(layers=2, width=32, heads=4, context=CONTEXT, experts=4)


def ours() -> nn.Module:
    """Our own network."""
    return OURS.build()


def mixtral() -> nn.Module:
    """A tiny Mixtral."""
    import transformers

    config = transformers.MixtralConfig(**SHAPE, intermediate_size=48, num_local_experts=4)
    return Logits(transformers.MixtralForCausalLM(config))


def qwen() -> nn.Module:
    """A tiny Qwen, whose experts are narrower than it is."""
    import transformers

    return Logits(transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SHAPE, intermediate_size=48, moe_intermediate_size=24, num_experts=4)
    ))  # fmt: skip


def gpt_oss() -> nn.Module:
    """A tiny gpt-oss, whose experts have biases and are transposed."""
    import transformers

    config = transformers.GptOssConfig(**SHAPE, intermediate_size=48, head_dim=8, num_local_experts=4)
    return Logits(transformers.GptOssForCausalLM(config))


class Logits(nn.Module):
    """A language model that is asked for nothing but logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


class Lonely(nn.Module):
    """Tokens that all go to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, OURS.width)
        self.experts = Experts(OURS)
        self.head = nn.Linear(OURS.width, VOCABULARY)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        chosen = tokens.new_full((len(x), 1), OURS.experts - 1)
        logits: Tensor = self.head(x + self.experts(x, chosen, x.new_ones(len(x), 1)))
        return logits.unflatten(0, tokens.shape)


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


class Wanting(Mixing):
    """One whose code wants more than tokens, experts and weights."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, chosen, weights) + more


MODELS = {
    "ours": ours, "mixtral": mixtral, "qwen": qwen, "gpt_oss": gpt_oss,
    "lonely": Lonely, "lists": Lists, "mixing": Mixing,
}  # fmt: skip
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
        defaults={"global_batch": 24, "micro_batch": 6, "schedule": "Constant()"}, name="learning",
    )  # fmt: skip


def mixture(model: str, optimizer: str) -> NamedTask:
    """`learning` with these, for a run."""
    return NamedTask("tests.layout.mixtures:learning", {"model": model, "optimizer": optimizer}, HERE)


def loss(output: Tensor, batch: Any) -> Tensor:
    """The mean over tokens."""
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


LAYOUTS = {
    "Layout(expert=2)": 2,
    "Layout(expert=4)": 4,
    "Layout(shard=2, expert=2)": 4,
    "Layout(expert=2, tensor=2)": 4,
    "Layout(expert=2, pipeline=2)": 4,
    "Layout(expert=2, context=2)": 4,
    "Layout(shard=4, expert=2)": 8,
}


def main() -> None:
    """Every model, optimizer and layout against one worker; two replicas of two workers each against it too."""
    same = {"clip": 0.5, "micro_batch": 3}
    rows = [(layout, workers, {}) for layout, workers in LAYOUTS.items()]
    rows += [("Layout(expert=2)", 4, {"sync": sync}) for sync in ("AllReduce()", "LocalSGD(every=3)")]
    with tempfile.TemporaryDirectory() as made:
        for model in ("ours", "mixtral"):
            for optimizer in OPTIMIZERS:
                task, seen = mixture(model, optimizer), {}
                for number, (layout, workers, settings) in enumerate(rows):
                    if model == "mixtral" and "context" in layout:
                        continue  # it is not told where its tokens are
                    base = (2, "LocalSGD(every=3)") if "LocalSGD" in str(settings) else (1, "AllReduce()")
                    at = Path(made, f"{model}-{optimizer}-{number}")
                    if base not in seen:
                        seen[base] = losses(Path(f"{at}-base"), base[0], task, sync=base[1], **same)
                    found = losses(at, workers, task, layout=layout, **same, **settings)
                    print(f"{model:8} {optimizer:6} {workers} workers {layout:32} {settings.get('sync', ''):18} "
                          f"{differ(found, seen[base]):.1e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
