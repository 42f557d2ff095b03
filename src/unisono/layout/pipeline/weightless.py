"""Running a model on the meta device on inputs that have numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class weightless(TorchDispatchMode):
    """While active, tensors with numbers may meet such as are on the meta device, which then is where the result is.

    What a model computes of its inputs alone has numbers, even if it is asked for where the parameters are: code which
    looks at them (is anything masked?) goes its usual way.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
            args, kwargs = tree_map(_without_numbers, (args, kwargs))
        elif (device := kwargs.get("device")) is not None and torch.device(device).type == "meta":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _without_numbers(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_like(value, device="meta")
