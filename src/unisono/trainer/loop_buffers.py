"""The buffers of a model in a custom loop, whose forward passes the loop runs when it likes."""

from __future__ import annotations

from unisono.comm.process_groups import ProcessGroups
from unisono.layout import LocalModel
from unisono.trainer.buffer_sync import StageBuffers


class LoopBuffers:
    """Collects a model's buffers after the forward passes of each micro-batch, and folds them.

    Args:
        synchronous: replicas are equal after every step.
        may_undo: a step may be dropped or repeated.
    """

    def __init__(
        self, local: LocalModel, micro_batches: int, groups: ProcessGroups, synchronous: bool, *, may_undo: bool
    ) -> None:
        self._buffers = StageBuffers(local, micro_batches, groups, synchronous, may_undo=may_undo, adopts=True)
        self.begin()

    def begin(self) -> None:
        """Begin from the buffers as they are."""
        self._buffers.begin()
        self._micro_batch: int | None = None  # whose forward passes may have run

    def begin_micro_batch(self, micro_batch: int) -> None:
        """Before the forward passes of `micro_batch`."""
        self._buffers.before()
        self._micro_batch = micro_batch

    def end_forward(self, ran: bool) -> None:
        """After the forward passes of a micro-batch, of which there may be none.

        Args:
            ran: whether there certainly was one.
        """
        if self._micro_batch is not None:
            self._buffers.after(self._micro_batch, ran=ran)
            self._micro_batch = None

    def send(self) -> None:
        """Start sharing the values with other workers."""
        self._buffers.send()

    def fold(self) -> None:
        """Collective, after `send`: wait for the values of all workers, fold them, and begin anew."""
        self._buffers.fold()
        self.begin()

    def undo(self) -> None:
        """Restore the buffers from `begin`."""
        self._buffers.undo()

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._buffers.close()
