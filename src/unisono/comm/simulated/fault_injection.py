"""A communicator that wraps any other communicator, and injects losses and delays at given operations."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.comm.actor import Actor, ActorConnection
from unisono.comm.communicator import Communicator, Work
from unisono.comm.hierarchy import Hierarchy
from unisono.comm.simulated.communicator import Lost, Simulated


@dataclass(frozen=True)
class InjectedFailure:
    """Worker `rank` is lost at its `count`-th start of `verb`, counted from 1 over all channels.

    Args:
        rank: the worker to be lost.
        verb: ``sum``, ``gather``, ``broadcast``, ``exchange``, ``swap``, or ``*`` for any of them.
        count: which start it is, from 1.
        how: ``lose`` raises `Lost` in the worker; ``kill`` ends the worker's process by SIGKILL.
    """

    rank: int
    verb: str = "sum"
    count: int = 1
    how: str = "lose"

    def __post_init__(self) -> None:
        _check(self.verb, self.count)
        if self.how not in ("lose", "kill"):
            raise ValueError(f"how={self.how!r} is neither 'lose' nor 'kill'")


@dataclass(frozen=True)
class Delay:
    """Worker `rank` computes for `seconds` on its clock before its `count`-th start of `verb`."""

    rank: int
    verb: str = "sum"
    count: int = 1
    seconds: float = 1.0

    def __post_init__(self) -> None:
        _check(self.verb, self.count)
        if self.seconds < 0:
            raise ValueError(f"seconds={self.seconds!r} is below 0")


class Faulty:
    """Wraps the communicator `comm`, and injects those of `faults` that concern its rank.

    Starts of an operation are counted over all channels together.
    """

    def __init__(self, comm: Communicator, faults: Sequence[InjectedFailure | Delay]) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._faults = [each for each in faults if each.rank == comm.rank]
        self._starts: Counter[str] = Counter()

    @property
    def bytes_sent(self) -> int:
        return self.comm.bytes_sent

    @property
    def waits_for(self) -> tuple[str, tuple[int, ...]]:
        return self.comm.waits_for

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.comm.allocate(numel, dtype)

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Work[Tensor]:
        self._inject("sum")
        return self.comm.sum(x, dtype)

    def gather(self, x: Tensor) -> Work[Tensor]:
        self._inject("gather")
        return self.comm.gather(x)

    def broadcast(self, x: Tensor, root: int = 0) -> Work[Tensor]:
        self._inject("broadcast")
        return self.comm.broadcast(x, root)

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Work[list[Tensor]]:
        self._inject("exchange")
        return self.comm.exchange(xs, like)

    def swap(self, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> Work[dict[int, Tensor]]:
        self._inject("swap")
        return self.comm.swap(xs, like)

    def channel(self, name: str) -> Faulty:
        channel = Faulty(self.comm.channel(name), self._faults)
        channel._starts = self._starts
        return channel

    def hierarchy(self, name: str) -> Hierarchy | None:
        return self.comm.hierarchy(name)

    def host(self, actor: Actor) -> list[ActorConnection]:
        return self.comm.host(actor)

    def serve(self, count: int, service: str, config: Mapping[str, Any]) -> list[ActorConnection]:
        return self.comm.serve(count, service, config)

    def wait_without_deadline(self) -> None:
        self.comm.wait_without_deadline()

    def now(self) -> float:
        return self.comm.now()

    def compute(self, seconds: float) -> None:
        """Compute for `seconds` on the communicator's clock."""
        if isinstance(self.comm, Simulated):
            self.comm.compute(seconds)
        else:
            time.sleep(seconds)

    def close(self) -> None:
        self.comm.close()

    def _inject(self, verb: str) -> None:
        """Inject the faults that are due at this start of `verb`, delays first."""
        self._starts.update((verb, "*"))
        due = [each for each in self._faults if self._starts[each.verb] == each.count]
        due = [each for each in due if each.verb in (verb, "*")]
        for each in due:
            if isinstance(each, Delay):
                self.compute(each.seconds)
        for each in due:
            if isinstance(each, InjectedFailure):
                self._end(each)

    def _end(self, failure: InjectedFailure) -> None:
        if failure.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(self.comm, Simulated):
            self.comm.world.lose(self.rank)
        raise Lost(f"worker {self.rank}: lost by injection")


_VERBS = ("sum", "gather", "broadcast", "exchange", "swap", "*")


def _check(verb: str, count: int) -> None:
    if verb not in _VERBS:
        raise ValueError(f"verb={verb!r} is none of {', '.join(_VERBS)}")
    if count < 1:
        raise ValueError(f"count={count!r} is below 1")
