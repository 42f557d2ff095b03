"""A function mode that redirects those of a model's calls to torch that concern the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from unisono.errors import InvalidInput
from unisono.layout.context import positions
from unisono.layout.context.attention import FORMS, attend
from unisono.layout.context.dropout import dropout
from unisono.layout.context.group import Peers, as_peers
from unisono.layout.context.sequence_split import SequenceSplit


class attending(TorchFunctionMode):
    """A function mode in which a model that gets one worker's part of a sequence computes as on the whole sequence.

    Its tokens attend to all tokens, and have their positions in the whole sequence.

        with attending(group, split):
            part_loss(loss, model(part), part, share).backward()

    Neither torch nor the model is changed: the mode belongs to the thread and ends with the block. With activation
    checkpointing, call backward inside the block too.

    Args:
        group: a process group, a one-dimensional mesh, or `Peers`.
        split: how this micro-batch's sequence is split over the group.
        form: ``gather`` is faster; ``ring`` holds keys and values of two workers instead of all.
        keys: ``[N, length]`` for the whole micro-batch, false at padding; None: no padding.

    Raises:
        InvalidInput: an unknown form, or a split whose size is not the group's.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | Peers,
        split: SequenceSplit,
        form: str = "gather",
        keys: Tensor | None = None,
    ) -> None:
        super().__init__()
        peers = as_peers(group)
        if form not in FORMS:
            raise InvalidInput("form", form, "not a form of attention over workers", f"use one of {', '.join(FORMS)}")
        if split.size != peers.size:
            raise InvalidInput("context", split.size, f"the sequence is split into {split.size} parts, and the group "
                               f"has {peers.size} workers", "give each worker one part")  # fmt: skip
        # Compiled graphs of these functions would contain calls that this mode redirects again.
        whole: Any = torch.compiler.disable
        self._attend = partial(whole(attend), split, peers, form, keys)
        self._redirects: dict[Any, Callable[..., Any]] = {} if split.size == 1 else {
            F.scaled_dot_product_attention: self._attend,
            F.multi_head_attention_forward: self._multi_head,
            F.dropout: partial(whole(dropout), split, peers.rank, F.dropout),
            torch.arange: partial(whole(positions.arange), split, peers.rank),
            torch.diff: partial(whole(positions.diff), split, peers.rank),
            torch.Tensor.diff: partial(whole(positions.diff), split, peers.rank),
            torch.Tensor.__getitem__: partial(whole(positions.index), split, peers.rank),
            torch.Tensor.backward: partial(self._differentiate, torch.Tensor.backward),
            torch.autograd.backward: partial(self._differentiate, torch.autograd.backward),
            torch.autograd.grad: partial(self._differentiate, torch.autograd.grad),
            torch.Tensor.narrow: partial(whole(positions.narrow), split, peers.rank),
            torch.narrow: partial(whole(positions.narrow), split, peers.rank),
        }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._redirects.get(func, func)(*args, **(kwargs or {}))

    def _differentiate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Backward with the mode active, as backward may recompute activations."""
        with self:
            return _undispatched(original)(*args, **kwargs)

    def _multi_head(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """The attention of ``nn.MultiheadAttention``, by torch's own code, which calls `attend`. The attention weights
        are not computed: the second result is None."""
        ours = _undispatched(F.multi_head_attention_forward, scaled_dot_product_attention=self._attend)
        output, _ = ours(*args, **{**kwargs, "need_weights": False})
        return output, None


def _undispatched(original: Any, **names: Callable[..., Any]) -> FunctionType:
    """A copy of a torch function that does not dispatch to modes, and calls `names` instead of its globals.

    A mode is inactive while it handles a function, so calls inside the function would not reach it.
    """
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    known = {**original.__globals__, **dict.fromkeys(asks, lambda *_: False), **names}
    copy = FunctionType(original.__code__, known, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy
