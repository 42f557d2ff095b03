"""Tries one unit of a plan on the inputs of its block: whether it can be split, and how its code must be adapted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from unisono.layout.split_styles import COLUMNS, GATHERED, GROUPS, ROW, ROWS, THIRDS, VOCABULARY
from unisono.layout.tensor import attention_heads as heads
from unisono.layout.tensor.emulated_group import emulate
from unisono.layout.tensor.forward_trace import Call, ForwardTrace, evaluating, snapshot
from unisono.layout.tensor.linear_modules import is_vocabulary, matrix
from unisono.layout.tensor.materialize import materialized, materialized_inputs
from unisono.layout.tensor.module_equivalence import block_signature
from unisono.layout.tensor.numeric_compare import difference, run_pass

TREATMENTS = ("", "attributes", "shapes")

Unit = Mapping[str, str]
"""The styles, by module name, of modules that can only be split together: columns, and the row that follows them."""


@dataclass(frozen=True)
class SplitVerdict:
    """The answer to whether a unit can be split, and how.

    Args:
        reason: why it cannot be split; empty if it can.
        scope: the innermost called module that holds the whole unit.
        treatment: how `scope` is adapted to fewer heads; empty if it needs no adaptation.
    """

    reason: str = ""
    scope: str = ""
    treatment: str = ""


@dataclass(frozen=True)
class SplitTrial:
    """Tries units of `model` on the traced inputs; of blocks with equal signatures, only the first."""

    model: nn.Module
    degree: int
    seen: ForwardTrace
    tried: dict[Any, str] = field(default_factory=dict)

    def of(self, unit: Unit) -> SplitVerdict:
        """Whether `unit` can be split, and how."""
        if reason := self._impossible(unit):
            return SplitVerdict(reason)
        if not set(unit.values()) & {ROW, *COLUMNS}:
            reasons = (self._differs(name, {name: word}, "") for name, word in unit.items())
            return SplitVerdict(next(filter(None, reasons), ""))
        scope = self.scope(unit)
        refused = []
        for treatment in TREATMENTS:
            reason = self._differs(scope, unit, treatment)
            if not reason:
                return SplitVerdict("", scope, treatment)
            refused.append(reason)
        return SplitVerdict(self._heads(unit, scope) or f"split over {self.degree}, {refused[0]}")

    def scope(self, unit: Unit) -> str:
        """The innermost called module that holds all of `unit`."""
        paths = [name.split(".")[:-1] for name in unit]
        common = []
        for level in zip(*paths):
            if len(set(level)) > 1:
                break
            common.append(level[0])
        while common and ".".join(common) not in self.seen.calls:
            common.pop()
        return ".".join(common)

    def _heads(self, unit: Unit, scope: str) -> str | None:
        attends = len(unit) == 4 or THIRDS in unit.values()
        return heads.indivisible_heads(self.model.get_submodule(scope), self.degree) if attends else None

    def _impossible(self, unit: Unit) -> str:
        words = list(unit.values())
        if ROW not in words and set(words) & set(COLUMNS):
            return "a column without a later row layer that sums its parts"
        if words == [ROW]:
            return "a row without an earlier column layer that computes its part"
        unfit = ((name, self._unfit(name, unit)) for name in unit)
        return next((f"{name}: {why}" if len(unit) > 1 else why for name, why in unfit if why), "")

    def _unfit(self, name: str, unit: Unit) -> str:
        word, module = unit[name], self.model.get_submodule(name)
        if name not in self.seen.calls:
            return f"{name or 'the model'} is not called as a module in the forward pass"
        found = matrix(module)
        if word == VOCABULARY:
            if not is_vocabulary(module):
                return f"a {type(module).__name__} is not a plain embedding"
            counted = cast(nn.Embedding, module).num_embeddings
        elif found is None:
            return f"a {type(module).__name__} has no matrix to split"
        else:
            counted = found.inputs if word in ROWS else found.outputs
        parts = self.degree * GROUPS.get(word, 1)
        if counted % parts:
            return f"its {counted} {'inputs' if word in ROWS else 'rows'} do not divide by {parts}"
        return self._used_elsewhere(name, unit)

    def _used_elsewhere(self, name: str, unit: Unit) -> str:
        module = self.model.get_submodule(name)
        same = {other for other, word in unit.items() if word in (VOCABULARY, GATHERED)} | {name}
        for key, parameter in module.named_parameters(recurse=False):
            for user in sorted(self.seen.users.get(id(parameter), set()) - {name}):
                if user not in same or unit[name] not in (VOCABULARY, GATHERED) or self._upside_down(same):
                    return f"its {key} is also used by {user or 'the model'}, which is not split the same way"
        return ""

    def _upside_down(self, names: set[str]) -> bool:
        found = (matrix(self.model.get_submodule(name)) for name in names)
        return any(each is not None and each.output_dimension for each in found)

    def _differs(self, scope: str, unit: Unit, treatment: str) -> str:
        """How a split of `unit` differs from the whole; empty without a difference."""
        kind = block_signature(self.model, scope, unit, self.seen.calls[scope]), treatment
        if kind not in self.tried:
            self.tried[kind] = self._compared(scope, unit, treatment)
        return self.tried[kind]

    def _compared(self, scope: str, unit: Unit, treatment: str) -> str:
        module, call = self.model.get_submodule(scope), materialized_inputs(self.seen.calls[scope])

        def whole(call: Call) -> Any:
            args, kwargs = snapshot(call)
            return module(*args, **kwargs)

        def split(call: Call) -> Any:
            return emulate(self.model, scope, unit, self.degree, treatment, call)

        with evaluating(self.model), materialized(module), torch.enable_grad():
            try:
                expected, outcome = run_pass(whole, module, call), run_pass(split, module, call)
            except Exception as error:  # the user's code may raise anything for a part
                return f"its code fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return difference(expected, outcome)
