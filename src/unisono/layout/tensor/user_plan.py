"""Checks a user's plan: a split that does not compute what the whole model computes is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from unisono.errors import InvalidInput
from unisono.layout.rank_mesh import nearest_divisor
from unisono.layout.split_styles import GROUPS, ROWS, VOCABULARY
from unisono.layout.tensor.derive_plan import unplanned_modules
from unisono.layout.tensor.linear_modules import matrix
from unisono.layout.tensor.tensor_plan import TensorPlan
from unisono.layout.tensor.verify import verify

_CURE = "change it, or omit it: modules that are not named stay whole"


def user_plan(
    model: nn.Module, degree: int, words: Mapping[str, str], sample: tuple[Any, ...] | Mapping[str, Any]
) -> TensorPlan:
    """The verified plan of `words`, a mapping from module names or patterns to styles, over `degree` workers.

    Raises:
        InvalidInput: an entry that fits no module, contradicts another, cannot be split, or changes the results on
            `sample`.
    """
    plan = TensorPlan.of(words).resolved(model)
    _check_once(words, plan)
    _check_sizes(model, degree, words, plan)
    verified = verify(model, plan, degree, sample)
    for name, why in verified.whole.items():
        raise InvalidInput("plan", _entry(words, name), f"{name or 'the model'}: {why}", _CURE)
    whole = dict.fromkeys(unplanned_modules(model, verified.split), "the given plan does not name it")
    return TensorPlan(verified.split, whole, verified.local)


def _check_once(words: Mapping[str, str], plan: TensorPlan) -> None:
    for name in plan.split:
        first, *others = _entries(words, name)
        for other in others:
            if words[other] != words[first]:
                problem = f"{name} also fits {other!r}: {words[other]!r}"
                raise InvalidInput("plan", _shown(words, first), problem, "name each module once")


def _check_sizes(model: nn.Module, degree: int, words: Mapping[str, str], plan: TensorPlan) -> None:
    """Refuse sizes that do not divide by `degree`, with the nearest degree that works."""
    sizes = {name: size for name, word in plan.split.items() if (size := _size(model.get_submodule(name), word))}
    for name, size in sizes.items():
        if size % degree:
            word, common = plan.split[name], math.gcd(*sizes.values())
            what = "inputs" if word in ROWS else "rows" if word == VOCABULARY else "outputs"
            parts = f" in each of its {GROUPS[word]} blocks" if word in GROUPS else ""
            problem = f"{name}: {size} {what}{parts} do not divide by tensor={degree}"
            cure = f"write tensor={nearest_divisor(common, degree)}, or omit it: modules that are not named stay whole"
            raise InvalidInput("plan", _entry(words, name), problem, cure)


def _size(module: nn.Module, word: str) -> int:
    """The size that the workers divide; 0 if `module` has none for this word."""
    found = matrix(module)
    if found is None:
        rows = getattr(module, "num_embeddings", 0) if word == VOCABULARY else 0
        return int(rows)
    size, groups = (found.inputs if word in ROWS else found.outputs), GROUPS.get(word, 1)
    return 0 if size % groups else size // groups


def _entries(words: Mapping[str, str], name: str) -> list[str]:
    return [pattern for pattern in words if fnmatchcase(name, pattern)]


def _entry(words: Mapping[str, str], name: str) -> str:
    return _shown(words, _entries(words, name)[0])


def _shown(words: Mapping[str, str], entry: str) -> str:
    return f"{entry!r}: {words[entry]!r}"
