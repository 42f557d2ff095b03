"""A mean taken without peers, to learn what it costs and what it would say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.compress.compressor import CollectiveVerbs, Compressor
from unisono.compress.cost_model import Candidate
from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span

_TIMES = 3  # the first takes memory and warms caches; then the shortest counts


def rehearse(
    name: str, compress: Compressor, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, dtype: torch.dtype
) -> Candidate:
    """What a mean of totals like `total` costs with `compress`, by the clock of `comm`; `total` is left as it is."""
    memory, least, wire = CompressorMemory(), float("inf"), _Paper(comm)
    for _ in range(_TIMES):
        wire = _Paper(comm)
        copy = total.clone()
        _finished(copy)
        start = comm.now()
        result = _played(compress.mean(copy, spans, wire, memory, dtype))
        _finished(result)
        least = min(least, comm.now() - start)
        memory.commit()
    return Candidate(name, least, tuple(wire.said))


class _Paper:
    """A wire whose peers say what this worker says; it keeps what was said."""

    def __init__(self, comm: CollectiveVerbs) -> None:
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self.said: list[tuple[str, int]] = []

    @property
    def bytes_sent(self) -> int:
        return sum(size for _, size in self.said)

    def now(self) -> float:
        return self._comm.now()

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Any:
        return self._say("sum", [x], x.to(dtype or x.dtype))

    def gather(self, x: Tensor) -> Any:
        return self._say("gather", [x], x.expand(self.size, *x.shape))

    def exchange(self, xs: Any, like: Any) -> Any:
        return self._say("exchange", xs, [xs[self.rank]] * self.size)

    def _say(self, verb: str, messages: Sequence[Tensor], answer: Any) -> Any:
        self.said.append((verb, sum(m.numel() * m.element_size() for m in messages)))
        return _CompletedWork(answer)


class _CompletedWork:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def poll(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._answer


def _played(steps: Any) -> Tensor:
    answer = None
    while True:
        try:
            answer = steps.send(answer).wait()
        except StopIteration as stop:
            result: Tensor = stop.value
            return result


def _finished(x: Tensor) -> None:
    """Wait until a device that computes by itself has computed `x`."""
    if x.device.type != "cpu" and x.numel():
        x[-1].item()
