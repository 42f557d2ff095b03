"""The communicator of a worker without peers: every operation is the identity."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from unisono.comm import header_record as record
from unisono.comm.actor import Actor, ActorConnection
from unisono.comm.actors.in_process import connect_in_process
from unisono.comm.actors.process import load

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Finished(Generic[T_co]):
    """Work that has its result from the start."""

    result: T_co

    def poll(self) -> bool:
        return True

    def wait(self) -> T_co:
        return self.result


class SingleWorker:
    """A group of one worker, which sends nothing."""

    rank = 0
    size = 1
    bytes_sent = 0
    waits_for: tuple[str, tuple[int, ...]] = ("", ())

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Finished[Tensor]:
        return Finished(x.to(dtype or x.dtype))

    def gather(self, x: Tensor) -> Finished[Tensor]:
        return Finished(x.detach().clone().unsqueeze(0))

    def broadcast(self, x: Tensor, root: int = 0) -> Finished[Tensor]:
        record.check_root(root, 1)
        return Finished(x)

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Finished[list[Tensor]]:
        record.check_all_ranks(xs, like, 1)
        return Finished([x.detach().clone() for x in xs])

    def swap(self, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> Finished[dict[int, Tensor]]:
        record.check_neighbours(xs, like, 0, 1)
        return Finished({})

    def channel(self, name: str) -> SingleWorker:
        return self

    def host(self, actor: Actor) -> list[ActorConnection]:
        """See `Services.host`. `actor` receives a message within the `ActorConnection.call` that sends it."""
        return connect_in_process([actor])

    def serve(self, count: int, service: str, config: Mapping[str, Any]) -> list[ActorConnection]:
        """See `Services.serve`. Here the actors are in this process, and receive a message within the
        `ActorConnection.call` that sends it."""
        return connect_in_process(
            [load(service, number, json.loads(json.dumps(dict(config)))) for number in range(count)]
        )

    def hierarchy(self, name: str) -> None:
        return None

    def wait_without_deadline(self) -> None:
        pass

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        pass
