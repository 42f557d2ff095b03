"""Small models and worker programs for the tests of pipelines: ten steps in stages, and unsplit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.layout.pipeline import Pipeline, Stages, split, stages_for, stages_of
from unisono.tasks.builtin.gpt import GPT

STEPS = 10


def gpt() -> nn.Module:
    return GPT(layers=4, width=16, heads=2, context=16).build()


def tied_gpt() -> nn.Module:
    model = GPT(layers=4, width=16, heads=2, context=16).build()
    model.head.weight = model.tokens.weight
    return model


def frozen_gpt() -> nn.Module:
    """The first stage learns nothing; single weights in others do not either."""
    model = GPT(layers=4, width=16, heads=2, context=16).build()
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith(("tokens", "positions", "blocks.0", "blocks.2.norm")))
    return model


class Positions(nn.Module):
    """A model whose code torch.fx cannot follow (it asks how long its input is), its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        if tokens.shape[1] > 16:
            raise ValueError("at most 16 positions")
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, src_key_padding_mask=mask)
        return {"logits": self.head(x)}


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(72, 16),
        nn.Tanh(),
        nn.Linear(16, 5),
    )


class Skips(nn.Module):
    """A connection that skips two stages, a size that is needed late, and a tensor first turned on its side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.third, self.fourth = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(a.tanh()).transpose(0, 1)
        c = self.third(b.transpose(0, 1).relu()) + a * x.shape[0]
        out: Tensor = self.fourth(c + x)
        return out


class Shared(nn.Module):
    """One layer is called in several places, some weights are frozen, others never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Twice(self.again) for _ in range(4))
        self.head = nn.Linear(8, 5)
        self.unused, self.spare = nn.Linear(3, 3), nn.Parameter(torch.ones(2))
        self.blocks[2].own.weight.requires_grad_(False)
        self.blocks[3].own.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Twice(nn.Module):
    def __init__(self, again: nn.Linear) -> None:
        super().__init__()
        self.own, self.again = nn.Linear(8, 8), again

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(self.own(self.again(x)).tanh()) + x
        return out


class Branching(nn.Module):
    """What runs depends on values: no chain can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.rng_states, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.right(self.rng_states(x).relu()) if float(x.sum()) > 0 else self.rng_states(x)
        return out


class Remembering(Positions):
    """The last unit is given what the first one made too, past all stages between."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        if tokens.shape[1] > 16:
            raise ValueError("at most 16 positions")
        x = first = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x + first)}


class Residual(Positions):
    """Asks for its size, and adds up outside of its blocks."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        batch, length = tokens.shape
        if length > 16:
            raise ValueError("at most 16 positions")
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        for block in self.blocks:
            x = (x + block(x)) / 2
        return {"logits": self.head(x.view(batch, length, -1))}


def llama() -> nn.Module:
    """A causal language model of transformers, tiny, with its head tied to its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = LlamaForCausalLM(shape)
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.lower, self.upper = nn.LSTM(16, 16, batch_first=True), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.lower(self.tokens(tokens))
        x, (last, _) = self.upper(x)
        out: Tensor = self.head(x + last[0][:, None])
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "tied": tied_gpt,
    "frozen": frozen_gpt,
    "positions": Positions,
    "remembering": Remembering,
    "residual": Residual,
    "cnn": cnn,
    "skips": Skips,
    "shared": Shared,
    "lstm": Recurrent,
    "llama": llama,
}


@dataclass(frozen=True)
class Case:
    """Ten steps of one model; `sizes` are samples per micro-batch, `lengths` the sequences' lengths, step by step."""

    model: str
    schedule: str = "1F1B"
    optimizer: str = "sgd"
    cuts: tuple[str, ...] | None = None
    sizes: tuple[int, ...] = (2, 2, 2, 2)
    lengths: tuple[int, ...] = (8,)

    def __str__(self) -> str:
        extra = ("-ragged" if len(set(self.sizes)) > 1 else "") + ("-lengths" if len(self.lengths) > 1 else "")
        return f"{self.model}-{self.schedule}-{self.optimizer}{extra}"


def build(case: Case) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[case.model]()


def batch(case: Case, step: int) -> list[tuple[Any, Tensor]]:
    """The micro-batches of a step: inputs and targets."""
    stream = torch.Generator().manual_seed(step)
    length = case.lengths[step % len(case.lengths)]
    made: list[tuple[Any, Tensor]] = []
    for size in case.sizes:
        if case.model in ("cnn", "skips", "shared"):
            shape = (size, 3, 8, 8) if case.model == "cnn" else (size, 8)
            made.append((torch.randn(shape, generator=stream), torch.randint(5, (size,), generator=stream)))
            continue
        tokens = torch.randint(32, (size, length + 1), generator=stream)
        inputs: Any = tokens[:, :-1]
        if case.model in ("positions", "remembering", "residual"):
            inputs = {"tokens": inputs, "mask": torch.rand(size, length, generator=stream) > 0.8}
        made.append((inputs, tokens[:, 1:]))
    return made


def loss(output: Any, target: Tensor, weight: float) -> Tensor:
    logits = output if isinstance(output, Tensor) else output["logits"]
    return F.cross_entropy(logits.flatten(0, -2), target.flatten()) * weight


def weights(case: Case) -> list[float]:
    return [size / sum(case.sizes) for size in case.sizes]


def optimizer(case: Case, parameters: Any) -> torch.optim.Optimizer:
    learning = [p for p in parameters if p.requires_grad]
    gentle = case.model in ("positions", "remembering", "residual", "shared")
    if case.optimizer == "sgd":
        return torch.optim.SGD(learning, lr=0.02 if gentle else 0.3, momentum=0.9)
    return torch.optim.AdamW(learning, lr=1e-2)


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def whole(case: Case) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The losses of every step, and the state at the end, of the whole model on one process."""
    model = build(case)
    steps, optim = [], optimizer(case, model.parameters())
    for step in range(STEPS):
        optim.zero_grad()
        losses = [
            loss(call(model, inputs), target, weight)
            for (inputs, target), weight in zip(batch(case, step), weights(case))
        ]
        for one in losses:
            one.backward()
        optim.step()
        steps.append([one.item() for one in losses])
    return steps, model.state_dict()


def cut(case: Case, workers: int) -> Stages:
    model = build(case)
    return split(model, batch(case, 0)[0][0], stages_for(case.schedule, workers), case.cuts)


def pieces(case: Case, workers: int, rank: int, group: Any) -> Any:
    """The losses where they come out, the state of this worker's stages, and what it counts in norms."""
    stages = cut(case, workers)
    mine = {s: stages.modules[s] for s in stages_of(case.schedule, workers, len(stages.modules), rank)}
    entered: list[tuple[int, int]] = []

    def around(micro_batch: int, stage: int) -> Any:
        entered.append((micro_batch, stage))
        return nullcontext()

    pipeline = Pipeline(mine, len(stages.modules), group, case.schedule, tied=stages.tied, forward_context=around)
    held = pipeline.parameters()
    steps, optim = [], optimizer(case, held.values()) if any(p.requires_grad for p in held.values()) else None
    for step in range(STEPS):
        for p in held.values():
            p.grad = None
        micro_batches, weight = batch(case, step), weights(case)
        losses = pipeline.step(
            [inputs for inputs, _ in micro_batches],
            lambda i, output, b=micro_batches, w=weight: loss(output, b[i][1], w[i]),  # type: ignore[misc]
        )
        pipeline.sum_tied()
        if optim is not None:
            optim.step()
        pipeline.copy_tied()
        steps.append(losses)
    expected = [(m, s) for m in range(len(case.sizes)) for s in mine] * STEPS
    assert sorted(entered) == sorted(expected)
    for s in mine:
        assert [m for m, at in entered if at == s] == list(range(len(case.sizes))) * STEPS
    for stage in mine.values():
        stage.eval()
    outputs = pipeline.forward_only([inputs for inputs, _ in batch(case, 0)])
    state = {name: t for stage in mine.values() for name, t in stage.state_dict().items()}
    return steps, state, outputs, pipeline.counted_names()


def work(rank: int, size: int, store: str, cases: list[Case]) -> list[Any]:
    """What `pieces` gives for each case, or its error."""
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        return [pieces(case, size, rank, dist.group.WORLD) for case in cases]
    finally:
        dist.destroy_process_group()
