"""A plan, as a value, that says which matrices are split and how: from the user, the model's author, or `derive`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from torch import nn

from unisono.errors import InvalidInput
from unisono.layout.split_styles import COLUMN, GATHERED, ROW, SCATTERED, STYLES, VOCABULARY

# the words of transformers in `tp_plan` and `base_model_tp_plan`
_TRANSFORMERS = {
    "colwise": COLUMN,
    "rowwise": ROW,
    "rowwise_split_input": SCATTERED,
    "colwise_rep": GATHERED,
    "colwise_gather_output": GATHERED,
    "embedding_rowwise": VOCABULARY,
}
_WHOLE_ALREADY = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce")


@dataclass(frozen=True)
class TensorPlan:
    """How the matrices of a model are split over the workers of the ``tensor`` axis.

    Args:
        split: for each split module, by name or pattern (``layers.*.mlp.up``), its style, see ``Layout.plan``.
        whole: for each other module, by name, the reason why every worker holds all of it.
        local: for a module whose code computes with all heads, by name, how it is adapted to fewer heads:
            ``attributes`` (its numbers of heads are divided) or ``shapes`` (the sizes in its calls are divided).
        because: for a split module, by name, the origin of its split, unless that is its shape alone.

    Raises:
        InvalidInput: an unknown style.
    """

    split: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    local: Mapping[str, str] = field(default_factory=dict)
    because: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, word in self.split.items():
            if word not in STYLES:
                cure = "write one of " + ", ".join(STYLES)
                raise InvalidInput(f"tensor plan, {name}", word, "not a way to split a matrix", cure)
        for each in ("split", "whole", "local", "because"):
            object.__setattr__(self, each, MappingProxyType(dict(getattr(self, each))))

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorPlan, (dict(self.split), dict(self.whole), dict(self.local), dict(self.because))

    @classmethod
    def of(cls, mapping: Mapping[str, str]) -> TensorPlan:
        """The plan of a user's mapping from module names or patterns to styles.

        Raises:
            InvalidInput: an unknown style.
        """
        return cls(mapping)

    @classmethod
    def from_model(cls, model: nn.Module) -> TensorPlan | None:
        """The plan that a transformers model brings along; None if `model` has none."""
        own = _own_words(model)
        known = {name: _TRANSFORMERS[word] for name, word in own.items() if word in _TRANSFORMERS}
        foreign = {
            name: f'the model\'s own plan asks for "{word}", which is not supported'
            for name, word in own.items()
            if word not in _TRANSFORMERS and word not in _WHOLE_ALREADY
        }
        return cls(known, foreign) if own else None

    def resolved(self, model: nn.Module) -> TensorPlan:
        """The same plan, with the names of `model` in place of patterns.

        Raises:
            InvalidInput: a name or pattern that fits no module.
        """
        names = [name for name, _ in model.named_modules()]
        return TensorPlan(
            _expanded(self.split, names, required=True),
            _expanded(self.whole, names, required=False),
            self.local,
            self.because,
        )


def _own_words(model: nn.Module) -> dict[str, str]:
    if plan := getattr(model, "_tp_plan", None):
        return dict(plan)
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return {inside + name: word for name, word in base.items()}


def _expanded(words: Mapping[str, str], names: list[str], required: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for pattern, word in words.items():
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if required and not fitting:
            close = get_close_matches(pattern, names, n=1)
            cure = f"did you mean {close[0]}?" if close else "use names of model.named_modules()"
            raise InvalidInput("tensor plan", pattern, "no module has this name", cure)
        found |= dict.fromkeys(fitting, word)
    return found
