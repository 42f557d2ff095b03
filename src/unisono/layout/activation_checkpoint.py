"""Activation checkpointing (Chen et al. 2016, "Training deep nets with sublinear memory cost"), on torch's checkpoints.

A block saves its inputs, and backward runs its forward pass again. This recomputation draws the same random numbers and
reads the same values of buffers, and what it writes to buffers is discarded. No module wraps the block, so names of
parameters and hooks do not change.
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

# Operators whose outputs ``selective`` saves, as they are expensive per byte of output: products of matrices,
# attention, and collectives.
_SAVED = {
    "aten": ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
             "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
             "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"),
    "_c10d_functional": ("all_reduce", "reduce_scatter_tensor", "all_to_all_single"),
}  # fmt: skip


def checkpoint_block(block: nn.Module, kind: str) -> None:
    """Make `block` recompute its activations in backward.

    Kind ``blocks`` recomputes all of them, ``selective`` all but the outputs of expensive operators.
    """
    make = partial(create_selective_checkpoint_contexts, _policy) if kind == "selective" else noop_context_fn
    before, contexts = block.forward, partial(_with_buffers, block, make)

    @wraps(before)
    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(before, **kwargs), *args, use_reentrant=False, context_fn=contexts)

    block.forward = MethodType(forward, block)


def _policy(_: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether the output of `operator` is saved. An operator that draws random numbers is always recomputed: without
    its draws, all later draws of the recomputation would differ."""
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
    """The buffers of a block. Recomputation reads the values that the forward pass read, and its own writes are
    discarded."""

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
            # Batch normalization writes to its buffers without changing their version.
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
    """Two nested contexts as one. It can be entered again if both of them can."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)
