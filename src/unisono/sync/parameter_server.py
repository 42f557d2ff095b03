"""Servers have the weights and take the optimizer's steps; workers push gradients and pull weights.

    Li et al. 2014     "Scaling distributed machine learning with the parameter server": shards, push and pull, a copy
                       of each shard on the next server
    Ho et al. 2013     "More effective distributed ML via a stale synchronous parallel parameter server": a worker at
                       step t computes on weights that include all updates up to step t - staleness
    Dean et al. 2012   "Large scale distributed deep networks": asynchronous steps
    Zheng et al. 2017  "Asynchronous SGD with delay compensation"; Zhang et al. 2016, "Staleness-aware async-SGD"
    Chen et al. 2016   "Revisiting distributed synchronous SGD": backup workers
    Jayarajan et al. 2019  "Priority-based parameter propagation": slices, in the order in which they are needed

One server covers all of these algorithms. Work is a sequence of micro-batches in the seeded order; those of a global
batch make one step of the optimizer. So an asynchronous run takes as many steps, at the same learning rates, as a
synchronous one. The algorithms differ in the weights on which a micro-batch of step t may be computed: of version t
only, of version t - staleness or newer, or of any version.

New weights are in flight during the next forward pass: each module waits for its own weights only. They are sent in
the order in which the model registers its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono import notation
from unisono.comm import Communicator
from unisono.compress import BOUND_COMPRESSORS, Compressor
from unisono.errors import InvalidInput
from unisono.sync.server.asynchronous import AsynchronousClient, StalenessBound
from unisono.sync.server.client import ServerClient, Servers
from unisono.sync.server.delay_compensation import COMPENSATIONS, Compensation
from unisono.sync.server.shard_client import ShardClient
from unisono.sync.server.slice_optimizer import kind_of, numbers_of
from unisono.sync.server.slices import Slice, plan_slices
from unisono.sync.server.synchronous import SynchronousClient
from unisono.sync.synchronizer import Loop
from unisono.sync.work_leasing import LeaseClient, lease

SERVICE = "unisono.sync.server.actor:serve"
_SMALL_PART = 1 / 16  # the part of an update that weights may lack without a loss of quality


@dataclass(frozen=True)
class ParameterServer:
    """Server processes have the weights and the optimizer, divided into shards of about equal size.

    Args:
        servers: the number of server processes.
        staleness: by how many steps the weights for a micro-batch may be older than its step. 0: workers are
            synchronous, and the result is that of all-reduce. Otherwise work is leased, so that a fast worker computes
            more, and waits only at the bound; ``inf`` is fully asynchronous.
        compensate: the correction of stale gradients: `DelayCompensation` or `ScaledByStaleness`.
        backup_workers: how many workers' gradients a step does not wait for. Gradients that come too late are dropped
            and counted, and their worker continues with the current step of the others. Only without staleness.
        copies: how many servers have each shard; with 2, the run survives the loss of a server. None: 2 if there are
            at least 2 servers.
        slice_bytes: the largest size of the slices in which weights and gradients are sent. A module waits for all
            slices that contain its weights.
        per_update: the number of micro-batches in one step of a server; None: a global batch. 1 is classic
            asynchronous SGD, with a step per micro-batch. Only with staleness.
        start: the number of steps at the beginning of training that are computed on weights with all previous steps.
            Stale gradients do most harm while weights change fast (the warm start of Dean et al.). Only with staleness.
        lease: the number of micro-batches that a worker leases at once, and whose gradients it pushes as one; None:
            about an equal share of an update. Smaller leases need more messages, are stale less often, and cause
            shorter waits. Only with staleness.

    A step waits for all new weights before forward with backup workers, with ``overlap=False``, in a compiled model,
    and in a user's own loop.

    Raises:
        ValueError: a number is out of its bounds, or two arguments exclude each other.
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
            raise ValueError(f"copies={self.copies!r} with servers={self.servers}: use 1, or 2 with at least 2 servers")
        if self.backup_workers and self.staleness:
            raise ValueError(
                f"backup_workers={self.backup_workers} with staleness={self.staleness}: only one of them may be above 0"
            )
        if not self.staleness and (self.per_update or self.compensate or self.start or self.lease):
            raise ValueError("per_update, compensate, start and lease need a staleness above 0, but staleness=0")
        if self.compensate is not None and not callable(getattr(self.compensate, "correct", None)):
            raise ValueError(f"compensate={self.compensate!r} is neither DelayCompensation nor ScaledByStaleness")

    @property
    def shard_copies(self) -> int:
        """How many servers have each shard."""
        return self.copies or min(2, self.servers)

    @property
    def synchronous(self) -> bool:
        """Whether every step uses the gradients of all workers."""
        return not self.staleness and not self.backup_workers

    def bind(
        self, parameters: Mapping[str, nn.Parameter], comm: Communicator, compress: Compressor, loop: Loop
    ) -> ServerClient:
        """See `Synchronizer.bind`.

        Raises:
            InvalidInput: the optimizer cannot step slices; a number does not fit the number of workers or
                micro-batches; a compressor or compensation is not one of Unisono's, so a server cannot create it.
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
        servers = Servers(trained, comm.channel("workers"), slices, shard_clients, optimizer, loop.overlap)
        if self.synchronous:
            return SynchronousClient(servers)
        own = range(micro_batches * comm.rank // comm.size, micro_batches * (comm.rank + 1) // comm.size)
        bound = StalenessBound(micro_batches, needed, self.staleness, self.start)
        size = self.lease or lease(needed, comm.size)
        leases = None if self.backup_workers else LeaseClient(comm, micro_batches, size)
        # The server takes the weights that it sent a worker last as those on which the worker's push was computed.
        needs_old_weights = self.compensate is not None and self.compensate.needs_old_weights
        pulls_first = size <= _SMALL_PART * needed and not needs_old_weights
        return AsynchronousClient(servers, bound=bound, leases=leases, own=own, pulls_first=pulls_first)

    def _check(self, workers: int, micro_batches: int) -> None:
        if self.backup_workers >= workers:
            raise InvalidInput("backup_workers", self.backup_workers,
                               f"the run has {workers} workers, and a step needs the gradient of at least one",
                               f"use at most {workers - 1}")  # fmt: skip
        if self.per_update and micro_batches % self.per_update:
            raise InvalidInput("per_update", self.per_update, f"does not divide the {micro_batches} micro-batches of a "
                               "global batch", f"use a divisor of {micro_batches}, or leave it out")  # fmt: skip
        needed = self.per_update or micro_batches
        if self.lease and needed % self.lease:
            raise InvalidInput("lease", self.lease, f"does not divide the {needed} micro-batches of an update",
                               f"use a divisor of {needed}, or leave it out")  # fmt: skip

    def _config(
        self,
        slices: list[Slice],
        optimizer: Optimizer,
        groups: Mapping[str, int],
        terms: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The config that every server gets, as JSON values; see `server.actor`."""
        compressors = list(dict.fromkeys(s.compress for s in slices))
        return {
            "servers": self.servers,
            "copies": self.shard_copies,
            "terms": {
                "synchronous": self.synchronous,
                "drops_late": self.backup_workers > 0,
                "compensate": self.compensate and notation.write("compensate", self.compensate, COMPENSATIONS),
                "optimizer": kind_of(optimizer),
                "groups": numbers_of(optimizer),
                **terms,
            },
            "compressors": [notation.write("compress", each, BOUND_COMPRESSORS) for each in compressors],
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
