"""Servers keep the weights and take the optimizer's steps; workers push gradients and pull weights.

    Li et al. 2014     "Scaling distributed machine learning with the parameter server": shards, push and pull, a copy
                       of each shard on the next server
    Ho et al. 2013     "More effective distributed ML via a stale synchronous parallel parameter server": a worker at
                       step t computes on weights that hold everything up to step t - staleness
    Dean et al. 2012   "Large scale distributed deep networks": asynchronous steps
    Zheng et al. 2017  "Asynchronous SGD with delay compensation"; Zhang et al. 2016, "Staleness-aware async-SGD"
    Chen et al. 2016   "Revisiting distributed synchronous SGD": backup workers
    Jayarajan et al. 2019  "Priority-based parameter propagation": slices, and what is needed first travels first

All of these are one server. Work is a sequence of micro-batches in the seeded order; as many as are in a global batch
make one step of the optimizer. So an asynchronous run takes as many steps, at the same learning rates, as a
synchronous one. What differs is on which weights a micro-batch of step t may be computed: of version t and no other,
of version t - staleness or newer, or of any.

New weights travel while the next forward pass is under way: each module begins as soon as its own are here. They are
sent in the order in which the model registers its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.compress import Compressor
from unisono.errors import InvalidInput
from unisono.sync.server.asynchronous import AsynchronousClient, StalenessBound
from unisono.sync.server.client import ServerClient
from unisono.sync.server.delay_compensation import Compensation
from unisono.sync.server.shard_client import ShardClient
from unisono.sync.server.slice_optimizer import kind_of, numbers_of
from unisono.sync.server.slices import Slice, plan_slices
from unisono.sync.server.synchronous import SynchronousClient
from unisono.sync.server.value_codec import write
from unisono.sync.synchronizer import Loop
from unisono.sync.work_leasing import LeaseClient, lease

SERVICE = "unisono.sync.server.actor:serve"
_SMALL_PART = 1 / 16  # of an update: weights that lack so much are as good


@dataclass(frozen=True)
class ParameterServer:
    """Weights and optimizer in server processes, in shards of about the same size.

    Args:
        servers: processes that keep the weights.
        staleness: how many steps the weights of a micro-batch may be behind its own step. 0: the workers are in
            lockstep, and the result is that of all-reduce. Otherwise work is leased out, and a fast worker does more
            of it, and waits only at the bound; ``inf`` is fully asynchronous.
        compensate: what servers do about gradients that come late: `DelayCompensation` or `ScaledByStaleness`.
        backup_workers: without staleness, go on with the gradients of all workers but so many; the late ones are
            dropped and counted, and their worker goes on with the step that the others are at.
        copies: how many servers have each shard; 2 outlive the loss of a server. None: 2 where there are as many.
        slice_bytes: in how large slices weights and gradients travel. A module waits for all slices that have some of
            its weights.
        per_update: micro-batches that make one step of a server; None: a global batch. 1 is the classic asynchronous
            SGD, of as many steps as there are micro-batches. With staleness only.
        start: steps at the beginning of training, of which every micro-batch is computed on weights of that step: while
            they move fast, old gradients do most harm (the warm start of Dean et al.). With staleness only.
        lease: micro-batches that a worker is given at once and pushes as one; None: its part of an update, if all were
            as fast. Smaller leases travel more often, are less often late, and leave less to wait for. With staleness
            only.

    With backup workers, with ``overlap=False``, in a compiled model and in loops of the user's own all weights are
    waited for before the step ends.

    Raises:
        ValueError: a number out of its bounds, or two arguments that exclude each other.
    """

    servers: int = 1
    staleness: float = 0
    compensate: Compensation | None = None
    backup_workers: int = 0
    copies: int | None = None
    slice_bytes: int = 1 << 20
    per_update: int | None = None
    start: int = 0
    lease: int | None = None

    def __post_init__(self) -> None:
        leasts = {"servers": 1, "backup_workers": 0, "slice_bytes": 1, "per_update": 1, "start": 0, "lease": 1}
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name}={value!r} is not a whole number from {least}")
        if self.staleness != math.inf and (type(self.staleness) is not int or self.staleness < 0):
            raise ValueError(f"staleness={self.staleness!r} is neither a whole number from 0 nor inf")
        if self.copies not in (None, 1, 2) or self.shard_copies > self.servers:
            raise ValueError(f"copies={self.copies!r}: 1, or 2 with more than one server")
        if self.backup_workers and self.staleness:
            raise ValueError(f"backup_workers={self.backup_workers} with staleness={self.staleness}: choose one")
        if not self.staleness and (self.per_update or self.compensate or self.start or self.lease):
            raise ValueError("per_update, compensate, start and lease are about staleness, which is 0")
        if self.compensate is not None and not callable(getattr(self.compensate, "correct", None)):
            raise ValueError(f"compensate={self.compensate!r} is neither DelayCompensation nor ScaledByStaleness")

    @property
    def shard_copies(self) -> int:
        """How many servers have each shard."""
        return self.copies or min(2, self.servers)

    @property
    def synchronous(self) -> bool:
        """Whether every step is all workers' together."""
        return not self.staleness and not self.backup_workers

    def bind(
        self, parameters: Mapping[str, nn.Parameter], comm: Communicator, compress: Compressor, loop: Loop
    ) -> ServerClient:
        """See `Synchronizer.bind`.

        Raises:
            InvalidInput: an optimizer that cannot step slices; numbers that do not fit the workers or micro-batches.
        """
        optimizer, micro_batches = loop.optimizer, loop.micro_batches
        self._check(comm.size, micro_batches)
        groups = _groups(parameters, optimizer)
        trained = {name: parameters[name] for name in groups}
        slices = plan_slices(trained, compress, self.slice_bytes, self.servers)
        needed = self.per_update or micro_batches
        first = comm.size - self.backup_workers
        terms = {"workers": comm.size, "control": loop.control, "needed": first if self.backup_workers else needed}
        connections = comm.serve(self.servers, SERVICE, self._config(slices, optimizer, groups, terms))
        shard_clients = [
            ShardClient(s, [connections[(s + i) % self.servers] for i in range(self.shard_copies)])
            for s in range(self.servers)
        ]
        world = trained, comm.channel("workers"), slices, shard_clients, optimizer, loop.overlap
        if self.synchronous:
            return SynchronousClient(*world)
        own = range(micro_batches * comm.rank // comm.size, micro_batches * (comm.rank + 1) // comm.size)
        bound = StalenessBound(micro_batches, needed, self.staleness, self.start)
        size = self.lease or lease(needed, comm.size)
        leases = None if self.backup_workers else LeaseClient(comm, micro_batches, size)
        # A correction compares with the weights that a worker was given last: those that its push was computed on.
        needs_old_weights = self.compensate is not None and self.compensate.needs_old_weights
        pulls_first = size <= _SMALL_PART * needed and not needs_old_weights
        return AsynchronousClient(*world, bound=bound, leases=leases, own=own, pulls_first=pulls_first)

    def _check(self, workers: int, micro_batches: int) -> None:
        if self.backup_workers >= workers:
            raise InvalidInput("backup_workers", self.backup_workers, f"there are {workers} workers in all",
                               f"use at most {workers - 1}")  # fmt: skip
        if self.per_update and micro_batches % self.per_update:
            raise InvalidInput("per_update", self.per_update, f"the {micro_batches} micro-batches of a global batch "
                               "are no whole number of updates", "use a divisor, or leave it out")  # fmt: skip
        needed = self.per_update or micro_batches
        if self.lease and needed % self.lease:
            raise InvalidInput("lease", self.lease, f"the {needed} micro-batches of an update are no whole number of "
                               "leases", "use a divisor, or leave it out")  # fmt: skip

    def _config(
        self,
        slices: list[Slice],
        optimizer: Optimizer,
        groups: Mapping[str, int],
        terms: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What the servers are told; see `server.actor`."""
        compressors = list(dict.fromkeys(s.compress for s in slices))
        return {
            "servers": self.servers,
            "copies": self.shard_copies,
            "terms": {
                "synchronous": self.synchronous,
                "drops_late": self.backup_workers > 0,
                "compensate": write("compensate", self.compensate),
                "optimizer": kind_of(optimizer),
                "groups": numbers_of(optimizer),
                **terms,
            },
            "compressors": [write("compress", compressor) for compressor in compressors],
            "slices": [
                {
                    "shard": s.shard,
                    "dtype": str(s.dtype).removeprefix("torch."),
                    "compress": compressors.index(s.compress),
                    "members": [groups[piece.span.name] for piece in s.pieces],
                    "spans": [list(astuple(piece.span)) for piece in s.pieces],
                }
                for s in slices
            ],
        }


def _groups(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, int]:
    """The parameter group of each parameter that `optimizer` trains."""
    member = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: member[id(p)] for name, p in parameters.items() if id(p) in member}
