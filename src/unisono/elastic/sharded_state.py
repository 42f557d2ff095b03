"""The shards of a sharded replica's state, from which another view puts the state together again.

own shards, at their last step ──────┐
copies of this worker's shard        ├──► the newest step of which all shards exist ──► each worker's new shard
copies of another worker's shard ────┘

Replicas with local steps have different states. All workers then get the mean of the tensors that differ.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.checkpoint import Box, TensorShard, decode_shards, encode_shards
from unisono.comm import Communicator
from unisono.comm.text import gather_text
from unisono.elastic.model_state import weights_of
from unisono.elastic.state_transfer import Parts, Progress, committed_in, load_named_state, named_state
from unisono.elastic.transfer import LocalTensors, MemoryCheckpoint, mean, state_digest, transfer_tensors
from unisono.errors import StateMissing

LOG = logging.getLogger("unisono")
ShardVersion = tuple[int, int]
"""The version of a state: the view in which its last step was taken, and its number of steps.

Shards of equal version fit together; of two versions the greater one is newer.
"""


@dataclass(frozen=True)
class StateShard:
    """One worker's shard of the state between two steps.

    Args:
        held: the tensors, by the names of a checkpoint.
        numbers: the numbers of the state, by the names of a checkpoint.
        history: the history of bad steps.
        loss: the loss of the last step.
        replica: the number of the worker's replica in the view of `version`, where replicas with local steps have
            different states; else None.
    """

    version: ShardVersion
    held: LocalTensors
    numbers: Mapping[str, float]
    history: Mapping[str, Any]
    loss: float
    replica: int | None = None

    def report(self) -> list[Any]:
        """A description of the shard without the contents of its tensors, as JSON values."""
        digests = {} if self.replica is None else {n: state_digest({n: x}, {}) for n, x in self.held.tensors.items()}
        return [self.meta, encode_shards(self.held.shards), digests]

    @property
    def meta(self) -> dict[str, Any]:
        """All of the shard except its tensors, as JSON values."""
        return {
            "version": list(self.version),
            "replica": self.replica,
            "numbers": dict(self.numbers),
            "history": dict(self.history),
            "loss": self.loss,
        }

    @staticmethod
    def of_copy(copy: MemoryCheckpoint) -> StateShard:
        """The shard of which `copy` is a memory checkpoint."""
        meta = copy.meta
        view, steps = meta["version"]
        return StateShard((view, steps), copy.held, meta["numbers"], meta["history"], meta["loss"], meta["replica"])


@dataclass(frozen=True)
class ShardedModel:
    """This worker's shard of a replica: a module of plain tensors, their boxes in the whole, and their optimizer."""

    model: nn.Module
    parts: Parts
    optimizer: Optimizer

    def shard(
        self, version: ShardVersion, progress: Progress, history: Mapping[str, Any], replica: int | None = None
    ) -> StateShard:
        """This worker's shard of the state; its tensors are the model's own."""
        tensors, numbers = named_state(self.model, self.optimizer, progress)
        boxes = {name: box for name, x in tensors.items() if (box := self._box(name, tuple(x.shape), local=True))}
        return StateShard(version, LocalTensors(tensors, boxes), numbers, history, progress.loss, replica)

    def wants(self, holdings: Sequence[Mapping[str, TensorShard]]) -> dict[str, TensorShard]:
        """The boxes that this worker needs of the tensors in `holdings`.

        A worker has either all state of a parameter or none of it. So where weights are complete, their optimizer
        state is complete too.
        """
        wholes = {name: shard.whole for each in holdings for name, shard in each.items()}
        mine = {f"model/{name}": x for name, x in weights_of(self.model).items()}
        found = {}
        for name, x in mine.items():
            shape = wholes[name].shape if name in wholes else tuple(x.shape)
            found[name] = TensorShard(x.dtype, self._box(name, shape) or Box.whole(shape))
        for name, whole in wholes.items():
            if name not in found and self._has(name):
                found[name] = TensorShard(whole.dtype, self._box(name, whole.shape) or Box.whole(whole.shape))
        return found

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> Progress:
        """Load this worker's shard of a state; returns its progress."""
        own = {name: n for name, n in numbers.items() if "/" not in name or self._has(f"optimizer/{name}")}
        return load_named_state(self.model, self.optimizer, tensors, own)

    def _has(self, name: str) -> bool:
        kind, _, rest = name.partition("/")
        return kind != "model" and ("/" not in rest or self.parts.of(name) is not None)

    def _box(self, name: str, shape: tuple[int, ...], *, local: bool = False) -> Box | None:
        """The box of this worker's shard of the tensor `name`, if it is sharded as its parameter is. `shape` is that of
        the whole tensor; with `local`, that of the shard."""
        part = self.parts.of(name)
        cut = part is not None and shape == (part.size if local else part.shape)
        return part if part and cut else None


def distinct(shards: Iterable[StateShard]) -> list[StateShard]:
    """`shards` without duplicates, which are the same shard of the same state."""
    return list({(each.version, each.replica, frozenset(each.held.shards.items())): each for each in shards}.values())


def reassemble(
    comm: Communicator, here: Sequence[StateShard], sharded: ShardedModel, hosts: Sequence[str]
) -> tuple[ShardVersion, Progress, Mapping[str, Any]] | None:
    """Collective: load the newest state of which all shards exist, each worker its own shard.

    Returns:
        The state's version, its progress and its history of bad steps. None, and nothing has changed, if there is no
        such state, or if a checkpoint is newer.

    Raises:
        PeerLost: a worker was lost meanwhile; the shards `here` are unchanged.
    """
    reports = [
        _ShardReport.of(each)
        for text in gather_text(comm, json.dumps([shard.report() for shard in here]))
        for each in json.loads(text)
    ]
    on_disk = max((committed_in(each.numbers) for each in reports), default=0)
    for version in sorted({each.version for each in reports if each.version[1] >= on_disk}, reverse=True):
        theirs = [each for each in reports if each.version == version]
        mine = [shard for shard in here if shard.version == version]
        try:
            tensors = _own_shard(comm, mine, sharded, theirs, hosts)
        except StateMissing as missing:
            LOG.info("the state after step %d is incomplete: %s", version[1], str(missing).splitlines()[0])
            continue
        numbers = {name: number for each in theirs for name, number in each.numbers.items()}
        return version, replace(sharded.load(tensors, numbers), loss=theirs[0].loss), theirs[0].history
    return None


def _own_shard(
    comm: Communicator,
    here: Sequence[StateShard],
    sharded: ShardedModel,
    reports: Sequence[_ShardReport],
    hosts: Sequence[str],
) -> dict[str, Tensor]:
    """Collective: this worker's shard of one state. Raises `StateMissing` on all workers.

    A tensor that is equal on all workers that have it comes from any of them. Of other tensors, the worker gets the
    mean over all complete replicas.
    """
    wants, different = sharded.wants([each.shards for each in reports]), _different(reports)
    equal = {name: shard for name, shard in wants.items() if name not in different}
    own = {name: shard for name, shard in wants.items() if name in different}
    tensors = transfer_tensors(comm, [shard.held for shard in here], equal, hosts)
    incomplete = list[StateMissing]()

    def of_replicas() -> Iterator[dict[str, Tensor]]:
        for replica in sorted({each.replica for each in reports if each.replica is not None}):
            try:
                yield transfer_tensors(comm, [shard.held for shard in here if shard.replica == replica], own, hosts)
            except StateMissing as missing:
                incomplete.append(missing)

    means = mean(of_replicas()) if different else {}
    if incomplete and not means:
        raise incomplete[0]
    return tensors | means


def _different(reports: Sequence[_ShardReport]) -> set[str]:
    """The names of the tensors of which two workers have the same box with different contents."""
    first: dict[tuple[str, Box], str | None] = {}
    names = set()
    for each in reports:
        for name, shard in each.shards.items():
            digest_here = each.digests.get(name)
            if first.setdefault((name, shard.box), digest_here) != digest_here:
                names.add(name)
    return names


@dataclass(frozen=True)
class _ShardReport:
    version: ShardVersion
    replica: int | None
    numbers: Mapping[str, float]
    history: Mapping[str, Any]
    loss: float
    shards: Mapping[str, TensorShard]
    digests: Mapping[str, str]

    @staticmethod
    def of(report: Any) -> _ShardReport:
        match report:
            case [dict(meta), str(held), dict(digests)]:
                view, steps = meta["version"]
                version = (int(view), int(steps))
                numbers, history, loss = meta["numbers"], meta["history"], meta["loss"]
                return _ShardReport(
                    version, meta["replica"], numbers, history, loss, decode_shards(held), digests)  # fmt: skip
        raise ValueError("not a worker's report of its shard of the state")
