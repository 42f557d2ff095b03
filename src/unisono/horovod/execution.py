"""Executes what all workers have agreed on: one collective operation for each bucket of requests.

Every worker of the communicator calls `Executor.run` with the same batches. A worker that has not submitted a request,
since it has joined or is no member of the process set, takes part with zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.comm import Communicator, Work
from unisono.compress import COMPRESSORS, Compressor, CompressorMemory, Span
from unisono.horovod.errors import HorovodInternalError, WorkersLost
from unisono.horovod.groups import AllWorkers, Group, SomeWorkers, Steps
from unisono.horovod.handle import Handle
from unisono.horovod.reductions import Average, averaged, reduce, reduce_scatter, scaled
from unisono.horovod.requests import (
    ADD_SET,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    EVERYBODY,
    FIX_ORDER,
    JOIN,
    REDUCESCATTER,
    REMOVE_SET,
    Agreed,
    Key,
    Request,
)
from unisono.notation import parse

FUSION_BYTES = 64 << 20
"""The largest number of bytes that small requests are fused to."""
_IN_FLIGHT = 4  # operations, which bounds the memory of fused tensors


class Job(NamedTuple):
    """What was agreed on, and this worker's handle; None where it has not submitted the request."""

    agreed: Agreed
    handle: Handle | None

    @property
    def request(self) -> Request:
        """The request that all members have submitted."""
        return self.agreed.request

    def inputs(self) -> list[Tensor]:
        """This worker's tensors, or zeros."""
        return self.handle.ready_inputs() if self.handle else self.request.zeros()

    def outputs(self) -> list[Tensor]:
        """Where the results of this worker are written; where they do not count, tensors of the same shapes."""
        given = self.handle.outputs if self.handle else None
        return list(given) if given is not None else self.request.zeros()

    def finish(self, outputs: list[Tensor]) -> None:
        """Hand out the results."""
        if self.handle:
            self.handle.finish(outputs)


class Executor:
    """Executes batches on a communicator, which one thread uses.

    Args:
        comm: of all workers.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._groups: dict[int, Group] = {EVERYBODY: AllWorkers(comm)}
        self._memories: dict[Key, CompressorMemory] = {}
        self._operations: Mapping[str, Callable[[Sequence[Job]], Steps[None]]] = {
            ALLREDUCE: self._allreduce,
            ALLGATHER: self._allgather,
            BROADCAST: self._broadcast,
            ALLTOALL: self._alltoall,
            REDUCESCATTER: self._reducescatter,
            BARRIER: self._barrier,
            JOIN: self._barrier,
            FIX_ORDER: self._barrier,
            ADD_SET: self._add_set,
            REMOVE_SET: self._remove_set,
        }

    def run(self, jobs: Iterable[Job]) -> None:
        """Collective: execute `jobs`. A request that failed fails its handle alone.

        Raises:
            CommunicationError: a worker is lost.
        """
        with torch.no_grad():
            started: deque[tuple[Steps[None], Work[object]]] = deque()
            for bucket in buckets(jobs):
                operation = self._start(bucket)
                if (work := next(operation, None)) is not None:
                    started.append((operation, work))
                if len(started) == _IN_FLIGHT:
                    _complete(*started.popleft())
            while started:
                _complete(*started.popleft())

    def _start(self, bucket: Sequence[Job]) -> Steps[None]:
        agreed, handle = bucket[0]
        if not agreed.error:
            yield from self._operations[agreed.request.verb](bucket)
        elif handle:
            handle.fail((WorkersLost if agreed.lost else HorovodInternalError)(agreed.error))

    def _allreduce(self, jobs: Sequence[Job]) -> Steps[None]:
        request, group = jobs[0].request, self._groups[jobs[0].request.members]
        inputs = [x for job in jobs for x in job.inputs()]
        flat, spans = scaled(torch.cat([x.reshape(-1) for x in inputs]), request.prescale), _spans(inputs)
        if request.compress:
            total = yield from self._compressed_mean(request, flat, spans)
        else:
            total = yield from reduce(group, flat, request.op, spans)
            total = averaged(total, group.size) if request.op == Average.name else total
        _hand_out(scaled(total, request.postscale), jobs)

    def _compressed_mean(self, request: Request, flat: Tensor, spans: Sequence[Span]) -> Steps[Tensor]:
        """Collective: the mean of all workers' `flat`, of which each tensor has its own messages and residual."""
        chosen = _compressor(request.compress)
        memory = self._memories.setdefault(request.key, CompressorMemory())
        parameter, means = request.name.partition(".")[2], []
        for number, span in enumerate(spans):
            part = Span(parameter, span.shape, span.stride, 0, span.stop - span.start)
            compress = chosen.choose(parameter, span.shape).for_sums_of(self._comm.size)
            gradient = flat[span.start : span.stop]
            total = torch.empty(gradient.numel(), dtype=compress.total_dtype(flat.dtype), device=flat.device)
            compress.add(total, gradient, 1.0 / self._comm.size, first=True)
            means.append((yield from compress.mean(total, (part,), self._comm, memory.part(str(number)), flat.dtype)))
        memory.commit()
        return torch.cat(means)

    def _broadcast(self, jobs: Sequence[Job]) -> Steps[None]:
        group = self._groups[jobs[0].request.members]
        flat = torch.cat([x.reshape(-1) for job in jobs for x in job.inputs()])
        yield from group.broadcast(flat, jobs[0].agreed.result)
        _hand_out(flat, jobs)

    def _allgather(self, jobs: Sequence[Job]) -> Steps[None]:
        ((agreed, _),) = jobs
        group, outputs = self._groups[agreed.request.members], []
        for number, x in enumerate(jobs[0].inputs()):
            like = [x.new_empty((rows[number], *x.shape[1:])) for rows in agreed.parts]
            outputs.append(torch.cat((yield from group.exchange([x] * group.size, like))))
        jobs[0].finish(outputs)

    def _alltoall(self, jobs: Sequence[Job]) -> Steps[None]:
        ((agreed, _),) = jobs
        group, (x,) = self._groups[agreed.request.members], jobs[0].inputs()
        sends, expects = agreed.parts[group.rank], [rows[group.rank] for rows in agreed.parts]
        whole = x if jobs[0].handle else x.new_empty((sum(sends), *x.shape[1:]))
        like = [x.new_empty((rows, *x.shape[1:])) for rows in expects]
        received = yield from group.exchange(whole[: sum(sends)].split(sends), like)
        jobs[0].finish([torch.cat(received), torch.tensor(expects, dtype=torch.int32)])

    def _reducescatter(self, jobs: Sequence[Job]) -> Steps[None]:
        ((agreed, _),) = jobs
        request, group, outputs = agreed.request, self._groups[agreed.request.members], []
        for x in jobs[0].inputs():
            rows = [len(range(member, x.shape[0], group.size)) for member in range(group.size)]
            mine = yield from reduce_scatter(group, scaled(x, request.prescale).split(rows), request.op)
            mine = averaged(mine, group.size) if request.op == Average.name else mine
            outputs.append(scaled(mine, request.postscale))
        jobs[0].finish(outputs)

    def _barrier(self, jobs: Sequence[Job]) -> Steps[None]:
        ((agreed, _),) = jobs
        # All have agreed already. Once all have received that too, one of them may shut down.
        yield from self._groups[agreed.request.members].gather(torch.zeros(1))
        jobs[0].finish([torch.tensor(agreed.result), *(torch.tensor(numbers) for numbers in agreed.parts)])

    def _add_set(self, jobs: Sequence[Job]) -> Steps[None]:
        self._groups[jobs[0].agreed.result] = SomeWorkers(self._comm, jobs[0].request.numbers)
        yield from self._barrier(jobs)

    def _remove_set(self, jobs: Sequence[Job]) -> Steps[None]:
        self._groups.pop(jobs[0].request.numbers[0], None)
        yield from self._barrier(jobs)


def buckets(jobs: Iterable[Job]) -> list[list[Job]]:
    """`jobs` in buckets, each for one operation; the same on all workers."""
    found: list[list[Job]] = []
    unfilled: dict[Request, tuple[list[Job], int]] = {}
    for job in jobs:
        kind, nbytes = _kind(job.agreed), _nbytes(job.request)
        bucket, filled = unfilled.get(kind, ([], 0)) if kind else ([], 0)
        if filled + nbytes > FUSION_BYTES:
            bucket, filled = [], 0
        if not bucket:
            found.append(bucket)
        bucket.append(job)
        if kind:
            unfilled[kind] = bucket, filled + nbytes
    return found


def _kind(agreed: Agreed) -> Request | None:
    """What requests of one bucket have in common; None: the request has a bucket of its own."""
    request = agreed.request
    if agreed.error or request.compress or request.verb not in (ALLREDUCE, BROADCAST):
        return None
    return Request("", request.verb, request.members, request.dtype, (), request.op, request.root, request.prescale,
                   request.postscale, request.device)  # fmt: skip


def _nbytes(request: Request) -> int:
    return sum(torch.Size(shape).numel() for shape in request.shapes) * (
        request.torch_dtype.itemsize if request.shapes else 0
    )


@cache
def _compressor(text: str) -> Compressor:
    found: Compressor = parse("compression", text, COMPRESSORS)
    return found


def _complete(operation: Steps[None], work: Work[object]) -> None:
    try:
        while True:
            work = operation.send(work.wait())
    except StopIteration:
        return


def _spans(tensors: Sequence[Tensor]) -> list[Span]:
    spans, start = [], 0
    for number, x in enumerate(tensors):
        stride = torch.empty(x.shape, device="meta").stride()
        spans.append(Span(str(number), x.shape, stride, start, start + x.numel()))
        start += x.numel()
    return spans


def _hand_out(flat: Tensor, jobs: Sequence[Job]) -> None:
    """Write the parts of `flat` into the outputs of `jobs`, one after the other."""
    start = 0
    for job in jobs:
        outputs = job.outputs()
        for out in outputs:
            out.copy_(flat[start : start + out.numel()].view(out.shape))
            start += out.numel()
        job.finish(outputs)
