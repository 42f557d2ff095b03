"""Horovod's collective operations. Operations of several workers belong together by their names, in any order.

A function with ``_async`` returns a `Handle`, for `poll` and `synchronize`. One that ends with ``_`` writes the result
into its argument. A grouped one is a single operation on several tensors. The others can be differentiated: as in
Horovod, the gradient is that of the mean of all workers' losses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.horovod.compression import Compression, cast_only
from unisono.horovod.errors import HorovodInternalError, InvalidArgument
from unisono.horovod.handle import Handle, Unpack
from unisono.horovod.participant import current
from unisono.horovod.process_sets import ProcessSet, global_process_set, membership
from unisono.horovod.reductions import Adasum, Average, ReduceOp, Sum
from unisono.horovod.requests import ADDITIVE, ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, BROADCAST, REDUCESCATTER

_REDUCED = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
            torch.float32, torch.float64}  # fmt: skip


def poll(handle: Handle) -> bool:
    """Whether `synchronize` returns at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result.

    Raises:
        HorovodInternalError: workers asked for different things, or one is lost.
    """
    return current().wait(handle)


def join(device: int = -1) -> int:
    """Collective: this worker has no more data. It contributes zeros to sums and means until all workers have joined.

    Args:
        device: has no effect; zeros are made where the others' tensors are.

    Returns:
        The rank of the worker that joined last.
    """
    return current().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Collective: wait until all members have called it."""
    current().agree(BARRIER, None, membership(process_set)[0])


# --- allreduce


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Collective: start `allreduce`."""
    factors = prescale_factor, postscale_factor
    return _reduce([tensor], [torch.empty_like(tensor)], _first, name, _operator(op, average), factors, process_set)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Collective: the reduction of the `tensor` of all members; all have the same shape.

    Args:
        average: deprecated; use `op`.
        name: the same on all members; None: operations without a name belong together by their order.
        compression: what is sent, as by `Compression.fp16`.
        op: `Average` by default.
        prescale_factor, postscale_factor: factors of what is reduced, and of the result.

    Raises:
        InvalidArgument: an argument cannot work.
        HorovodInternalError: members differ in dtype, shape or arguments, or one is lost.
    """
    (result,) = grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor,
                                  process_set)  # fmt: skip
    return result


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Collective: start `allreduce_`."""
    factors = prescale_factor, postscale_factor
    return _reduce([tensor], [tensor], _first, name, _operator(op, average), factors, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Collective: as `allreduce`, in place, and not differentiable."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Collective: start `grouped_allreduce`."""
    outputs, factors = [torch.empty_like(x) for x in tensors], (prescale_factor, postscale_factor)
    return _reduce(tensors, outputs, list, name, _operator(op, average), factors, process_set)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Collective: as `allreduce`, of several tensors of one dtype."""
    chosen, method = _operator(op, average), cast_only(compression)

    def start(xs: Sequence[Tensor], name: str | None = None) -> Handle:
        return grouped_allreduce_async(xs, None, name, chosen, prescale_factor, postscale_factor, process_set)

    def gradients(gs: Sequence[Tensor]) -> list[Tensor]:
        if chosen.name not in ADDITIVE:
            raise InvalidArgument("op", chosen.name, "has no gradient here", "use hvd.Sum or hvd.Average")
        return synchronize(start(gs))  # type: ignore[no-any-return]

    pairs = [method.compress(x) for x in tensors]
    received = _differentiable(lambda xs: start(xs, name), gradients, [x for x, _ in pairs])
    return [method.decompress(x, context) for x, (_, context) in zip(received, pairs)]


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Collective: start `grouped_allreduce_`."""
    factors = prescale_factor, postscale_factor
    return _reduce(tensors, tensors, list, name, _operator(op, average), factors, process_set)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Collective: as `grouped_allreduce`, in place, and not differentiable."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Collective: start the reduction of sparse tensors, of which indices and values are gathered.

    Args:
        op: `Sum` or `Average`.

    Returns:
        A function that waits for the result. Its indices may repeat.
    """
    if ReduceOp(op).name not in ADDITIVE:
        raise InvalidArgument("op", op, "is not for sparse tensors", "use hvd.Sum or hvd.Average")
    # Members may have different numbers of indices, which are the second dimension.
    indices = allgather_async(tensor._indices().t(), name and f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), name and f"{name}.values", process_set)

    def result() -> Tensor:
        summed, places = synchronize(values), synchronize(indices).t()
        summed = summed / len(membership(process_set)[1]) if op == Average else summed
        return torch.sparse_coo_tensor(places, summed, tensor.shape)

    return result


def compressed_allreduce_async_(tensors: Sequence[Tensor], name: str, compression: str, scale: float = 1.0) -> Handle:
    """Collective: start the mean of all workers' tensors, in place, by a compressor of Unisono in the notation.

    Args:
        scale: of the result.
    """
    xs = _checked(tensors, ALLREDUCE)
    return current().submit(ALLREDUCE, xs, list, name=name, outputs=tensors, op=Average.name, compress=compression,
                            postscale=scale)  # fmt: skip


# --- allgather


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Collective: start `allgather`."""
    return _gather([tensor], _first, name, process_set)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Collective: the tensors of all members, one after the other along the first dimension, in which they may differ.

    Raises:
        InvalidArgument: `tensor` has no dimension.
        HorovodInternalError: members differ in dtype or another dimension, or one has joined or is lost.
    """
    (result,) = grouped_allgather([tensor], name, process_set)
    return result


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Collective: start `grouped_allgather`."""
    return _gather(tensors, list, name, process_set)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Collective: as `allgather`, of several tensors of one dtype."""
    rows = [x.shape[0] if x.dim() else 0 for x in tensors]

    def gradients(gs: Sequence[Tensor]) -> list[Tensor]:
        means = grouped_allreduce(gs, op=Average, process_set=process_set)
        counts = allgather(torch.tensor([rows]), process_set=process_set)
        before = counts[: process_set.rank()].sum(0).tolist()
        return [mean.narrow(0, start, count) for mean, start, count in zip(means, before, rows)]

    return _differentiable(lambda xs: grouped_allgather_async(xs, name, process_set), gradients, tensors)


# --- broadcast


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Collective: start `broadcast`."""
    return _broadcast(tensor, torch.empty_like(tensor), root_rank, name, process_set)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Collective: the tensor of the worker with the global rank `root_rank`; all have the same shape.

    Raises:
        HorovodInternalError: members differ in dtype, shape or root, or one has joined or is lost.
    """

    def gradients(gs: Sequence[Tensor]) -> list[Tensor]:
        (mean,) = grouped_allreduce(gs, op=Average, process_set=process_set)
        return [mean if current().rank == root_rank else torch.zeros_like(mean)]

    def start(xs: Sequence[Tensor]) -> Handle:
        return broadcast_async(xs[0], root_rank, name, process_set)

    (result,) = _differentiable(start, gradients, [tensor])
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Collective: start `broadcast_`."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Collective: as `broadcast`, in place, and not differentiable."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


# --- alltoall


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Collective: start `alltoall`; the result of the handle has the received splits in any case.

    Raises:
        InvalidArgument: `splits` do not fit `tensor` or the members.
    """
    members, ranks = membership(process_set)
    (x,) = _checked([tensor], ALLTOALL)
    rows = _splits(x.shape[0], splits, len(ranks))
    given = splits if isinstance(splits, Tensor) else None

    def unpack(outputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        return outputs[0], outputs[1] if given is None else outputs[1].to(given)

    return current().submit(ALLTOALL, [x], unpack, name=name, members=members, numbers=rows)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Collective: send rows of `tensor` to each member, in order; returns what was received, in the order of members.

    Args:
        splits: the rows for each member, whole numbers; rows behind them are not sent. None: all have equally many.

    Returns:
        What was received; with `splits`, also how many rows are from each member.

    Raises:
        InvalidArgument: `splits` do not fit `tensor` or the members.
        HorovodInternalError: members differ in dtype or another dimension, or one has joined or is lost.
    """
    received: Tensor | None = None

    def start(xs: Sequence[Tensor]) -> Handle:
        return alltoall_async(xs[0], splits, name, process_set)

    def gradients(gs: Sequence[Tensor]) -> list[Tensor]:
        returned, _ = synchronize(alltoall_async(gs[0], received, None, process_set))
        unsent = tensor.shape[0] - returned.shape[0]
        return [torch.cat([returned, returned.new_zeros((unsent, *tensor.shape[1:]))]) if unsent else returned]

    result, received = _differentiable(start, gradients, [tensor])
    return result if splits is None else (result, received)


def _splits(rows: int, splits: Tensor | Sequence[int] | None, members: int) -> tuple[int, ...]:
    if splits is None:
        if rows % members:
            raise InvalidArgument("tensor", f"{rows} rows", f"cannot be divided by {members} members",
                                  "give the rows for each member as splits")  # fmt: skip
        return (rows // members,) * members
    if isinstance(splits, Tensor):
        if splits.is_floating_point() or splits.is_complex() or splits.dim() != 1:
            raise InvalidArgument("splits", f"{splits.dtype} of {list(splits.shape)}", "is not a list of whole numbers",
                                  "use dtype torch.int32, and one number for each member")  # fmt: skip
        splits = splits.tolist()
    if len(splits) != members or min(splits) < 0 or sum(splits) > rows:
        raise InvalidArgument("splits", list(splits), f"does not fit {members} members and {rows} rows",
                              "give a number of rows for each member, in all no more than there are")  # fmt: skip
    return tuple(int(each) for each in splits)


# --- reducescatter


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Collective: start `reducescatter`."""
    factors = prescale_factor, postscale_factor
    return _reduce([tensor], None, _first, name, op, factors, process_set, REDUCESCATTER)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Collective: this member's rows of the reduction of all members' `tensor`; all have the same shape.

    Rows are divided evenly; where they cannot be, the first members have one more. Arguments are as for `allreduce`.

    Raises:
        InvalidArgument: `tensor` has no dimension.
        HorovodInternalError: `op` is Adasum; members differ in dtype, shape or arguments, or one is lost.
    """
    (result,) = grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)
    return result


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Collective: start `grouped_reducescatter`."""
    factors = prescale_factor, postscale_factor
    return _reduce(tensors, None, list, name, op, factors, process_set, REDUCESCATTER)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Collective: as `reducescatter`, of several tensors of one dtype."""
    chosen, method = ReduceOp(op), cast_only(compression)

    def start(xs: Sequence[Tensor]) -> Handle:
        return grouped_reducescatter_async(xs, name, chosen, process_set, prescale_factor, postscale_factor)

    def gradients(gs: Sequence[Tensor]) -> list[Tensor]:
        if chosen.name not in ADDITIVE:
            raise InvalidArgument("op", chosen.name, "has no gradient here", "use hvd.Sum or hvd.Average")
        factor = prescale_factor * postscale_factor * (len(membership(process_set)[1]) if chosen == Sum else 1)
        return grouped_allgather([g * factor for g in gs], process_set=process_set)

    pairs = [method.compress(x) for x in tensors]
    received = _differentiable(start, gradients, [x for x, _ in pairs])
    return [method.decompress(x, context) for x, (_, context) in zip(received, pairs)]


# --- what they have in common


class _Collective(torch.autograd.Function):
    """An operation on tensors, and the function from gradients of its results to those of its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Callable[[Sequence[Tensor]], Handle],
        gradients: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        result = synchronize(start(tensors))
        return (result,) if isinstance(result, Tensor) else tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.gradients(gradients))


def _differentiable(
    start: Callable[[Sequence[Tensor]], Handle],
    gradients: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    return list(_Collective.apply(start, gradients, *tensors))  # type: ignore[no-untyped-call]


def _first(outputs: list[Tensor]) -> Tensor:
    return outputs[0]


def _operator(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    if average is None:
        return Average if op is None else ReduceOp(op)
    if op is not None:
        raise InvalidArgument("average", average, "op is given too", "give op alone")
    warnings.warn("average= is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def _checked(tensors: Sequence[Tensor], verb: str) -> list[Tensor]:
    """`tensors`, contiguous.

    Raises:
        InvalidArgument: the operation does not take them.
    """
    if not tensors:
        raise InvalidArgument("tensors", "[]", "is empty", "give one tensor or more")
    first = tensors[0]
    for x in tensors:
        if x.layout != torch.strided:
            raise InvalidArgument("tensor", x.layout, "is not dense", "use hvd.sparse_allreduce_async, or x.to_dense()")
        if verb in (ALLREDUCE, REDUCESCATTER) and x.dtype not in _REDUCED:
            raise InvalidArgument("tensor", x.dtype, f"has no {verb}", "convert it to another dtype first")
        if verb in (ALLGATHER, ALLTOALL, REDUCESCATTER) and not x.dim():
            raise InvalidArgument("tensor", "a scalar", f"has no rows to {verb}", "give it a dimension: x.unsqueeze(0)")
        if (x.dtype, x.device.type) != (first.dtype, first.device.type):
            raise InvalidArgument("tensors", f"{first.dtype} on {first.device}, {x.dtype} on {x.device}",
                                  "differ in one group", "make a group of each")  # fmt: skip
    return [x.detach().contiguous() for x in tensors]


def _reduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor] | None,
    unpack: Unpack,
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    verb: str = ALLREDUCE,
) -> Handle:
    op = ReduceOp(op)
    if verb == REDUCESCATTER and op == Adasum:
        raise HorovodInternalError("op = Adasum: cannot be divided among workers; use hvd.allreduce")
    xs = _checked(tensors, verb)
    if op == Adasum and not xs[0].is_floating_point():
        raise InvalidArgument("op", op.name, f"is not for tensors of {xs[0].dtype}", "use hvd.Sum")
    return current().submit(verb, xs, unpack, name=name, members=membership(process_set)[0], outputs=outputs,
                            op=op.name, prescale=float(factors[0]), postscale=float(factors[1]))  # fmt: skip


def _gather(tensors: Sequence[Tensor], unpack: Unpack, name: str | None, process_set: ProcessSet) -> Handle:
    xs = _checked(tensors, ALLGATHER)
    return current().submit(ALLGATHER, xs, unpack, name=name, members=membership(process_set)[0])


def _broadcast(tensor: Tensor, output: Tensor, root: int, name: str | None, process_set: ProcessSet) -> Handle:
    xs = _checked([tensor], BROADCAST)
    return current().submit(BROADCAST, xs, _first, name=name, members=membership(process_set)[0], outputs=[output],
                            root=root)  # fmt: skip
