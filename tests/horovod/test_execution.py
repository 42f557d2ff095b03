"""Agreed requests are executed on the simulated communicator: verbs × dtypes × workers × process sets."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unisono.comm import Communicator, simulate
from unisono.compress import Span
from unisono.horovod.agreement import Agreement
from unisono.horovod.execution import FUSION_BYTES, Executor, Job, buckets
from unisono.horovod.handle import Handle
from unisono.horovod.requests import (
    ADD_SET,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    JOIN,
    REDUCESCATTER,
    Agreed,
    Request,
)
from unisono.sync.adasum import combined

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
GROUPS = [(1, None), (2, None), (3, None), (2, [1]), (3, [0, 2]), (3, [1])]
"""Workers, and members of the process set; None: all."""
SHAPE = (5, 2)
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Sum": torch.add,
    "Average": torch.add,
    "Min": torch.minimum,
    "Max": torch.maximum,
    "Product": torch.mul,
}


def sample(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Small whole numbers: sums and products of three are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 6, shape, generator=generator).to(dtype)


def request(verb: str, xs: list[Tensor], name: str = "x", **fields) -> Request:
    dtype, shapes = str(xs[0].dtype).removeprefix("torch."), tuple(tuple(x.shape) for x in xs)
    return Request(name, verb, dtype=dtype, shapes=shapes, **fields)


def executed(
    comm: Communicator, submitted: Callable[[int], list[tuple[Request, list[Tensor]]]], members: list[int] | None = None
) -> list[list[Tensor]]:
    """Execute what each worker submits; returns the outputs of what is complete on this one.

    Args:
        submitted: by rank.
        members: of the process set; None: all workers.
    """
    agreement, executor = Agreement(comm.size), Executor(comm)
    everybody = range(comm.size)
    if members is not None:
        add = Request("add", ADD_SET, numbers=tuple(members))
        (added,) = [each for rank in everybody for each in agreement.submit(rank, [add])]
        executor.run([Job(added, None)])
    batch: list[Agreed] = []
    for rank in everybody:
        batch += agreement.submit(rank, [each for each, _ in submitted(rank)])
    handles = {}
    for each, xs in submitted(comm.rank):
        outputs = [torch.empty_like(x) for x in xs] if each.verb in (ALLREDUCE, BROADCAST) else None
        handles[each.key] = Handle(each, xs, outputs, list)
    executor.run([Job(agreed, handles.get(agreed.request.key)) for agreed in batch])
    return [handle.result() for handle in handles.values() if handle.poll()]


def expected_reduction(op: str, ranks: list[int], dtype: torch.dtype) -> Tensor:
    total = functools.reduce(COMBINE[op], [sample(rank, dtype) for rank in ranks])
    if op != "Average":
        return total
    return total / len(ranks) if dtype in FLOATS else total.div(len(ranks), rounding_mode="trunc")


@pytest.mark.parametrize(("size", "members"), GROUPS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("op", COMBINE)
def test_reductions(op: str, dtype: torch.dtype, size: int, members: list[int] | None) -> None:
    ranks = list(range(size)) if members is None else members
    number = 0 if members is None else 1

    def submitted(rank: int) -> list[tuple[Request, list[Tensor]]]:
        if rank not in ranks:
            return []
        xs, more = [sample(rank, dtype)], [sample(rank, dtype), sample(rank, dtype)]
        return [
            (request(ALLREDUCE, xs, "one", members=number, op=op), xs),
            (request(ALLREDUCE, more, "group", members=number, op=op), more),
            (request(REDUCESCATTER, xs, "rows", members=number, op=op), xs),
        ]

    def worker(comm: Communicator) -> None:
        results = executed(comm, submitted, members)
        if comm.rank not in ranks:
            return
        expected = expected_reduction(op, ranks, dtype)
        one, group, rows = results
        for result in (*one, *group):
            assert result.dtype == dtype
            assert torch.equal(result, expected)
        position = ranks.index(comm.rank)
        counts = [len(range(i, SHAPE[0], len(ranks))) for i in range(len(ranks))]
        assert torch.equal(rows[0], expected.split(counts)[position])

    simulate(size, worker)


@pytest.mark.parametrize(("size", "members"), GROUPS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool])
def test_tensors_are_moved(size: int, dtype: torch.dtype, members: list[int] | None) -> None:
    ranks = list(range(size)) if members is None else members
    number, n = (0 if members is None else 1), len(ranks)
    rows = {rank: [(i + rank) % 3 for i in range(n)] for rank in ranks}

    def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        return sample(rank, dtype), sample(rank, dtype, (rank, 2)), sample(rank, dtype, (sum(rows[rank]), 3))

    def submitted(rank: int) -> list[tuple[Request, list[Tensor]]]:
        if rank not in ranks:
            return []
        x, ragged, parts = inputs(rank)
        return [
            (request(BROADCAST, [x], "b", members=number, root=ranks[-1]), [x]),
            (request(ALLGATHER, [ragged, x], "g", members=number), [ragged, x]),
            (request(ALLTOALL, [parts], "a", members=number, numbers=tuple(rows[rank])), [parts]),
        ]

    def worker(comm: Communicator) -> None:
        results = executed(comm, submitted, members)
        if comm.rank not in ranks:
            return
        (broadcast,), (ragged, x), (parts, received) = results
        assert torch.equal(broadcast, sample(ranks[-1], dtype))
        assert torch.equal(ragged, torch.cat([inputs(rank)[1] for rank in ranks]))
        assert torch.equal(x, torch.cat([sample(rank, dtype) for rank in ranks]))
        me = ranks.index(comm.rank)
        assert torch.equal(parts, torch.cat([inputs(rank)[2].split(rows[rank])[me] for rank in ranks]))
        assert received.tolist() == [rows[rank][me] for rank in ranks]

    simulate(size, worker)


@pytest.mark.parametrize(("size", "members"), GROUPS)
def test_adasum_is_taken_for_each_tensor(size: int, members: list[int] | None) -> None:
    ranks = list(range(size)) if members is None else members
    number = 0 if members is None else 1

    def submitted(rank: int) -> list[tuple[Request, list[Tensor]]]:
        fields = {"members": number, "op": "Adasum"}
        xs = [sample(rank, torch.float64), sample(rank + 10, torch.float64)]
        return [(request(ALLREDUCE, [x], str(i), **fields), [x]) for i, x in enumerate(xs)] if rank in ranks else []

    def worker(comm: Communicator) -> None:
        results = executed(comm, submitted, members)
        if comm.rank not in ranks:
            return
        span = Span("", torch.Size([10]), (1,), 0, 10)
        for (result,), seed in zip(results, (0, 10), strict=True):
            nodes = [sample(rank + seed, torch.float64).reshape(-1) for rank in ranks]
            while len(nodes) > 1:
                odd = nodes[-1:] if len(nodes) % 2 else []
                nodes = [combined(a, b, [span]) for a, b in zip(nodes[0::2], nodes[1::2])] + odd
            torch.testing.assert_close(result, nodes[0].view(SHAPE))

    simulate(size, worker)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
@pytest.mark.parametrize("verb", [ALLREDUCE, REDUCESCATTER])
def test_factors(verb: str, dtype: torch.dtype) -> None:
    """Whole numbers are multiplied in float64, and rounded towards zero each time."""

    def submitted(rank: int) -> list[tuple[Request, list[Tensor]]]:
        xs = [sample(rank, dtype)]
        return [(request(verb, xs, op="Sum", prescale=0.7, postscale=1.3), xs)]

    def scaled(x: Tensor, factor: float) -> Tensor:
        return (x * factor) if dtype in FLOATS else (x.double() * factor).to(dtype)

    def worker(comm: Communicator) -> None:
        ((result,),) = executed(comm, submitted)
        whole = scaled(scaled(sample(0, dtype), 0.7) + scaled(sample(1, dtype), 0.7), 1.3)
        assert torch.equal(result, whole if verb == ALLREDUCE else whole.split([3, 2])[comm.rank])

    simulate(2, worker)


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_a_worker_that_has_joined_contributes_zeros(op: str) -> None:
    def submitted(rank: int) -> list[tuple[Request, list[Tensor]]]:
        xs = [sample(rank, torch.int64)]
        return [(Request("join", JOIN), [])] if rank == 1 else [(request(ALLREDUCE, xs, op=op), xs)]

    def worker(comm: Communicator) -> None:
        results = executed(comm, submitted)
        if comm.rank == 1:
            assert results == []  # it waits until all have joined
            return
        ((result,),) = results
        total = sample(0, torch.int64) + sample(2, torch.int64)
        assert torch.equal(result, total if op == "Sum" else total.div(3, rounding_mode="trunc"))

    simulate(3, worker)


def test_small_requests_are_fused() -> None:
    small = Request("s", ALLREDUCE, dtype="float32", shapes=((10,),), op="Sum")
    large = Request("l", ALLREDUCE, dtype="float32", shapes=((FUSION_BYTES // 4,),), op="Sum")
    other = Request("o", ALLREDUCE, dtype="float64", shapes=((10,),), op="Sum")
    gather = Request("g", ALLGATHER, dtype="float32", shapes=((10,),))
    order = [small, other, gather, small, large, small, other]
    found = buckets([Job(Agreed(each), None) for each in order])
    assert [[job.request.name for job in bucket] for bucket in found] == [["s", "s"], ["o", "o"], ["g"], ["l"], ["s"]]
