"""Derives which matrices of any model can be split: candidates by order and shape, verified numerically."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from unisono.layout.split_styles import COLUMN, GATHERED, HALVES, ROW, THIRDS, VOCABULARY
from unisono.layout.tensor.forward_trace import trace_forward
from unisono.layout.tensor.linear_modules import Matrix, is_vocabulary, matrix
from unisono.layout.tensor.split_trial import SplitTrial, Unit
from unisono.layout.tensor.tensor_plan import TensorPlan
from unisono.layout.tensor.verify import units

_OWN = "the model's own plan"
_UNVERIFIED = "without a sample input no split can be verified"


def derive(model: nn.Module, degree: int, sample: tuple[Any, ...] | Mapping[str, Any] | None) -> TensorPlan:
    """The plan for splitting `model` over `degree` workers, verified on `sample`.

    Entries of the model's own plan (transformers) have precedence, if they compute the same. In the remaining modules,
    attention and perceptrons are searched in forward order, then vocabulary and head. Attention has queries, keys and
    values, in three matrices or one, and an output projection. Without a sample everything stays whole.
    """
    if degree == 1 or sample is None:
        reason = _UNVERIFIED if degree > 1 else "there is one worker"
        return TensorPlan(whole=dict.fromkeys(unplanned_modules(model, ()), reason))
    search = _Search(model, SplitTrial(model, degree, trace_forward(model, sample)))
    own = TensorPlan.from_model(model)
    if own is not None:
        search.try_model_plan(own)
    search.blocks()
    search.vocabulary()
    return search.plan()


def unplanned_modules(model: nn.Module, named: Collection[str]) -> list[str]:
    """The modules with parameters of their own that are not in `named`."""
    return [name for name, _ in _owners(model) if name not in named]


@dataclass
class _Search:
    model: nn.Module
    trial: SplitTrial
    split: dict[str, str] = field(default_factory=dict)
    local: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    because: dict[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()

    def try_unit(self, unit: Unit) -> bool:
        """Add `unit` to the plan if it computes the same."""
        verdict = self.trial.of(unit)
        if verdict.reason:
            for name in unit:
                self.reasons.setdefault(name, verdict.reason)
            return False
        self.split |= unit
        self.local |= {verdict.scope: verdict.treatment} if verdict.treatment else {}
        return True

    def try_model_plan(self, own: TensorPlan) -> None:
        """Try the entries of the model's own plan; unsupported entries stay whole."""
        names = {name for name, _ in self.model.named_modules()}
        fitting = {pattern: word for pattern, word in own.split.items() if _fits(pattern, names)}
        resolved = TensorPlan(fitting, own.whole).resolved(self.model)
        self.reasons |= resolved.whole
        self.kept = frozenset(resolved.whole)
        for unit in units(resolved.split, self.trial.seen):
            if self.try_unit(unit):
                self.because |= dict.fromkeys(unit, _OWN)
            else:
                self.because |= {name: f"{_OWN} fails: {self.reasons[name]}" for name in unit}

    def blocks(self) -> None:
        """Try attention and perceptrons, found by the shapes of consecutively called matrices."""
        called = [(name, matrix(self.model.get_submodule(name))) for name in self.trial.seen.order]
        row = [(name, found) for name, found in called if found is not None]
        at = 0
        while at < len(row):
            taken = next((unit for unit in _guesses(row[at : at + 4]) if self._free(unit) and self.try_unit(unit)), {})
            at += len(taken) or 1

    def vocabulary(self) -> None:
        """Try the head and one embedding: with as many rows as the head has outputs, or else the largest."""
        rows = {name: _rows(m) for name, m in self.model.named_modules() if is_vocabulary(m)}
        rows = {name: many for name, many in rows.items() if name in self.trial.seen.calls}
        if not rows:
            return
        outputs = {name: many for name in self.trial.seen.order if (many := self._outputs(name))}
        chosen = max(rows, key=lambda name: (rows[name] in outputs.values(), rows[name]))
        small = dict.fromkeys(rows.keys() - {chosen}, "a small table: each lookup would cost a message")
        self.reasons = small | self.reasons
        heads = [name for name, many in outputs.items() if many == rows[chosen]]
        unit = {chosen: VOCABULARY, **dict.fromkeys(heads[-1:], GATHERED)}
        unit = {name: word for name, word in unit.items() if self._free({name: word})}
        weights = {id(self.model.get_submodule(name).weight) for name in unit}
        for part in [unit] if len(weights) < len(unit) else [{name: word} for name, word in unit.items()]:
            self.reasons = {name: why for name, why in self.reasons.items() if name not in part}
            self.try_unit(part)

    def _outputs(self, name: str) -> int:
        found = matrix(self.model.get_submodule(name))
        return found.outputs if found and name not in self.split else 0

    def plan(self) -> TensorPlan:
        """The accepted splits, and a reason for every other module with parameters."""
        whole = {
            name: self.reasons.get(name) or _unsplittable(module, name in self.trial.seen.calls)
            for name, module in _owners(self.model)
            if name not in self.split
        }
        because = {name: why for name, why in self.because.items() if name in self.split}
        return TensorPlan(self.split, whole, self.local, because)

    def _free(self, unit: Unit) -> bool:
        return not unit.keys() & (self.split.keys() | self.kept)


def _guesses(row: list[tuple[str, Matrix]]) -> Iterator[Unit]:
    """Candidate units from the first matrices of `row`, which are in the order of their calls."""
    names, found = [name for name, _ in row], [each for _, each in row]
    if len(row) >= 4 and len({m.inputs for m in found[:3]}) == 1:
        *key_value, query = sorted(m.outputs for m in found[:3])
        if query == found[3].inputs and len(set(key_value)) == 1 and query % key_value[0] == 0:
            yield {**dict.fromkeys(names[:3], COLUMN), names[3]: ROW}
    if len(row) >= 3 and found[0].inputs == found[1].inputs and found[0].outputs == found[1].outputs == found[2].inputs:
        yield {**dict.fromkeys(names[:2], COLUMN), names[2]: ROW}
    if len(row) >= 2:
        for blocks, word in ((1, COLUMN), (3, THIRDS), (3, COLUMN), (2, HALVES)):
            if found[0].outputs == blocks * found[1].inputs:
                yield {names[0]: word, names[1]: ROW}


def _fits(pattern: str, names: set[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _rows(module: nn.Module) -> int:
    return cast(nn.Embedding, module).num_embeddings


def _owners(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, m) for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None]


def _unsplittable(module: nn.Module, called: bool) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "a MultiheadAttention has queries, keys and values in one parameter, and splits it itself"
    if not called:
        return "it is not called as a module in the forward pass"
    found = matrix(module)
    if found is not None:
        return f"no later layer has its {found.outputs} outputs as inputs"
    return f"a {type(module).__name__} has no matrix to split"
