"""What forward passes write into buffers, collected per micro-batch and folded in the micro-batches' order.

A network's buffers (batch normalisation's running statistics before all; a parameter that is not trained may serve as
one) change with every forward pass, so they would depend on who computed what. Here every micro-batch of a step starts
from the same buffers; what each wrote is shared, and all workers fold the same rows in the same order:

- running statistics of normalisation layers: a moving average, one step per visit of the layer, as one process that
  computed all micro-batches in turn would have it;
- other whole numbers (counters): the increments add up;
- other real numbers: their mean over the micro-batches; truth values: the last one.

In a loop of the user's own, what it changes between two steps counts: the step starts from the buffers that the first
forward pass finds.

    begin ── the user's changes ── first forward pass: adopt ── after ── before: put back ── ... ── fold
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unisono.comm import Communicator, Work
from unisono.comm.process_groups import ProcessGroups
from unisono.comm.single import Finished
from unisono.errors import UnisonoError
from unisono.layout import LocalModel
from unisono.trainer.model_hooks import before_forward


class StageBuffers:
    """The buffers of one worker's part of the model: of each pipeline stage, or of the only one.

    Args:
        synchronous: replicas are equal after every step: then all of them fold the same rows.
        may_undo: a step may be dropped or repeated.
        adopts: see `BufferSync`.
    """

    def __init__(
        self, local: LocalModel, micro_batches: int, groups: ProcessGroups, synchronous: bool, *, may_undo: bool,
        adopts: bool,
    ) -> None:  # fmt: skip
        comm = groups.batch if synchronous else groups.dp_shard
        channel = comm.channel("statistics") if synchronous or groups.is_sharded else None
        stages = {0: local.model} if local.pipeline is None else local.pipeline.stages
        found = {
            stage: BufferSync(module, micro_batches, channel, drops=may_undo, adopts=adopts)
            for stage, module in sorted(stages.items())
        }
        self._stages = {stage: buffers for stage, buffers in found.items() if buffers.active}

    def before(self, stage: int = 0) -> None:
        """See `BufferSync.before`."""
        if stage in self._stages:
            self._stages[stage].before()

    def after(self, micro_batch: int, stage: int = 0) -> None:
        """See `BufferSync.after`."""
        if stage in self._stages:
            self._stages[stage].after(micro_batch)

    def begin(self) -> None:
        """See `BufferSync.begin`."""
        for buffers in self._stages.values():
            buffers.begin()

    def send(self) -> None:
        """See `BufferSync.send`."""
        for buffers in self._stages.values():
            buffers.send()

    def fold(self) -> None:
        """See `BufferSync.fold`."""
        for buffers in self._stages.values():
            buffers.fold()

    def drop(self) -> None:
        """See `BufferSync.drop`."""
        for buffers in self._stages.values():
            buffers.drop()

    def undo(self) -> None:
        """See `BufferSync.undo`."""
        for buffers in self._stages.values():
            buffers.undo()

    def close(self) -> None:
        """See `BufferSync.close`."""
        for buffers in self._stages.values():
            buffers.close()


class BufferSync:
    """The buffers of one replica over steps of `micro_batches`; `comm` is a lane of their own, or None where a replica
    folds what it wrote itself.

    Per step: `begin`, `before` and `after` around each forward pass of this worker, `send`, `fold` or `drop`. With a
    single micro-batch there is nothing to fold, and nothing is touched, unless it `drops`: then steps may be dropped.

    Args:
        adopts: whether changes between two steps count; else they are undone. `close` then takes hooks off the model.
    """

    def __init__(
        self, model: nn.Module, micro_batches: int, comm: Communicator | None, *, drops: bool = False,
        adopts: bool = False,
    ) -> None:  # fmt: skip
        self._comm, self._count, self._model, self._adopts = comm, micro_batches, model, adopts
        named = {
            name: m for name, m in model.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None
        }
        theirs = {id(b) for layer in named.values() for b in layer.buffers(recurse=False)}
        # What is trained is no buffer; nor can be what lies in parts on several workers, and comes and goes.
        theirs |= {id(p) for p in model.parameters() if p.requires_grad or hasattr(p, "to_local")}
        self._layers = [_Layer(n, layer) for n, layer in named.items() if not getattr(layer, "buffers_agree", False)]
        self._quiet = [
            _BufferSlot(f"{path}.{key}".lstrip("."), module, key)
            for path, module in model.named_modules()
            for key, held in (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False))
            if id(held) not in theirs
        ]
        self._written: list[_BufferSlot] = []
        self._probing = True
        self._probe: list[Tensor] = []
        self.active = (micro_batches > 1 or drops) and bool(self._layers or self._quiet)
        self._hooks = before_forward(self._owners(), self._arrive) if self.active and adopts else []

    def close(self) -> None:
        """Leave the model as it was found."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """A new step: remember the buffers that it starts from."""
        self._remember()
        self._awaits, self._entered, self._changed = self._adopts, False, 0
        self._rows: dict[int, Tensor] = {}
        self._work: Work[Tensor] | None = None

    def before(self) -> None:
        """Before a micro-batch's forward pass: put the step's first buffers back."""
        if self._awaits:
            self._adopt()
        self._entered = True
        if self._probing:
            self._probe = [place.tensor.clone() for place in self._quiet]
        self._put_back()

    def after(self, micro_batch: int) -> None:
        """After it: collect what it wrote."""
        self._awaits = False
        if self._probing:
            self._learn_who_writes()
        values = [b for layer in self._layers for b in layer.buffers] + [p.tensor for p in self._written]
        if values:
            told = torch.tensor([self._changed, 1.0], dtype=torch.float64, device=values[0].device)
            self._rows[micro_batch] = _flat([*values, told])  # the last number: here it is

    def undo(self) -> None:
        """The step is not taken, and nobody is waited for: the buffers are as when it began."""
        self._put_back()
        for place, first in zip(self._quiet, self._probe):  # while it is not known who writes
            place.tensor.copy_(first)

    def send(self) -> None:
        """After this worker's last forward pass: share what it collected; backward may run meanwhile."""
        if self._comm is None:
            rows = [self._rows[m] for m in sorted(self._rows)]
            self._work = Finished(torch.stack(rows).view(-1)) if rows else None
        elif self._rows:
            width = next(iter(self._rows.values()))
            table = width.new_zeros(self._count, width.numel())
            for micro_batch, row in self._rows.items():
                table[micro_batch] = row
            # Adding 0.0 turns -0.0 into 0.0, as the sum with other workers' zeros does.
            self._work = self._comm.sum(table.add_(0.0).view(-1))

    def fold(self) -> None:
        """Wait for everybody's rows and fold them. Raises `PeerLost`, `MessageMismatch`."""
        late = [p.name for p, mark in zip(self._quiet, self._marks) if p.differs(mark)]
        if late:
            raise UnisonoError(
                f"buffer {late[0]} changed during a step, though the first forward pass did not write it: write it in "
                "every training pass or in none, or change it between optimizer.step() and the next forward pass"
            )
        if self._work is None:
            return
        # Many small steps: on a GPU each would cost a launch and a wait.
        count = self._count if self._comm is not None else len(self._rows)
        table, at = self._work.wait().view(count, -1).cpu(), 0
        table = table[table[:, -1] > 0]  # a replica that steps by itself has some of a step's micro-batches
        if len(table) and (table[:, -2] != table[0, -2]).any():
            raise UnisonoError("buffers were changed between two steps, but not alike on all workers: change them on "
                               "every worker, to the same values")  # fmt: skip
        for layer in self._layers:
            at = layer.fold(table, at)
        for place, first in zip(self._written, self._first):
            place.tensor.copy_(_folded(first.cpu(), table[:, at : at + first.numel()]))
            at += first.numel()

    def drop(self) -> None:
        """In place of `fold`: the buffers are as when the step began. Raises `PeerLost`, `MessageMismatch`."""
        if self._work is not None:
            self._work.wait()
        self.undo()

    def _owners(self) -> list[nn.Module]:
        """The model and its modules that have such buffers, so that one of them is called in every forward pass."""
        inside = {id(place.module): place.module for place in self._quiet} | {
            id(x.module): x.module for x in self._layers
        }
        return [self._model, *(module for module in inside.values() if module is not self._model)]

    def _arrive(self) -> None:
        """A forward pass begins; if it is the first of the micro-batch that `before` announced, the step begins too."""
        if torch.compiler.is_compiling():  # tracing this would break the user's graph; `before` adopts what it can
            return
        if self._awaits and self._entered and self._model.training:
            self._adopt()
            self._awaits = False

    def _adopt(self) -> None:
        """The step starts from the buffers as they are now."""
        places = [*zip(self._written, self._first_marks), *zip(self._quiet, self._marks)]
        changed = [place for place, mark in places if place.differs(mark)]
        changed += [place for layer in self._layers for place in layer.changed]
        self._changed = _digest(changed, self._changed)
        self._remember()

    def _remember(self) -> None:
        for layer in self._layers:
            layer.remember()
        self._first = [place.tensor.clone() for place in self._written]
        self._first_marks = [place.mark for place in self._written]
        self._marks = [place.mark for place in self._quiet]

    def _put_back(self) -> None:
        for layer in self._layers:
            layer.put_back()
        for place, first in zip(self._written, self._first):
            place.tensor.copy_(first)

    def _learn_who_writes(self) -> None:
        changed = [place.differs(mark) for place, mark in zip(self._quiet, self._marks)]
        self._written = [place for place, c in zip(self._quiet, changed) if c]
        self._first = [first for first, c in zip(self._probe, changed) if c]
        # Others may write to a parameter later: it may be trained by then.
        self._quiet = [p for p, c in zip(self._quiet, changed) if not c and not isinstance(p.tensor, nn.Parameter)]
        self._marks = [place.mark for place in self._quiet]
        self._probe, self._probing = [], False


@dataclass(frozen=True)
class _BufferSlot:
    """Where a buffer lives; its module may put another tensor there."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        buffer = getattr(self.module, self.key)
        assert isinstance(buffer, Tensor)
        return buffer

    @property
    def mark(self) -> tuple[Tensor, int]:
        """See `differs`."""
        return self.tensor, self.tensor._version

    def differs(self, mark: tuple[Tensor, int]) -> bool:
        """Whether the buffer was written or replaced since `mark` was taken."""
        return self.tensor is not mark[0] or self.tensor._version != mark[1]


class _Layer:
    """A normalisation layer with running statistics."""

    def __init__(self, name: str, module: _NormBase) -> None:
        self.name, self.module = name, module
        keys = [
            key for key in ("running_mean", "running_var", "num_batches_tracked") if getattr(module, key) is not None
        ]
        self._places = [_BufferSlot(f"{name}.{key}".lstrip("."), module, key) for key in keys]

    @property
    def buffers(self) -> list[Tensor]:
        """Mean, variance, and the number of visits where the layer counts them."""
        return [place.tensor for place in self._places]

    @property
    def changed(self) -> list[_BufferSlot]:
        """Those that were written since `remember`; what the layer's own forward pass writes does not count in all."""
        return [place for place, mark in zip(self._places, self._marks) if place.differs(mark)]

    def remember(self) -> None:
        self._first = [buffer.clone() for buffer in self.buffers]
        self._marks = [place.mark for place in self._places]

    def put_back(self) -> None:
        for buffer, first in zip(self.buffers, self._first):
            # A pipeline's earlier micro-batches wait for backward, which would take offence, and does not use them.
            buffer.data.copy_(first)

    def fold(self, table: Tensor, at: int) -> int:
        """Fold columns from `at` on of ``table[micro_batch]``; returns where the next layer's begin."""
        first = _flat(self._first).cpu()
        features, folded = 2 * self._first[0].numel(), first
        for row in table[:, at : at + first.numel()]:
            folded = self._stepped(folded, row, first, features)
        sizes = [buffer.numel() for buffer in self._first]
        for buffer, value in zip(self.buffers, folded.split(sizes)):
            buffer.copy_(value.view_as(buffer))
        return at + first.numel()

    def _stepped(self, state: Tensor, row: Tensor, first: Tensor, features: int) -> Tensor:
        """`state` after the visits that turned `first` into `row`. A moving average is affine in where it starts."""
        if torch.equal(row, first):  # the layer was not visited, or does not learn at present
            return state
        visits = float((row - first)[features:].sum())  # 0 where the layer does not count (instance normalisation)
        if visits < 0:
            raise UnisonoError(
                f"the running statistics of {self.name or 'the model'} were set back during a step: change them "
                "between optimizer.step() and the next forward pass"
            )
        if self.module.momentum is None:
            before, now = float(first[features]), float(state[features])
            stepped = (row * (before + visits) - first * before + state * now) / (now + visits)
        else:
            stepped = row + (1 - self.module.momentum) ** (visits or 1.0) * (state - first)
        stepped[features:] = state[features:] + visits
        return stepped


def _digest(places: Iterable[_BufferSlot], start: int) -> int:
    """Of names and values; `start` where there is none. It fits into a float64."""
    for place in places:
        values = place.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        start = zlib.crc32(values.numpy().tobytes(), zlib.crc32(place.name.encode(), start))
    return start


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1).double() for t in tensors])


def _folded(first: Tensor, rows: Tensor) -> Tensor:
    """A buffer after the step, from its first value and one row per micro-batch (float64, ``[count, numel]``)."""
    if first.dtype == torch.bool:
        return rows[-1].view_as(first)
    if not first.dtype.is_floating_point:
        return (first.reshape(-1).double() + (rows - first.reshape(-1).double()).sum(0)).view_as(first)
    mean = rows[0]
    for m, row in enumerate(rows[1:], start=2):
        mean = mean + (row - mean) / m  # a buffer that is the same in all rows comes out as it is, bit for bit
    return mean.view_as(first)
