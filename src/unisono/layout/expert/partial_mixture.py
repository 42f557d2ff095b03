"""A mixture with some of its experts, which computes with the mixture's own code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class PartialMixture:
    """How a part of a mixture is made of the whole.

    Args:
        kind: the mixture's class, before anything was laid out.
        experts, share: how many the mixture has, and the part.
        counts: whether attributes that say how many experts there are say it of the part.
    """

    kind: type[nn.Module]
    experts: int
    share: int
    counts: bool

    def of(self, module: nn.Module, part: Callable[[Tensor], Tensor]) -> nn.Module:
        """One that holds ``part(parameter)`` for each parameter of `module`, and everything else as it is."""
        return self._of(module, self.kind, part)

    def _of(self, module: nn.Module, kind: type[nn.Module], part: Callable[[Tensor], Tensor]) -> nn.Module:
        # Neither copied nor initialised: a module that is sharded cannot be, and its parts may need gradients.
        twin = object.__new__(kind)
        own = vars(twin)
        own |= vars(module)
        own.pop("forward", None)
        own["_parameters"] = {n: None if p is None else part(p) for n, p in module._parameters.items()}
        own["_modules"] = {
            n: None if m is None else self._of(m, type(m), part) for n, m in module._modules.items()
        }  # fmt: skip
        if self.counts:
            own |= dict.fromkeys(count_attributes(module, self.experts), self.share)
        return twin


def count_attributes(module: nn.Module, experts: int) -> list[str]:
    """Attributes of `module` that say that it has so many experts."""
    return [name for name, value in vars(module).items()
            if type(value) is int and value == experts and "expert" in name.lower()]  # fmt: skip
