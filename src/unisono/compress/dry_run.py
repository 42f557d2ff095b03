"""Computes a mean without peers, to measure the cost of a compressor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.compress.compressor import CollectiveVerbs, Compressor
from unisono.compress.cost_model import Candidate
from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span

_TIMES = 3  # the first run allocates memory and warms caches; the fastest run counts


def dry_run(
    name: str, compress: Compressor, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, dtype: torch.dtype
) -> Candidate:
    """The cost of a mean of totals like `total` with `compress`, by the clock of `comm`; `total` is unchanged."""
    memory, least, loopback = CompressorMemory(), float("inf"), _Loopback(comm)
    for _ in range(_TIMES):
        loopback = _Loopback(comm)
        copy = total.clone()
        _wait_for_device(copy)
        start = comm.now()
        result = _run_to_end(compress.mean(copy, spans, loopback, memory, dtype))
        _wait_for_device(result)
        least = min(least, comm.now() - start)
        memory.commit()
    return Candidate(name, least, tuple(loopback.messages))


class _Loopback:
    """Collective operations in which every peer sends what this worker sends; records all messages."""

    def __init__(self, comm: CollectiveVerbs) -> None:
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self.messages: list[tuple[str, int]] = []

    @property
    def bytes_sent(self) -> int:
        return sum(size for _, size in self.messages)

    def now(self) -> float:
        return self._comm.now()

    def sum(self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Any:
        return self._record("sum", [x], x.to(dtype or x.dtype))

    def gather(self, x: Tensor) -> Any:
        return self._record("gather", [x], x.expand(self.size, *x.shape))

    def exchange(self, xs: Any, like: Any) -> Any:
        return self._record("exchange", xs, [xs[self.rank]] * self.size)

    def _record(self, verb: str, sent: Sequence[Tensor], result: Any) -> Any:
        self.messages.append((verb, sum(m.numel() * m.element_size() for m in sent)))
        return _CompletedWork(result)


class _CompletedWork:
    def __init__(self, result: Any) -> None:
        self._result = result

    def poll(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._result


def _run_to_end(steps: Any) -> Tensor:
    received = None
    while True:
        try:
            received = steps.send(received).wait()
        except StopIteration as stop:
            result: Tensor = stop.value
            return result


def _wait_for_device(x: Tensor) -> None:
    """Wait until a device that computes asynchronously has computed `x`."""
    if x.device.type != "cpu" and x.numel():
        x[-1].item()
