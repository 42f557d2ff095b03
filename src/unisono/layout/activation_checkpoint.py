"""Activations that are computed once more in backward instead of kept (Chen et al. 2016, "Training deep nets with
sublinear memory cost"), on torch's own checkpoints.

A block keeps what it is given, and its forward pass runs again when its gradients are due: with the random numbers that
it drew and the buffers that it found, which then stay as they are. No module is put around it, so that names of
parameters and hooks are what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

# What takes long for the bytes that it leaves: products of matrices, attention, and what comes from other workers.
_SAVED = {
    "aten": ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
             "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
             "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"),
    "_c10d_functional": ("all_reduce", "reduce_scatter_tensor", "all_to_all_single"),
}  # fmt: skip


def checkpoint_block(block: nn.Module, kind: str) -> None:
    """From now on `block` computes its activations again in backward: all for ``blocks``, for ``selective`` all but
    those that take long."""
    make = partial(create_selective_checkpoint_contexts, _policy) if kind == "selective" else noop_context_fn
    before, contexts = block.forward, partial(_with_buffers, block, make)

    @wraps(before)
    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(before, **kwargs), *args, use_reentrant=False, context_fn=contexts)

    block.forward = MethodType(forward, block)


def _policy(_: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether what `operator` has computed is kept. Where it drew random numbers it runs again, or all that comes after
    it would draw others."""
    kept = operator._schema.name.rpartition(":")[2] in _SAVED.get(getattr(operator, "namespace", ""), ())
    kept = kept and not _dropout_p(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _dropout_p(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    names = [argument.name for argument in operator._schema.arguments]
    return float({**dict(zip(names, args)), **kwargs}.get("dropout_p", 0.0))


def _with_buffers(block: nn.Module, make: Callable[[], Contexts]) -> Contexts:
    first, again = make()
    buffers = _Buffers(block)
    return _Nested(buffers.in_forward, first), _Nested(buffers.in_recomputation, again)


class _Buffers:
    """The buffers of a block. Those that its forward pass writes into are for the second one what they were for the
    first, and what it writes is dropped."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.in_forward, self.in_recomputation = (
            _Callbacks(self._save, self._find_written),
            _Callbacks(self._restore, self._undo),
        )

    def _save(self) -> None:
        self._before = [
            (m, name, buffer, buffer._version, buffer.detach().clone())
            for m in self._block.modules()
            for name, buffer in m._buffers.items()
            if buffer is not None
        ]

    def _find_written(self) -> None:
        self._written = [
            (m._buffers, name, value)
            for m, name, buffer, version, value in self._before
            # Batch normalisation writes without telling the tensor.
            if isinstance(m, _NormBase) or m._buffers.get(name) is not buffer or buffer._version != version
        ]
        self._before = []

    def _restore(self) -> None:
        self._current = [(home, name, home[name]) for home, name, _ in self._written]
        for home, name, value in self._written:
            home[name] = value.clone()

    def _undo(self) -> None:
        for home, name, buffer in self._current:
            home[name] = buffer


class _Callbacks:
    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *_: object) -> None:
        self._leave()


class _Nested:
    """Two contexts as one, to be entered as often as they can be."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)
