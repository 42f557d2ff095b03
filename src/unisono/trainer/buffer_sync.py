"""Synchronizes buffers: collects their values after each micro-batch, and folds them in the order of micro-batches.

Buffers change with every forward pass, mainly the running statistics of batch normalization; a frozen parameter can
serve as a buffer too. Without synchronization they would depend on which worker computed which micro-batch. Here every
micro-batch of a step starts from the same buffers. Workers share the values after each micro-batch, and all fold the
same rows in the same order:

- running statistics of normalization layers: a moving average with one update per call of the layer, as in one process
  that computes all micro-batches one after the other;
- other integers (counters): the sum of the increments;
- other floating-point numbers: the mean over the micro-batches; booleans: the last one.

In a custom loop, the user's changes between two steps count: the step starts from the buffers as they are at the first
forward pass.

    begin ── the user's changes ── first forward pass: adopt ── after ── before: restore ── ... ── fold
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
    """The buffers of the part of the model that one worker has: one `BufferSync` per pipeline stage.

    Args:
        synchronous: replicas are equal after every step, so all of them fold the same rows.
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
        buffers_of = {
            stage: BufferSync(module, micro_batches, channel, drops=may_undo, adopts=adopts)
            for stage, module in sorted(stages.items())
        }
        self._stages = {stage: buffers for stage, buffers in buffers_of.items() if buffers.active}

    def before(self, stage: int = 0) -> None:
        """See `BufferSync.before`."""
        if stage in self._stages:
            self._stages[stage].before()

    def after(self, micro_batch: int, stage: int = 0, *, ran: bool = True) -> None:
        """See `BufferSync.after`."""
        if stage in self._stages:
            self._stages[stage].after(micro_batch, ran=ran)

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
    """Synchronizes the buffers of one model.

    Per step: `begin`, `before` and `after` around each forward pass of this worker, `send`, `fold` or `drop`. With a
    single micro-batch there is nothing to fold, and buffers are not touched, unless `drops`.

    Args:
        micro_batches: of a step, on all workers.
        comm: a channel for the buffers alone; None: the replica folds only the rows of its own micro-batches.
        drops: a step may be dropped.
        adopts: changes between two steps count, else they are undone. This needs hooks, which `close` removes.
    """

    def __init__(
        self, model: nn.Module, micro_batches: int, comm: Communicator | None, *, drops: bool = False,
        adopts: bool = False,
    ) -> None:  # fmt: skip
        self._comm, self._count, self._model, self._adopts = comm, micro_batches, model, adopts
        named = {
            name: m for name, m in model.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None
        }
        excluded = {id(b) for layer in named.values() for b in layer.buffers(recurse=False)}
        # A trainable parameter is no buffer, nor is a sharded one, which is gathered and freed again.
        excluded |= {id(p) for p in model.parameters() if p.requires_grad or hasattr(p, "to_local")}
        self._layers = [_Layer(n, layer) for n, layer in named.items() if not getattr(layer, "buffers_agree", False)]
        self._unwritten = [
            _BufferSlot(f"{path}.{key}".lstrip("."), module, key)
            for path, module in model.named_modules()
            for key, tensor in (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False))
            if id(tensor) not in excluded
        ]
        self._written: list[_BufferSlot] = []
        self._probing = True
        self._probed_values: list[Tensor] = []
        self.active = (micro_batches > 1 or drops) and bool(self._layers or self._unwritten)
        self._hooks = before_forward(self._owners(), self._on_forward) if self.active and adopts else []

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Begin a step: remember the buffers that it starts from."""
        self._remember()
        self._may_adopt, self._before_called, self._changed = self._adopts, False, 0
        self._ran = False
        self._rows: dict[int, Tensor] = {}
        self._work: Work[Tensor] | None = None

    def before(self) -> None:
        """Before the forward pass of a micro-batch: restore the buffers that the step starts from."""
        if self._may_adopt:
            self._adopt()
        self._before_called, self._ran = True, False
        if self._probing:
            self._probed_values = [slot.tensor.clone() for slot in self._unwritten]
        self._restore()

    def after(self, micro_batch: int, *, ran: bool = True) -> None:
        """After the forward pass of a micro-batch: collect the values of the buffers.

        Args:
            ran: whether there certainly was a forward pass; if not, it is known from the hooks.
        """
        if not (ran or self._ran):
            return
        self._may_adopt = False
        if self._probing:
            self._find_written()
        if values := self._values():
            # A digest of the user's changes; and 1.0, which marks the row as present.
            trailer = torch.tensor([self._changed, 1.0], dtype=torch.float64, device=values[0].device)
            self._rows[micro_batch] = _flat([*values, trailer])

    def _values(self) -> list[Tensor]:
        return [b for layer in self._layers for b in layer.buffers] + [p.tensor for p in self._written]

    def undo(self) -> None:
        """Restore the buffers from the start of the step, without waiting for other workers."""
        self._restore()
        for slot, first in zip(self._unwritten, self._probed_values):  # until `_find_written`
            slot.tensor.copy_(first)

    def send(self) -> None:
        """After this worker's last forward pass: start sharing its rows; backward can run meanwhile."""
        if self._may_adopt and not self._rows:
            self._adopt()
        if self._comm is None:
            rows = [self._rows[m] for m in sorted(self._rows)]
            self._work = Finished(torch.stack(rows).view(-1)) if rows else None
        elif width := sum(value.numel() for value in self._values()):
            device = self._values()[0].device
            table = torch.zeros(self._count, width + 2, dtype=torch.float64, device=device)
            for micro_batch, row in self._rows.items():
                table[micro_batch] = row
            # Adding 0.0 turns -0.0 into 0.0, as the sum with other workers' zeros does.
            self._work = self._comm.sum(table.add_(0.0).view(-1))

    def fold(self) -> None:
        """Wait for the rows of all workers, and fold them. Raises `PeerLost`, `MessageMismatch`."""
        late = [p.name for p, mark in zip(self._unwritten, self._marks) if p.differs(mark)]
        if late:
            raise UnisonoError(
                f"buffer {late[0]} changed during a step, though the first forward pass did not write it: write it in "
                "every training pass or in none, or change it between optimizer.step() and the next forward pass"
            )
        if self._work is None:
            return
        # Many small operations: on a GPU each would cost a kernel launch and a synchronization.
        count = self._count if self._comm is not None else len(self._rows)
        table, at = self._work.wait().view(count, -1).cpu(), 0
        table = table[table[:, -1] > 0]  # with local steps a replica has only some micro-batches of a step
        if not len(table):
            return
        if (table[:, -2] != table[0, -2]).any():
            raise UnisonoError("buffers were changed between two steps, but not equally on all workers: change them on "
                               "every worker, to the same values")  # fmt: skip
        for layer in self._layers:
            at = layer.fold(table, at)
        for slot, first in zip(self._written, self._first):
            slot.tensor.copy_(_folded(first.cpu(), table[:, at : at + first.numel()]))
            at += first.numel()

    def drop(self) -> None:
        """In place of `fold`: restore the buffers from the start of the step. Raises `PeerLost`, `MessageMismatch`."""
        if self._work is not None:
            self._work.wait()
        self.undo()

    def _owners(self) -> list[nn.Module]:
        """The model and its modules with such buffers: every forward pass calls at least one of them."""
        modules = {id(slot.module): slot.module for slot in self._unwritten} | {
            id(x.module): x.module for x in self._layers
        }
        return [self._model, *(module for module in modules.values() if module is not self._model)]

    def _on_forward(self) -> None:
        """A forward pass begins: adopt the buffers if it is the first one of the step after `before`."""
        if torch.compiler.is_compiling():  # tracing this would cause a graph break; `before` has adopted what it can
            return
        self._ran = self._ran or self._model.training
        if self._may_adopt and self._before_called and self._model.training:
            self._adopt()
            self._may_adopt = False

    def _adopt(self) -> None:
        """Start the step from the buffers as they are now, and digest what was changed."""
        marked = [*zip(self._written, self._first_marks), *zip(self._unwritten, self._marks)]
        changed = [slot for slot, mark in marked if slot.differs(mark)]
        changed += [slot for layer in self._layers for slot in layer.changed]
        self._changed = _digest(changed, self._changed)
        self._remember()

    def _remember(self) -> None:
        for layer in self._layers:
            layer.remember()
        self._first = [slot.tensor.clone() for slot in self._written]
        self._first_marks = [slot.mark for slot in self._written]
        self._marks = [slot.mark for slot in self._unwritten]

    def _restore(self) -> None:
        for layer in self._layers:
            layer.restore()
        for slot, first in zip(self._written, self._first):
            slot.tensor.copy_(first)

    def _find_written(self) -> None:
        changed = [slot.differs(mark) for slot, mark in zip(self._unwritten, self._marks)]
        self._written = [slot for slot, c in zip(self._unwritten, changed) if c]
        self._first = [first for first, c in zip(self._probed_values, changed) if c]
        # A parameter may become trainable and be written by the optimizer later: it is not watched.
        self._unwritten = [
            p for p, c in zip(self._unwritten, changed) if not c and not isinstance(p.tensor, nn.Parameter)
        ]
        self._marks = [slot.mark for slot in self._unwritten]
        self._probed_values, self._probing = [], False


@dataclass(frozen=True)
class _BufferSlot:
    """The attribute of a module that holds a buffer; the module may assign another tensor to it."""

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
    """A normalization layer with running statistics."""

    def __init__(self, name: str, module: _NormBase) -> None:
        self.name, self.module = name, module
        keys = [
            key for key in ("running_mean", "running_var", "num_batches_tracked") if getattr(module, key) is not None
        ]
        self._slots = [_BufferSlot(f"{name}.{key}".lstrip("."), module, key) for key in keys]

    @property
    def buffers(self) -> list[Tensor]:
        """Mean, variance, and the number of calls where the layer counts them."""
        return [slot.tensor for slot in self._slots]

    @property
    def changed(self) -> list[_BufferSlot]:
        """Those written since `remember`; not all writes of the layer's own forward pass are seen."""
        return [slot for slot, mark in zip(self._slots, self._marks) if slot.differs(mark)]

    def remember(self) -> None:
        self._first = [buffer.clone() for buffer in self.buffers]
        self._marks = [slot.mark for slot in self._slots]

    def restore(self) -> None:
        for buffer, first in zip(self.buffers, self._first):
            # `.data`, else autograd would reject the write: earlier micro-batches of a pipeline still await backward,
            # which does not use these buffers.
            buffer.data.copy_(first)

    def fold(self, table: Tensor, at: int) -> int:
        """Fold the columns of ``table[micro_batch]`` from `at` on; returns where those of the next layer begin."""
        first = _flat(self._first).cpu()
        features, folded = 2 * self._first[0].numel(), first
        for row in table[:, at : at + first.numel()]:
            folded = self._updated(folded, row, first, features)
        sizes = [buffer.numel() for buffer in self._first]
        for buffer, value in zip(self.buffers, folded.split(sizes)):
            buffer.copy_(value.view_as(buffer))
        return at + first.numel()

    def _updated(self, state: Tensor, row: Tensor, first: Tensor, features: int) -> Tensor:
        """`state` after the calls that turned `first` into `row`. A moving average is affine in its start value."""
        if torch.equal(row, first):  # the layer was not called, or is in evaluation mode
            return state
        calls = float((row - first)[features:].sum())  # 0 where the layer does not count (instance normalization)
        if calls < 0:
            raise UnisonoError(
                f"the running statistics of {self.name or 'the model'} were set back during a step: change them "
                "between optimizer.step() and the next forward pass"
            )
        if self.module.momentum is None:
            before, now = float(first[features]), float(state[features])
            updated = (row * (before + calls) - first * before + state * now) / (now + calls)
        else:
            updated = row + (1 - self.module.momentum) ** (calls or 1.0) * (state - first)
        updated[features:] = state[features:] + calls
        return updated


def _digest(slots: Iterable[_BufferSlot], start: int) -> int:
    """Digest of names and values; `start` where there are none. A float64 holds it exactly."""
    for slot in slots:
        values = slot.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        start = zlib.crc32(values.numpy().tobytes(), zlib.crc32(slot.name.encode(), start))
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
        mean = mean + (row - mean) / m  # a buffer that is equal in all rows keeps its bits
    return mean.view_as(first)
