"""Any causal language model of transformers, from random weights, on real text, byte by byte.

    unisono train examples/transformers_lm.py:lm --model.kind llama
    unisono train examples/transformers_lm.py:lm --model.kind gpt2 --text README.md docs --workers 2
    unisono train examples/transformers_lm.py:lm --model.layers 12 --workers 4 --layout 'Layout(shard=2, tensor=2)'

Nothing is downloaded: the configuration is made here, and the text is yours or the standard library's sources.
"""

import difflib
import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from unisono import Cosine, Evaluation, Task
from unisono.tasks.builtin.text import Corpus, collate, held_out_windows, standard_library, text_files, training_windows


@dataclass(frozen=True)
class Model:
    """Sizes under the names that configurations of transformers share."""

    kind: str = "llama"  # AutoConfig's model type: gpt2, gpt_neox, mistral, opt, qwen2…
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            near = difflib.get_close_matches(self.kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) or ["llama", "gpt2"]
            raise ValueError(f"{self.kind!r} is no causal language model of transformers; near: {', '.join(near)}")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")

    def build(self) -> nn.Module:
        config = AutoConfig.for_model(
            self.kind, vocab_size=256, hidden_size=self.width, intermediate_size=4 * self.width,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.heads,
            head_dim=self.width // self.heads, max_position_embeddings=self.context, is_decoder=True, use_cache=False,
            bos_token_id=0, eos_token_id=0, pad_token_id=None,
        )  # fmt: skip
        for name, value in config.to_dict().items():
            if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
                setattr(config, name, self.dropout)
        return AutoModelForCausalLM.from_config(config)


def loss(output: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), batch[1].flatten())


def bits(output: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output["logits"].transpose(1, 2), batch[1], reduction="none").mean(1) / math.log(2)


def lm(*, model: Model = Model(), text: tuple[str, ...] = ()) -> Task:
    """Train on files and directories named by `text`, or on the standard library's sources; the last twentieth is
    held out."""
    corpus = Corpus([file for path in text for file in text_files(path)] or standard_library())
    return Task(
        name=model.kind,
        model=model.build,
        data=partial(training_windows, corpus, model.context),
        collate=collate,  # bytes in, and the byte that follows each
        inputs=lambda batch: {"input_ids": batch[0]},
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1),
        evaluate=Evaluation(partial(held_out_windows, corpus, model.context), {"bits_per_byte": bits}, batch=32),
        schedule=Cosine(warmup=20, floor=0.1),
        defaults={"steps": 300, "global_batch": 32, "micro_batch": 8, "clip": 1.0},
    )
