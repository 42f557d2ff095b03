"""One slice on a server: its weights, its optimizer, and the pushes and pulls of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.actor import ActorMessage
from unisono.compress import Compressor, Span, views
from unisono.sync.server.accumulation import Done, PushAccumulator, RoundAccumulator
from unisono.sync.server.delay_compensation import Compensation
from unisono.sync.server.slice_optimizer import Numbers, Place, SliceOptimizer
from unisono.sync.server.weight_deltas import WeightDeltas, saves_bytes


class MessageRefused(ValueError):
    """A message that no worker of this run can have sent; it has not changed the state."""


@dataclass(frozen=True)
class ServerTerms:
    """The settings that all slices of a run share.

    Args:
        workers: the number of workers.
        synchronous: whether every step uses the gradients of all workers.
        needed: if not synchronous, the number of micro-batches that make a step; with `drops_late`, of pushes.
        drops_late: whether pushes for a step that is already taken are dropped.
        compensate: the correction of stale gradients; None: no correction.
        control: the length of the control word, in numbers.
        optimizer: the optimizer's name in `slice_optimizer.ELEMENTWISE`.
        groups: the initial hyperparameters of the optimizer.
    """

    workers: int
    synchronous: bool
    needed: int
    drops_late: bool
    compensate: Compensation | None
    control: int
    optimizer: str
    groups: Sequence[Numbers]


@dataclass(frozen=True)
class SliceSpec:
    """The spans, dtype and compressor of a slice, and the indices of its pieces' parameter groups (`members`)."""

    spans: tuple[Span, ...]
    members: tuple[int, ...]
    dtype: torch.dtype
    compress: Compressor

    @property
    def numel(self) -> int:
        """The number of elements of the slice."""
        return self.spans[-1].stop


@dataclass(frozen=True)
class Push:
    """A gradient that a worker has pushed.

    Args:
        number: the round, if synchronous; else the count of this worker's pushes, from 1.
        total: the decoded gradient; None if no piece was used.
        used: for each piece, whether the worker has a gradient of it.
        version: the version of the weights on which the gradient was computed.
        tick: the server's step to which the gradient belongs.
        count: the number of micro-batches over which the gradient was computed.
        scale: the factor that makes `total` the mean over these micro-batches.
    """

    worker: int
    number: int
    total: Tensor | None
    used: Sequence[bool]
    version: int = 0
    tick: int = 0
    count: int = 1
    scale: float = 1.0


class ServerSlice:
    """The state of one slice. Methods are in the order of a step; the caller validates messages.

    Attributes:
        version: the number of steps that these weights have taken, including a step that is deferred.
        dropped: the number of pushes that came too late for their step.
    """

    def __init__(
        self,
        spec: SliceSpec,
        terms: ServerTerms,
        weights: Tensor,
        places: Sequence[Place] = (),
        state: Sequence[Tensor] = (),
    ) -> None:
        self.spec, self._terms = spec, terms
        self.weights = weights.clone()
        self.version = self.dropped = 0
        self.optimizer = SliceOptimizer(terms.optimizer, terms.groups, spec.members, views(self.weights, spec.spans))
        self.optimizer.load(places, state)
        self.round_sum = RoundAccumulator(terms.workers, len(spec.spans))
        self._push_mean = PushAccumulator(terms.needed, terms.drops_late, len(spec.spans))
        self._deltas: WeightDeltas | None = None
        if saves_bytes(spec.compress, spec.spans, spec.numel, spec.dtype):
            self._deltas = WeightDeltas(spec.compress, spec.spans, self.weights)
        self._published = 0  # the version of the newest delta
        self._last_push = [0] * terms.workers
        self._added: dict[int, int] = {}  # how many micro-batches have arrived, for each step that is not complete
        self._complete = 0
        self._history = (
            WeightHistory(terms.workers, self.weights)
            if terms.compensate and terms.compensate.needs_old_weights
            else None
        )
        self._memory: dict[str, Tensor] = {}  # the state of the compensation
        self._due: Callable[[], None] | None = None
        self._take: tuple[int, float, Sequence[Numbers]] = 0, 1.0, ()
        self._taken = 0
        self._lent: set[object] = set()
        self._waiting: list[tuple[int, Done]] = []

    @property
    def begun(self) -> bool:
        """Whether a worker has pushed a gradient."""
        return self.round_sum.round > 0 or any(self._last_push)

    # Synchronous: pushes of all workers, then `take` of any of them.

    def add_to_round(self, push: Push, done: Done) -> None:
        """Add `push` to the sum of its round; the tensor of `push` must not change until ``done()``."""
        if push.version > self.version:
            raise MessageRefused(
                f"worker {push.worker} pushed a gradient for weight version {push.version}, but the server is at "
                f"version {self.version}"
            )
        self._take_due_step()  # the step reads the sum of the last round, whose memory is used again
        self.round_sum.push(push.worker, push.number, push.total, push.used, done)
        self._step_if_due()

    def squares(self) -> list[float]:
        """The squared 2-norm of each piece of the mean gradient of the complete round."""
        gradient = self._gradient()
        if gradient is None:
            return [0.0] * len(self.spec.spans)
        pieces = views(gradient, self.spec.spans)
        return [float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2 for piece in pieces]

    def take(self, round_: int, scale: float, groups: Sequence[Numbers]) -> None:
        """Take the step of ``scale * mean`` of `round_`, as soon as all workers have pushed for that round."""
        if round_ > self._take[0]:
            self._take = round_, scale, groups
            self._step_if_due()

    def _step_if_due(self) -> None:
        """Count the step of a complete round now; its arithmetic is deferred to the first access to the weights."""
        round_, scale, groups = self._take
        if self.round_sum.complete and self.round_sum.round == round_ and self._taken < round_:
            self._taken = round_
            self._due = lambda: self._take_step(self._gradient(), scale, self.round_sum.used, groups)
            self.version += 1
            self._answer_waiting()

    def _gradient(self) -> Tensor | None:
        total = self.round_sum.total
        return None if total is None else self.spec.compress.value(total, self.spec.dtype)

    # Asynchronous: each push by itself.

    def add_push(self, push: Push, groups: Sequence[Numbers]) -> bool:
        """Add `push`, unless it repeats an earlier one. Returns False if it came too late and was dropped."""
        if push.number <= self._last_push[push.worker]:
            return True
        if push.number > self._last_push[push.worker] + 1:
            raise MessageRefused(
                f"worker {push.worker} sent push {push.number}, but its last was push {self._last_push[push.worker]}"
            )
        if push.version > self.version:
            raise MessageRefused(
                f"worker {push.worker} pushed a gradient for weight version {push.version}, but the server is at "
                f"version {self.version}"
            )
        self._last_push[push.worker] = push.number
        if self._terms.drops_late and push.tick < self.version:
            self.dropped += 1
            return False
        if self._terms.compensate is None or push.total is None:
            gradient = None if push.total is None else self.spec.compress.value(push.total, self.spec.dtype)
            self._push_mean.push(gradient, push.count, push.used, push.scale)
        else:
            self._push_mean.push(self._corrected(self._terms.compensate, push, push.total), push.count, push.used)
        self._count(push)
        if self._push_mean.full:
            used = self._push_mean.used
            mean = self._push_mean.take()
            self._take_step(None if mean is None else mean.to(self.spec.dtype), 1.0, used, groups)
            self.version += 1
        self._answer_waiting()
        return True

    def _count(self, push: Push) -> None:
        """Count the micro-batches of `push` for its step: a step is complete when all of them have arrived."""
        self._added[push.tick] = self._added.get(push.tick, 0) + push.count
        while self._added.get(self._complete, 0) >= self._terms.needed:
            del self._added[self._complete]
            self._complete += 1

    def _corrected(self, compensate: Compensation, push: Push, total: Tensor) -> Tensor:
        gradient = self.spec.compress.value(total, self.spec.dtype) * push.scale
        then = self._history.of_worker(push.worker) if self._history else self.weights
        return compensate.correct(gradient, self.weights, then, self.version - push.version, self._memory)

    # The step, and what goes out.

    def _take_step(
        self, gradient: Tensor | None, scale: float, used: Sequence[bool], groups: Sequence[Numbers]
    ) -> None:
        if gradient is None:
            return
        if self._lent:  # an answer to a worker may still read the weights
            self.weights, self._lent = self.weights.clone(), set()
            self.optimizer.set_weights(views(self.weights, self.spec.spans))
        # The sum is not changed, because a worker may still request its norm.
        parts = views(gradient if scale == 1.0 else gradient * scale, self.spec.spans)
        self.optimizer.step([part if was else None for part, was in zip(parts, used)], groups)

    @property
    def _reached(self) -> int:
        """The number of steps, from the first on, of which these weights contain all gradients."""
        return self.version if self._terms.synchronous or self._terms.drops_late else self._complete

    def _answer_waiting(self) -> None:
        reached = self._reached
        ready = [done for need, done in self._waiting if need <= reached]
        self._waiting = [(need, done) for need, done in self._waiting if need > reached]
        for done in ready:
            done()

    def _take_due_step(self) -> None:
        if self._due is not None:
            due, self._due = self._due, None
            due()

    def when_reached(self, need: int, done: Done) -> None:
        """Call ``done()`` when these weights contain the gradients of all steps before `need`."""
        if self._reached >= need:
            done()
        else:
            self._waiting.append((need, done))

    def update(self, worker: int, delta_number: int) -> tuple[ActorMessage, bool]:
        """The message that updates `worker` from `delta_number` to the newest weights, and whether it contains these.

        If so, the message's tensor is `weights` itself, not a copy.
        """
        self._take_due_step()
        if self._deltas is None:
            newest, tensors, whole = self.version, [self.weights], True
        else:
            if self._published < self.version:
                self._published = self.version
                self._deltas.publish(self.weights)
            messages = self._deltas.since(delta_number)
            newest, whole = self._deltas.number, messages is None
            tensors = [self._deltas.shadow.clone()] if messages is None else messages
        if self._history:
            received = self.weights if self._deltas is None else self._deltas.shadow
            self._history.record(worker, newest, received)
        if delta_number == newest:
            tensors, whole = [], False
        fields = {"version": self.version, "edition": newest, "whole": whole}
        return ActorMessage("weights", fields, tensors), whole and self._deltas is None

    def publish_exact(self) -> None:
        """Let workers receive the exact weights next, without a compressed delta."""
        self._take_due_step()
        if self._deltas is not None:
            self._deltas.publish_exact(self.weights)
            self._published = self.version

    def read_state(self, state_too: bool) -> ActorMessage:
        """The message with the exact weights, and with `state_too` also the optimizer's state."""
        self._take_due_step()
        places, state = self.optimizer.state() if state_too else ([], [])
        return ActorMessage("state", {"places": places}, [self.weights, *state])

    def lend(self, token: object) -> None:
        """Do not change the weights in place until `token` is released."""
        self._lent.add(token)

    def release(self, token: object) -> None:
        """End the loan `token`; see `lend`."""
        self._lent.discard(token)


class WeightHistory:
    """The weights on which each worker computes; equal weights are stored once."""

    def __init__(self, workers: int, weights: Tensor) -> None:
        self._held = [0] * workers
        self._weights = {0: weights.clone()}

    def record(self, worker: int, delta_number: int, weights: Tensor) -> None:
        """Record that `worker` has the weights of `delta_number`, which are `weights`, from now on."""
        self._held[worker] = delta_number
        if delta_number not in self._weights:
            self._weights[delta_number] = weights.clone()
        self._weights = {e: kept for e, kept in self._weights.items() if e in self._held}

    def of_worker(self, worker: int) -> Tensor:
        """The weights that `worker` has."""
        return self._weights[self._held[worker]]
