"""Decides which mixtures of experts are split, and how: candidates are found by structure and verified numerically."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from unisono.errors import InvalidInput
from unisono.layout.expert.find_experts import expert_count, expert_lists, find_mixtures, shared_parameters
from unisono.layout.expert.partial_mixture import PartialMixture
from unisono.layout.expert.routing import MixtureArguments
from unisono.layout.expert.verify import mixture_signature, verify_mixture
from unisono.layout.rank_mesh import nearest_divisor

CURE = "omit expert=, or hold the experts as transformers does: one module called with tokens, expert indices "
CURE += "and weights, each of whose parameters has the experts in its first dimension"
TIED = "another module holds some of its parameters too"


@dataclass(frozen=True)
class MixtureSplit:
    """A mixture that is split, with the names of its arguments and the way to make its parts."""

    module: nn.Module
    calling: MixtureArguments
    part: PartialMixture


@dataclass(frozen=True)
class ExpertPlan:
    """How the mixtures of a model are split over the workers of the ``expert`` axis.

    Args:
        split: the mixtures that are split, by name.
        whole: for each other mixture, by name, the reason why every worker holds all of it.
    """

    split: Mapping[str, MixtureSplit] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)


def derive(model: nn.Module, degree: int) -> ExpertPlan:
    """The plan for splitting `model` over `degree` workers; each mixture is verified on random tokens.

    `model` may be on the meta device. Of mixtures with equal signatures, one is verified.

    Raises:
        InvalidInput: no mixture can be split, or the experts of one do not divide by `degree`.
    """
    found = dict(find_mixtures(model))
    check_divides(model, degree)
    verdicts: dict[object, str | tuple[MixtureArguments, PartialMixture]] = {}
    split: dict[str, MixtureSplit] = {}
    whole, held_twice = dict(expert_lists(model)), shared_parameters(model)
    for name, module in found.items():
        like = mixture_signature(module)
        if like not in verdicts:
            verdicts[like] = verify_mixture(module, degree)
        verdict = TIED if held_twice & set(module.parameters()) else verdicts[like]
        if isinstance(verdict, str):
            whole[name] = verdict
        else:
            split[name] = MixtureSplit(module, *verdict)
    if not split:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(whole.items())[:3])
        problem = "the model has no mixture of experts that can be split" + (f" ({reasons})" if reasons else "")
        raise InvalidInput("expert", degree, problem, CURE)
    return ExpertPlan(split, whole)


def check_divides(model: nn.Module, degree: int) -> None:
    """Raise `InvalidInput` if the experts of a mixture do not divide by `degree`."""
    numbers = {name: expert_count(module) for name, module in find_mixtures(model)}
    broken = {name: number for name, number in numbers.items() if number % degree}
    if broken:
        name, number = next(iter(broken.items()))
        nearest = nearest_divisor(math.gcd(*numbers.values()), degree)
        raise InvalidInput(
            "expert", degree, f"the {number} experts of {name} do not divide by {degree}", f"write expert={nearest}"
        )
