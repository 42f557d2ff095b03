"""Counts activations saved for backward and collective messages while a step runs, with or without real tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True, order=True)
class CollectiveCall:
    """One collective operation or message among `ranks`, with its size.

    Args:
        kind: ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``all-to-all``, ``broadcast``, ``send`` or
            ``exchange`` (boxes of tensors that an optimizer needs whole).
        ranks: the ranks of the group, including this one. The receiver of a send is not recorded.
        bytes: the size of the whole tensor. An all-gather or reduce-scatter counts the parts of all ranks together. An
            all-to-all or exchange counts only the bytes for other ranks.
    """

    kind: str
    ranks: tuple[int, ...]
    bytes: int

    def sent(self, backend: str) -> float:
        """The number of bytes that one rank sends with `backend`.

        Sums, gathers and scatters are counted as rings (Patarasuk & Yuan 2009), as in NCCL and gloo. gloo implements
        reduce-scatter as all-reduce.
        """
        n = len(self.ranks)
        around = (n - 1) / n
        passes = {"send": 1.0, "all-to-all": 1.0, "exchange": 1.0, "broadcast": 1 / n, "all-reduce": 2 * around}
        if backend == "gloo":
            passes["reduce-scatter"] = 2 * around
        return self.bytes * passes.get(self.kind, around)


class CollectiveCounter(TorchDispatchMode):
    """A dispatch mode that counts every collective and send of this thread and of its backward passes in `seen`.

    An operation on fake tensors is called with empty tensors in their place, so it sends no data.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[CollectiveCall] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.rpartition(":")[2]
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and name in _KINDS:
            kind, which = _KINDS[name]
            ranks = _ranks((*args, *kwargs.values()))
            size = sum(x.nbytes for x in tree_leaves(args[which]) if isinstance(x, Tensor))
            self.seen[CollectiveCall(kind, ranks, round(size * _byte_factor(name, args, ranks)))] += 1
        if func.namespace == "c10d" and any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs))):
            return _call_on_empty(func, args, kwargs)
        return func(*args, **kwargs)


_KINDS = {  # the kind of each operator, and the index of the argument that is sent
    "allreduce_": ("all-reduce", 0),
    "all_reduce": ("all-reduce", 0),
    "all_reduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 1),
    "all_gather_into_tensor": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "alltoall_base_": ("all-to-all", 1),
    "alltoall_": ("all-to-all", 1),
    "all_to_all_single": ("all-to-all", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
}
_PER_RANK = ("allgather_", "all_gather_into_tensor")  # operators whose argument is one rank's part


def _byte_factor(name: str, args: Any, ranks: tuple[int, ...]) -> float:
    """The factor from the bytes of the argument to `CollectiveCall.bytes`."""
    if name in _PER_RANK:
        return float(len(ranks))
    if name == "all_to_all_single" and sum(args[2]):
        kept: int = args[2][ranks.index(dist.get_rank())]
        return 1 - kept / float(sum(args[2]))
    return (len(ranks) - 1) / len(ranks) if name.startswith("alltoall") else 1.0


def _ranks(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """The ranks of the process group in an operator's arguments, where it is a name or a boxed object."""
    for argument in arguments:
        if isinstance(argument, str) and argument not in _REDUCE_OPS:
            named: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
            return tuple(dist.get_process_group_ranks(named(argument)))
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
    raise AssertionError("a collective without a group")


_REDUCE_OPS = ("sum", "avg", "min", "max", "product")


def _call_on_empty(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of `func` called with empty tensors in place of fake ones, with the fake tensors put back into it."""
    blanks: dict[int, tuple[Tensor, Tensor]] = {}

    def blank(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        empty = torch.empty(0)
        blanks[id(empty)] = (empty, value)
        return empty

    with _disable_current_modes():
        result = func(*tree_map(blank, args), **tree_map(blank, kwargs))
    return tree_map(lambda value: blanks[id(value)][1] if id(value) in blanks else value, result)


@dataclass
class SavedTensors:
    """Counts the bytes that autograd saves for backward: each storage once, without parameters and buffers.

    Attributes:
        gathered: for each sharded module, the bytes of parameters that were unsharded when it was called.
    """

    gathered: dict[nn.Module, int] = field(default_factory=dict)
    _storages: dict[int, tuple[UntypedStorage, int]] = field(default_factory=dict)
    _weights: dict[int, UntypedStorage] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes saved so far."""
        return sum(size for number, (_, size) in self._storages.items() if number not in self._weights)

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        """A context that counts the forward passes of `model`."""
        with ExitStack() as stack:
            for module in model.modules():
                stack.callback(module.register_forward_pre_hook(self._record_parameters).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
            yield

    def _record_parameters(self, module: nn.Module, inputs: Any) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            storage = _local(tensor).untyped_storage()
            self._weights[storage._cdata] = storage
        if isinstance(module, FSDPModule):
            inner = {p for child in module.modules() if child is not module and isinstance(child, FSDPModule)
                     for p in child.parameters()}  # fmt: skip
            self.gathered[module] = sum(_local(p).nbytes for p in module.parameters() if p not in inner)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        self._storages.setdefault(storage._cdata, (storage, storage.nbytes()))
        return tensor


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return local
