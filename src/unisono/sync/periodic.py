"""Periodic averaging: replicas take local steps; then the mean of their updates moves the anchor by an outer step.

    every replica i:  theta_i <- inner optimizer(theta_i)                     each step
    all replicas:     g       <- sum over i of n_i / n (anchor - theta_i)     each `every` steps
                      anchor  <- outer optimizer(anchor, g)
                      theta_i <- anchor

`LocalSGD`, `BlockMomentum` and `DiLoCo` are its forms. The papers take the plain mean of replicas with equal shares
of the data. Here replica i is weighted by its samples n_i, of n in all (McMahan et al. 2017, "Communication-Efficient
Learning of Deep Networks from Decentralized Data", algorithm 1). So all samples have the same weight.

The streaming form synchronizes one fragment of the parameters at a time, and applies the mean update some steps after
it was sent (see `SyncSchedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.compress import Cast, Compressor
from unisono.sync.all_reduce import AllReduce, BoundAllReduce
from unisono.sync.bucket_reduction import under
from unisono.sync.flat_weights import Weights, mean
from unisono.sync.fragment import Fragment
from unisono.sync.local_gradients import LocalGradients
from unisono.sync.sync_schedule import SyncSchedule, divide
from unisono.sync.synchronizer import BoundSynchronizer, Loop, PendingUpdate


class Periodic:
    """Base of all periodic synchronizers; a subclass defines `schedule`."""

    def schedule(self, workers: int) -> SyncSchedule:
        """The schedule for a number of replicas."""
        raise NotImplementedError

    def bind(
        self, parameters: Mapping[str, nn.Parameter], comm: Communicator, compress: Compressor, loop: Loop
    ) -> BoundPeriodic:
        """See `Synchronizer.bind`. Raises `InvalidInput` if there are more fragments than parameters."""
        schedule = self.schedule(comm.size)
        synchronous_phase = None
        if schedule.start:
            synchronous_phase = AllReduce().bind(parameters, comm.channel("synchronous"), compress, loop)
        return BoundPeriodic(schedule, parameters, comm, compress, loop, synchronous_phase)


class AnchorState(Enum):
    """The replicas' parameters relative to the anchor, between two steps."""

    ON_ANCHOR = "all have the same parameters, which are the anchor"
    EQUAL = "all have the same parameters, between two synchronizations"
    DIVERGED = "each has its own parameters"


class BoundPeriodic(BoundSynchronizer):
    """The bound periodic algorithm; see `BoundSynchronizer` for the order of calls.

    Its schedule depends only on the number of steps taken, so all replicas synchronize after the same step.

    Args:
        synchronous_phase: the synchronizer of the synchronous steps at the beginning; None: there are none.
    """

    synchronous = False

    def __init__(
        self,
        schedule: SyncSchedule,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        compress: Compressor,
        loop: Loop,
        synchronous_phase: BoundAllReduce | None,
    ) -> None:
        self._schedule, self._parameters = schedule, parameters
        self._synchronization = comm.channel("synchronization")
        parts = divide(parameters, schedule.fragments)
        reference = float(comm.size) if loop.reference is None else loop.reference
        self._fragments = [
            Fragment(part, comm.channel(f"fragment {f}"), compress, schedule.outer, mix=schedule.mix,
                     reference=reference, delayed=schedule.delay > 0,
                     control=loop.control if part is parts[-1] else 0)
            for f, part in enumerate(parts)
        ]  # fmt: skip
        self.local_gradients = synchronous_phase is None
        self._gradients: BoundAllReduce | LocalGradients = synchronous_phase or LocalGradients(parameters)
        self._taken = 0
        self._anchor_state = AnchorState.ON_ANCHOR
        self._weight = 0.0  # the weight of this replica's samples in the current step
        self._diverged_weight = 0.0  # their weight in the local steps since all replicas had the same parameters
        self.local_weight: float = 0.0

    def begin(self) -> None:
        self._gradients.begin()

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self._gradients.close(control, weight)
        self._weight = weight
        self._advance()

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        self._gradients.offer(name, gradient, weight)
        self._advance()

    def settle(self) -> PeriodicStep:
        self._advance()
        return PeriodicStep(self, self._gradients.settle(), self._schedule.is_synchronous(self._taken))

    def after_step(self, control: list[float]) -> list[float] | None:
        """Count one more step, send the fragment that is due to be sent, and receive the one that is due to arrive.

        Returns the sum of all control words if it arrived. It is of the step in which the words were sent.
        """
        schedule = self._schedule
        synchronous = schedule.is_synchronous(self._taken)
        self._taken += 1
        if synchronous:
            self._start_local_steps_if_due()
            return None
        self._count_local_step()
        last = len(self._fragments) - 1  # the control word is sent with the last fragment
        due_to_send, due_to_receive = schedule.due(self._taken), schedule.due(self._taken - schedule.delay)
        if due_to_send is not None:
            self._fragments[due_to_send].send(control if due_to_send == last else [])
        if due_to_receive is None or not self._fragments[due_to_receive].sent:  # `synchronize` may have received it
            return None
        received = self._fragments[due_to_receive].receive()
        if schedule.whole:
            self._anchor_state, self._diverged_weight = AnchorState.ON_ANCHOR, 0.0
        return received if due_to_receive == last else None

    def synchronize(self) -> None:
        """Collective: receive fragments in flight, then replace the parameters by their uncompressed mean.

        The replacement changes neither the anchor nor the mean local update.
        """
        for fragment in self._fragments:
            if fragment.sent:
                fragment.receive()
        if self._anchor_state is AnchorState.DIVERGED:
            weights = Weights(self._parameters, Cast())
            weights.write(mean(weights.read(), self._synchronization, self._diverged_weight))
            self._anchor_state = AnchorState.EQUAL
        # A run that is resumed here starts with counts of 0 too.
        self._diverged_weight = self.local_weight = 0.0
        for fragment in self._fragments:
            fragment.reset_count()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the parameters are the anchor, unless all replicas have the same parameters anyway.

        The papers evaluate the anchor too. It needs no communication. In the streaming form, its fragments are of
        different ages.
        """
        if self._anchor_state is not AnchorState.DIVERGED:
            yield
            return
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._write(self._anchors())
        try:
            yield
        finally:
            self._write(own)

    def state_dict(self) -> dict[str, Tensor]:
        """The number of steps taken, the anchor unless the parameters equal it, and the outer optimizer's state."""
        anchors = {} if self._anchor_state is AnchorState.ON_ANCHOR else self._anchors()
        state = {f"anchor/{name}": tensor for name, tensor in anchors.items()}
        state |= {f"velocity/{name}": tensor for part in self._fragments for name, tensor in part.velocity.items()}
        return {name: tensor.contiguous() for name, tensor in state.items()} | {"taken": torch.tensor(self._taken)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._taken = int(state["taken"])
        self._anchor_state = AnchorState.ON_ANCHOR
        for fragment in self._fragments:
            fragment.set_anchor()
            for kind, tensors in (("anchor", fragment.anchor), ("velocity", fragment.velocity)):
                for name, tensor in tensors.items():
                    if f"{kind}/{name}" in state:
                        tensor.copy_(state[f"{kind}/{name}"])
                        self._anchor_state = AnchorState.EQUAL if kind == "anchor" else self._anchor_state
        self._start_local_steps_if_due()

    def residual_state(self) -> dict[str, Tensor]:
        local = {f"fragment {f}": fragment.residual_state() for f, fragment in enumerate(self._fragments)}
        residuals = {"together": self._gradients.residual_state(), **local}
        return {f"{part}/{name}": tensor for part, state in residuals.items() for name, tensor in state.items()}

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        self._gradients.load_residuals(under("together", residuals))
        for f, fragment in enumerate(self._fragments):
            fragment.load_residuals(under(f"fragment {f}", residuals))

    def _count_local_step(self) -> None:
        self._anchor_state = AnchorState.DIVERGED
        self._diverged_weight += self._weight
        self.local_weight += self._weight
        for fragment in self._fragments:
            fragment.count_step(self._weight)

    def _start_local_steps_if_due(self) -> None:
        if isinstance(self._gradients, BoundAllReduce) and not self._schedule.is_synchronous(self._taken):
            self._gradients = LocalGradients(self._parameters)
            if self._taken == self._schedule.start:
                for fragment in self._fragments:
                    fragment.set_anchor()

    def _advance(self) -> None:
        """Let exchanges in flight make progress."""
        for fragment in self._fragments:
            fragment.poll()

    def _anchors(self) -> dict[str, Tensor]:
        return {name: tensor for fragment in self._fragments for name, tensor in fragment.anchor.items()}

    @torch.no_grad()
    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])


class PeriodicStep:
    """The update of one step, local or synchronous, and the exchanges that are due after it; a `PendingUpdate`."""

    def __init__(self, periodic: BoundPeriodic, update: PendingUpdate, synchronous: bool) -> None:
        self._periodic, self._update = periodic, update
        self.agreed, self.control = synchronous, update.control

    def norm(self, without: Collection[str] = ()) -> float:
        return self._update.norm(without)

    def write(self, scale: float = 1.0) -> None:
        self._update.write(scale)

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Take the optimizer's step, then make the exchanges that are due.

        Raises:
            PeerLost: the parameters are those after the optimizer's step.
        """
        result = self._update.apply(step, scale)
        received = self._periodic.after_step(self._update.control)
        if received is not None:
            self.agreed, self.control = True, received
        return result
