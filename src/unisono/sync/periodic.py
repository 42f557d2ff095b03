"""Periodic averaging: local steps, the mean of the local updates, an outer step of the anchor.

    every replica i:  theta_i <- inner optimizer(theta_i)                     each step
    together:         g       <- sum over i of n_i / n (anchor - theta_i)     each `every` steps
                      anchor  <- outer optimizer(anchor, g)
                      theta_i <- anchor

`LocalSGD`, `BlockMomentum` and `DiLoCo` are forms of it. The papers take the plain mean of replicas with equal shares
of the data. Here replica i counts by its samples n_i, of n in all (McMahan et al. 2017, "Communication-Efficient
Learning of Deep Networks from Decentralized Data", algorithm 1), so that each sample counts alike whoever computes it.

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
    """The base of all forms; each defines its `rhythm`."""

    def rhythm(self, workers: int) -> SyncSchedule:
        """The schedule of this form with that number of replicas."""
        raise NotImplementedError

    def bind(
        self, parameters: Mapping[str, nn.Parameter], comm: Communicator, compress: Compressor, loop: Loop
    ) -> BoundPeriodic:
        """See `Synchronizer.bind`. Raises `InvalidInput` if there are more fragments than parameters."""
        rhythm = self.rhythm(comm.size)
        together = None
        if rhythm.start:
            together = AllReduce().bind(parameters, comm.channel("synchronous"), compress, loop)
        return BoundPeriodic(rhythm, parameters, comm, compress, loop, together)


class AnchorState(Enum):
    """The replicas' parameters relative to the anchor, between two steps."""

    ON_ANCHOR = "all have the same parameters, which are the anchor"
    TOGETHER = "all have the same parameters, between two synchronizations"
    APART = "each has its own parameters"


class BoundPeriodic(BoundSynchronizer):
    """The bound periodic algorithm; see `BoundSynchronizer` for the order of calls.

    Its schedule depends only on the number of steps taken, so all replicas synchronize after the same step.

    Args:
        together: takes the first, synchronous steps, if there are any.
    """

    synchronous = False

    def __init__(
        self,
        rhythm: SyncSchedule,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        compress: Compressor,
        loop: Loop,
        together: BoundAllReduce | None,
    ) -> None:
        self._rhythm, self._parameters = rhythm, parameters
        self._meeting = comm.channel("meeting")
        parts = divide(parameters, rhythm.fragments)
        reference = float(comm.size) if loop.reference is None else loop.reference
        self._fragments = [
            Fragment(part, comm.channel(f"fragment {f}"), compress, rhythm.outer, mix=rhythm.mix, reference=reference,
                     delayed=rhythm.delay > 0, control=loop.control if part is parts[-1] else 0)
            for f, part in enumerate(parts)
        ]  # fmt: skip
        self.local_gradients = together is None
        self._gradients: BoundAllReduce | LocalGradients = together or LocalGradients(parameters)
        self._taken = 0
        self._standing = AnchorState.ON_ANCHOR
        self._weight = 0.0  # of the step under way
        self._apart = 0.0  # of the local steps since all had the same parameters
        self.local_weight: float = 0.0

    def begin(self) -> None:
        self._gradients.begin()

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self._gradients.close(control, weight)
        self._weight = weight
        self._go_on()

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        self._gradients.offer(name, gradient, weight)
        self._go_on()

    def settle(self) -> PeriodicStep:
        self._go_on()
        return PeriodicStep(self, self._gradients.settle(), self._rhythm.lockstep(self._taken))

    def taken(self, control: list[float]) -> list[float] | None:
        """One more step was taken, locally or together: exchange what is due, and take in what is due. Returns the
        control words of all, if they came: those of the step at which they were sent."""
        rhythm = self._rhythm
        synchronous = rhythm.lockstep(self._taken)
        self._taken += 1
        if synchronous:
            self._leave_lockstep_if_due()
            return None
        self._count()
        last = len(self._fragments) - 1  # with which control words travel
        leaving, coming = rhythm.due(self._taken), rhythm.due(self._taken - rhythm.delay)
        if leaving is not None:
            self._fragments[leaving].send(control if leaving == last else [])
        if coming is None or not self._fragments[coming].sent:  # a meeting may have taken it in
            return None
        heard = self._fragments[coming].take_in()
        if rhythm.whole:
            self._standing, self._apart = AnchorState.ON_ANCHOR, 0.0
        return heard if coming == last else None

    def synchronize(self) -> None:
        """What was sent is taken in, and the walks, uncompressed, become their mean; which leaves the mean of the
        walks, and the anchor, as they are."""
        for fragment in self._fragments:
            if fragment.sent:
                fragment.take_in()
        if self._standing is AnchorState.APART:
            weights = Weights(self._parameters, Cast())
            weights.write(mean(weights.read(), self._meeting, self._apart))
            self._standing = AnchorState.TOGETHER
        # As in a run that is resumed here, which does not know what was counted.
        self._apart = self.local_weight = 0.0
        for fragment in self._fragments:
            fragment.forget()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The parameters where all replicas have the same, else the anchor: what the papers evaluate, here without a
        word between the replicas. In the streaming form its fragments are of different ages."""
        if self._standing is not AnchorState.APART:
            yield
            return
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._put(self._anchors())
        try:
            yield
        finally:
            self._put(own)

    def state_dict(self) -> dict[str, Tensor]:
        """The number of steps taken, the anchor where the parameters are off it, and what the outer optimizer
        remembers."""
        anchors = {} if self._standing is AnchorState.ON_ANCHOR else self._anchors()
        state = {f"anchor/{name}": tensor for name, tensor in anchors.items()}
        state |= {f"velocity/{name}": tensor for part in self._fragments for name, tensor in part.velocity.items()}
        return {name: tensor.contiguous() for name, tensor in state.items()} | {"taken": torch.tensor(self._taken)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._taken = int(state["taken"])
        self._standing = AnchorState.ON_ANCHOR
        for fragment in self._fragments:
            fragment.anchor_here()
            for kind, tensors in (("anchor", fragment.anchor), ("velocity", fragment.velocity)):
                for name, tensor in tensors.items():
                    if f"{kind}/{name}" in state:
                        tensor.copy_(state[f"{kind}/{name}"])
                        self._standing = AnchorState.TOGETHER if kind == "anchor" else self._standing
        self._leave_lockstep_if_due()

    def residual_state(self) -> dict[str, Tensor]:
        together = self._gradients.residual_state()
        apart = {f"fragment {f}": fragment.residual_state() for f, fragment in enumerate(self._fragments)}
        owed = {"together": together, **apart}
        return {f"{at}/{name}": tensor for at, state in owed.items() for name, tensor in state.items()}

    def load_residuals(self, owed: Mapping[str, Tensor]) -> None:
        self._gradients.load_residuals(under("together", owed))
        for f, fragment in enumerate(self._fragments):
            fragment.load_residuals(under(f"fragment {f}", owed))

    def _count(self) -> None:
        """A local step was taken."""
        self._standing = AnchorState.APART
        self._apart, self.local_weight = self._apart + self._weight, self.local_weight + self._weight
        for fragment in self._fragments:
            fragment.count(self._weight)

    def _leave_lockstep_if_due(self) -> None:
        if isinstance(self._gradients, BoundAllReduce) and not self._rhythm.lockstep(self._taken):
            self._gradients = LocalGradients(self._parameters)
            if self._taken == self._rhythm.start:
                for fragment in self._fragments:
                    fragment.anchor_here()

    def _go_on(self) -> None:
        """Exchanges under way move on."""
        for fragment in self._fragments:
            fragment.poll()

    def _anchors(self) -> dict[str, Tensor]:
        return {name: tensor for fragment in self._fragments for name, tensor in fragment.anchor.items()}

    @torch.no_grad()
    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])


class PeriodicStep:
    """What one step is about to do: the local one, or the synchronous one of the start, and the exchange that may be
    due after it. See `PendingUpdate`."""

    def __init__(self, periodic: BoundPeriodic, change: PendingUpdate, synchronous: bool) -> None:
        self._periodic, self._change = periodic, change
        self.agreed, self.control = synchronous, change.control

    def norm(self, without: Collection[str] = ()) -> float:
        """See `PendingUpdate.norm`."""
        return self._change.norm(without)

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """The optimizer's step first, then what is due. A lost peer leaves the parameters after that step."""
        result = self._change.apply(step, scale)
        heard = self._periodic.taken(self._change.control)
        if heard is not None:
            self.agreed, self.control = True, heard
        return result
