"""Makes a part of a mixture: a module with some of its experts, which computes with the mixture's own code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class PartialMixture:
    """How a part of a mixture is made from the whole.

    Args:
        kind: the mixture's class, before the layout was applied.
        experts, share: the number of experts in the mixture, and in the part.
        counts: whether attributes that hold the number of experts are set to `share` in the part.
    """

    kind: type[nn.Module]
    experts: int
    share: int
    counts: bool

    def of(self, module: nn.Module, part: Callable[[Tensor], Tensor]) -> nn.Module:
        """A mixture with ``part(parameter)`` for each parameter of `module`, and everything else unchanged."""
        return self._of(module, self.kind, part)

    def _of(self, module: nn.Module, kind: type[nn.Module], part: Callable[[Tensor], Tensor]) -> nn.Module:
        # Without copy or __init__: a sharded module supports neither, and its parts may require gradients.
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
    """Names of attributes of `module` that contain the number of experts."""
    return [name for name, value in vars(module).items()
            if type(value) is int and value == experts and "expert" in name.lower()]  # fmt: skip
