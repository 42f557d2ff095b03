"""A model without numbers, run on inputs that have them: what depends on inputs alone keeps its numbers.

Models look at some of what they are given (is this mask all ones? is there more than one sequence in here?), and on the
meta device there is nothing to look at. Here only what weights or buffers went into has a shape alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_META, _REAL = torch.device("meta"), torch.device("cpu")


class Known(TorchDispatchMode):
    """Within the block, operations on real tensors alone are computed, wherever their result is wanted; all others
    give shapes. Their inputs may lie on the CPU and on the meta device at once.

    Fresh real numbers on the meta device (the first state of a recurrent layer) stay there: nobody looks at those, and
    torch wants some of them where the weights are. Positions and masks are whole numbers and truth values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._overwritten: dict[int, UntypedStorage] = {}  # real, with numbers that nobody knows any more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = all(self._is_known(x) for x in given)
        if known and kwargs.get("device") == _META:
            if not given and (fresh := func(*args, **kwargs)).is_floating_point():
                return fresh
            kwargs["device"] = _REAL
        if known:
            return func(*args, **kwargs)
        originals: dict[int, Tensor] = {}

        def shape(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.is_meta:
                return x
            twin = x.to(_META)
            originals[id(twin)] = x
            return twin

        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        shapes, named = tree_map(shape, (args, kwargs))
        found = func(*shapes, **named)
        for argument, value in zip(func._schema.arguments, shapes):
            if argument.alias_info is not None and argument.alias_info.is_write and id(value) in originals:
                storage = originals[id(value)].untyped_storage()
                self._overwritten[storage._cdata] = storage
        return tree_map(lambda x: originals.get(id(x), x) if isinstance(x, Tensor) else x, found)

    def _is_known(self, x: Tensor) -> bool:
        return not x.is_meta and x.untyped_storage()._cdata not in self._overwritten
