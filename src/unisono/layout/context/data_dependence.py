"""Records which computed values a model's code reads: a branch on them may differ on a part of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DataDependence(TorchDispatchMode):
    """A dispatch mode that records what the code reads from tensors that depend on `weights`.

    Attributes:
        answers: what the code read, in order: numbers, booleans, and shapes that depend on values.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers: list[Any] = []
        self._depending: dict[int, UntypedStorage] = {}
        for weight in weights:
            self._note(weight)

    @property
    def decisions(self) -> list[Any]:
        """The booleans and shapes among the answers, on which code branches. Numbers differ wherever values do."""
        return [answer for answer in self.answers if isinstance(answer, bool | torch.Size)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        found = func(*args, **(kwargs or {}))
        if not any(map(self._depends, given)):
            return found
        if isinstance(found, bool | int | float):
            self.answers.append(found)
        elif torch.Tag.dynamic_output_shape in func.tags:
            self.answers += [x.shape for x in tree_leaves(found)]
        written = [value for argument, value in zip(func._schema.arguments, args)
                   if argument.alias_info is not None and argument.alias_info.is_write]  # fmt: skip
        for x in tree_leaves((found, written)):
            if isinstance(x, Tensor):
                self._note(x)
        return found

    def _depends(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._depending

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            self._depending[storage._cdata] = storage
