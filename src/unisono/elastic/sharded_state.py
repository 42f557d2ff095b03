"""What workers have of the state of a replica that lies on several of them, and how it becomes whole in another view.

parts here, at their last step ─┐
copies of one's own part        ├──► the newest step of which all of it is there ──► everybody's new part
copies of another worker's      ┘

Replicas that walk by themselves have each a state of its own; of what differs all take the mean.
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
from unisono.elastic.state_transfer import Parts, Progress, adopt, committed_in, describe
from unisono.elastic.transfer import LocalTensors, MemoryCheckpoint, digest, mean, transfer_tensors
from unisono.errors import StateMissing

LOG = logging.getLogger("unisono")
ShardVersion = tuple[int, int]
"""The view in which the last step of a state was taken, and the steps in it: states of one replica that say the same
fit together, and of two the greater one is right."""


@dataclass(frozen=True)
class StateShard:
    """What one worker has of the state between two steps.

    Args:
        held: tensors by a checkpoint's names.
        numbers: what is no tensor of it.
        judged: what is remembered of bad steps.
        loss: of the last step in it.
        walker: the replica whose it is, by its number in that view, where each has its own; all have the same: None.
    """

    at: ShardVersion
    held: LocalTensors
    numbers: Mapping[str, float]
    judged: Mapping[str, Any]
    loss: float
    walker: int | None = None

    def said(self) -> list[Any]:
        """All but the tensors' numbers, as JSON carries it."""
        digests = {} if self.walker is None else {n: digest({n: x}, {}) for n, x in self.held.tensors.items()}
        return [self.meta, encode_shards(self.held.shards), digests]

    @property
    def meta(self) -> dict[str, Any]:
        """What has to be beside the tensors where they are kept."""
        numbers, judged = dict(self.numbers), dict(self.judged)
        return {"at": list(self.at), "walker": self.walker, "numbers": numbers, "judged": judged, "loss": self.loss}

    @staticmethod
    def kept(copy: MemoryCheckpoint) -> StateShard:
        """What another worker, or this one, was given to keep."""
        meta = copy.meta
        first, steps = meta["at"]
        return StateShard((first, steps), copy.held, meta["numbers"], meta["judged"], meta["loss"], meta["walker"])


@dataclass(frozen=True)
class ShardedModel:
    """This worker's part of a replica: a module of plain tensors, the boxes that they are, and their optimizer."""

    model: nn.Module
    parts: Parts
    optimizer: Optimizer

    def pieces(
        self, at: ShardVersion, reached: Progress, judged: Mapping[str, Any], walker: int | None = None
    ) -> StateShard:
        """The state that lies here; tensors are the model's own."""
        tensors, numbers = describe(self.model, self.optimizer, reached)
        boxes = {name: box for name, x in tensors.items() if (box := self._box(name, tuple(x.shape), local=True))}
        return StateShard(at, LocalTensors(tensors, boxes), numbers, judged, reached.loss, walker)

    def wants(self, holdings: Sequence[Mapping[str, TensorShard]]) -> dict[str, TensorShard]:
        """This worker's part of what `holdings` are parts of. A worker has all that belongs to a parameter, or nothing
        of it: if weights are complete, what the optimizer has of them is."""
        wholes = {name: piece.whole for each in holdings for name, piece in each.items()}
        mine = {f"model/{name}": x for name, x in weights_of(self.model).items()}
        found = {}
        for name, x in mine.items():
            shape = wholes[name].shape if name in wholes else tuple(x.shape)
            found[name] = TensorShard(x.dtype, self._box(name, shape) or Box.whole(shape))
        for name, whole in wholes.items():
            if name not in found and self._has(name):
                found[name] = TensorShard(whole.dtype, self._box(name, whole.shape) or Box.whole(whole.shape))
        return found

    def take(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> Progress:
        """The state is this one from now on."""
        own = {name: n for name, n in numbers.items() if "/" not in name or self._has(f"optimizer/{name}")}
        return adopt(self.model, self.optimizer, tensors, own)

    def _has(self, name: str) -> bool:
        kind, _, rest = name.partition("/")
        return kind != "model" and ("/" not in rest or self.parts.of(name) is not None)

    def _box(self, name: str, shape: tuple[int, ...], *, local: bool = False) -> Box | None:
        """Which one this worker's part of the tensor `name` is, where it is cut as its parameter is: `shape` is then
        that of the parameter, or where `local` that of the part."""
        part = self.parts.of(name)
        cut = part is not None and shape == (part.size if local else part.shape)
        return part if part and cut else None


def distinct(pieces: Iterable[StateShard]) -> list[StateShard]:
    """Of those that are the same part of the same state, one."""
    return list({(each.at, each.walker, frozenset(each.held.shards.items())): each for each in pieces}.values())


def assemble(
    comm: Communicator, here: Sequence[StateShard], laid: ShardedModel, hosts: Sequence[str]
) -> tuple[ShardVersion, Progress, Mapping[str, Any]] | None:
    """Everybody's part of the newest state that is whole; all call it alike. Returns which one it is, and what is
    remembered of bad steps; None, and nothing has changed, if there is none, or a newer one on disk.

    Raises:
        PeerLost: a worker was lost meanwhile; what is `here` is as it was.
    """
    told = [
        _ShardReport.of(each)
        for text in gather_text(comm, json.dumps([p.said() for p in here]))
        for each in json.loads(text)
    ]
    on_disk = max((committed_in(each.numbers) for each in told), default=0)
    for at in sorted({each.at for each in told if each.at[1] >= on_disk}, reverse=True):
        theirs, mine = [each for each in told if each.at == at], [piece for piece in here if piece.at == at]
        try:
            tensors = _whole(comm, mine, laid, theirs, hosts)
        except StateMissing as missing:
            LOG.info("of the state after step %d not all is there: %s", at[1], str(missing).splitlines()[0])
            continue
        numbers = {name: number for each in theirs for name, number in each.numbers.items()}
        return at, replace(laid.take(tensors, numbers), loss=theirs[0].loss), theirs[0].judged
    return None


def _whole(
    comm: Communicator,
    here: Sequence[StateShard],
    laid: ShardedModel,
    told: Sequence[_ShardReport],
    hosts: Sequence[str],
) -> dict[str, Tensor]:
    """This worker's part of one state: what all who have it have alike from all of them, and of the rest the mean over
    the replicas of which all is there. Raises `StateMissing` on all workers."""
    wants, apart = laid.wants([each.shards for each in told]), _apart(told)
    alike, own = ({n: piece for n, piece in wants.items() if (n in apart) is there} for there in (False, True))
    tensors = transfer_tensors(comm, [piece.held for piece in here], alike, hosts)
    lacking = list[StateMissing]()

    def walks() -> Iterator[dict[str, Tensor]]:
        for walker in sorted({each.walker for each in told if each.walker is not None}):
            try:
                yield transfer_tensors(comm, [piece.held for piece in here if piece.walker == walker], own, hosts)
            except StateMissing as missing:
                lacking.append(missing)

    means = mean(walks()) if apart else {}
    if lacking and not means:
        raise lacking[0]
    return tensors | means


def _apart(told: Sequence[_ShardReport]) -> set[str]:
    """The names under which not all who have the same box of a tensor have the same in it."""
    first: dict[tuple[str, Box], str | None] = {}
    apart = set()
    for each in told:
        for name, piece in each.shards.items():
            said = each.digests.get(name)
            if first.setdefault((name, piece.box), said) != said:
                apart.add(name)
    return apart


@dataclass(frozen=True)
class _ShardReport:
    at: ShardVersion
    walker: int | None
    numbers: Mapping[str, float]
    judged: Mapping[str, Any]
    loss: float
    shards: Mapping[str, TensorShard]
    digests: Mapping[str, str]

    @staticmethod
    def of(told: Any) -> _ShardReport:
        match told:
            case [dict(meta), str(held), dict(digests)]:
                first, steps = meta["at"]
                at = (int(first), int(steps))
                numbers, judged, loss = meta["numbers"], meta["judged"], meta["loss"]
                return _ShardReport(at, meta["walker"], numbers, judged, loss, decode_shards(held), digests)
        raise ValueError("not what a worker says of its part of the state")
