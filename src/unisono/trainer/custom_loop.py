"""A model and an optimizer of the user's, while their own training loop belongs to a world.

The optimizer's `step` is replaced by one that takes the mean step of all workers. The loss of a worker is noticed in
calls that the user's loop makes. Where the run can recover, they raise nothing: the view ends before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.comm.process_groups import ProcessGroups
from unisono.data import Loader, WorkItem
from unisono.elastic.control_word import NUMBERS
from unisono.elastic.loop_group import LoopGroup
from unisono.elastic.session import Session
from unisono.elastic.training_state import TrainingState
from unisono.elastic.view_loop import Attempt
from unisono.errors import InvalidInput, UnisonoError
from unisono.observe import ThreadTracker
from unisono.observe.activity import Phase
from unisono.sync import AllReduce
from unisono.trainer.duplicate_inputs import SameInputs
from unisono.trainer.loop_checkpoint import LoopCheckpoints
from unisono.trainer.loop_views import LoopViews
from unisono.trainer.model_hooks import before_forward
from unisono.trainer.replica import Replica, ReplicaOptions, Step


class ReplacedStep:
    """An optimizer's `step`, replaced by `step` until `restore`.

    Attributes:
        plain: the optimizer's own step.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[Callable[[], Any] | None], Any]) -> None:
        self.plain, self._optimizer, self._own = optimizer.step, optimizer, optimizer.__dict__.get("step")

        def replacement(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return step(closure)

        if hasattr(self.plain, "_wrapped_by_lr_sched"):  # else a scheduler made earlier warns that it was lost
            replacement._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        # A bound method of the optimizer itself, since learning-rate schedulers wrap its function and bind it again.
        optimizer.step = MethodType(replacement, optimizer)  # type: ignore[method-assign]

    def restore(self) -> None:
        """Give the optimizer its own step back."""
        if self._own is None:
            self._optimizer.__dict__.pop("step", None)
        else:
            self._optimizer.step = self._own  # type: ignore[method-assign]


class CustomLoop:
    """One worker's model and optimizer in a loop of the user's own.

    Args:
        group: the workers.
        state: with the user's model and optimizer.
        backward_passes: before each step, where the loop does not take its data from `World.steps`.
        options: the arguments of `World.bind` that `Replica` takes.

    Attributes:
        planned: whether `World.steps` assigns the data.
        views: the membership of this worker.
        checkpoints: of the loop.
    """

    def __init__(
        self, group: LoopGroup, watch: ThreadTracker, state: TrainingState, backward_passes: int,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.group, self._watch, self.state = group, watch, state
        self._model, self._optimizer = model, optimizer = state.model, state.optimizer
        self._passes, self._options = backward_passes, options
        self._replica: Replica | None = None
        self.views = LoopViews(group, watch, state)
        self.checkpoints = LoopCheckpoints(group, state, options)
        # Of the current step: whether its data was given out, some of it was taken, and its last pass was seen.
        self.planned = self._given = self._entered = self._last = self._leasing = False
        self._micro_batches, self._reference_weight = 0, 0.0
        self._forward_ended = True
        # With no other worker and nothing to round, autograd's own gradients are the mean.
        exact = all(options["compress"].is_lossless(p.dtype) for p in model.parameters() if p.requires_grad)
        self._single = group.size == 1 and exact
        self._replaced = ReplacedStep(optimizer, self.step)
        # Data that the loop reads itself may be the same on all workers by mistake.
        self._inputs = SameInputs(model, group.rank, group.size) if group.size > 1 else None
        self._first_forward = before_forward(model.modules(), self._before_forward)

    @property
    def begun(self) -> bool:
        """Whether training has begun."""
        return self.planned or self._replica is not None or self.state.progress.steps > 0

    def save(self, directory: Path, keep: int) -> Path | None:
        """See `World.save`."""
        if self._given or self._leasing or (not self.planned and self._replica is not None and self._came):
            raise UnisonoError("world.save came in the middle of a step: call it between two steps, on all workers; "
                               "after the loop where each takes steps at its own pace")  # fmt: skip
        if not self.state.progress.steps:
            raise UnisonoError("world.save has nothing to save: no step has been taken yet")
        self.synchronize()
        return self.checkpoints.save(directory, keep, self._replica)

    def begin(self, micro_batches: int, reference_weight: float) -> Session:
        """`World.steps` assigns the data from now on. Returns the session whose views the loop goes through."""
        if self._replica is not None:
            raise UnisonoError(
                "world.steps came too late: call it once, right after bind, with steps= or epochs= for all the training"
            )
        self.planned = True
        self._micro_batches, self._reference_weight = micro_batches, reference_weight
        self._close_first_forward()
        self._close_inputs()
        return self.group.begin(recovers=self.state.local_steps or isinstance(self._options["sync"], AllReduce))

    def join_view(self, session: Session, attempt: Attempt) -> None:
        """Collective: connect to the members of the view, and receive the state from which the view starts."""
        self.views.join(session, attempt)
        self._start(self._micro_batches, self._reference_weight)
        self._next_step()

    def release_view(self) -> None:
        """Detach model and optimizer, in the state after the last step that was taken."""
        if self._replica is not None:
            self.state.progress = replace(self.state.progress, shared=self._replica.sync.state_dict())
            self._replica.discard_step()
            self._replica.unbind()
            self._replica = None
        self.group.disconnect()

    # ---- steps ----

    def work_items(self, loader: Loader, mine: range, first: int, count: int) -> Iterator[WorkItem]:
        """The work items of this worker: those that it leases, else `mine` of each step from `first` to before `count`.

        Raises:
            PeerLost: a worker was lost.
        """
        replica = self._replica
        assert replica is not None
        while first < count and not self.views.ended:
            leased = replica.sync.work_items(first, count, lambda: False)
            if leased is None:
                yield from ((t, mine, loader.batches(t)) for t in range(first, count))
                return
            self._leasing = True
            yield from loader.work_items(leased)
            self._leasing, first = False, replica.sync.leased_until
            self.state.set_steps(first)
            if self.group.recovers and not self.views.lost:
                self.views.gather_control(replica)

    def synchronize(self) -> None:
        """See `World.synchronize`."""
        if self._replica is None:
            return
        self._replica.synchronize()
        if self.group.recovers and self.state.local_steps:
            self.views.commit(self._replica)

    def begin_step(self) -> None:
        """The data of a step is given out."""
        self._given = True
        if self.group.recovers:
            self.state.begin_step()
            self._watch.set_phase(Phase.COMPUTE, self.group.comm)

    def check_ended(self) -> None:
        """Raise `UnisonoError` if the step whose data was given out was neither taken nor left out."""
        if self._given:
            raise UnisonoError(
                "the next step's batches were asked for before optimizer.step(): one step is one global batch; "
                "batches.skip() leaves it out"
            )

    def begin_micro_batch(self, m: int, weight: float, last: bool) -> None:
        """Before micro-batch `m`; `last` of this worker in this step."""
        assert self._replica is not None
        if not self._forward_ended:  # the one before had no backward pass
            self._end_forward(self._last)
        self._replica.begin_micro_batch(m, weight)
        self._last, self._forward_ended, self._entered = last, False, True

    def step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Replaces the optimizer's own: wait for the mean gradient, then step. False if the step was not taken."""
        if closure is not None:
            raise InvalidInput("closure", closure, "the step of many workers cannot run it again", "call step()")
        if self._replica is None and self._single:
            if self._options["clip"] is not None:
                nn.utils.clip_grad_norm_(self._model.parameters(), self._options["clip"])
            self._replaced.plain()
            self._count()
            return True
        if self._replica is None:  # no forward pass here, but perhaps on other workers
            self._start_unplanned()
        if self.planned and not self._given:
            raise UnisonoError("optimizer.step() was called twice for one step, or outside of the loop of world.steps")
        return self._end_step(lambda step: step.apply(self._replaced.plain))

    def skip(self) -> None:
        """See `Batches.skip`."""
        assert self._replica is not None
        if not self._given:
            raise UnisonoError("batches.skip() came after optimizer.step(): call one of them in each step")
        if self._entered and not self._replica.synchronous:
            raise UnisonoError("batches.skip() came after data of the step was taken, and replicas take local steps: "
                               "call it before")  # fmt: skip
        if self._entered:
            self._end_step(Step.drop)
            return
        self._count()
        if self.group.recovers and not self.state.local_steps:
            self.views.commit(self._replica)
        self._next_step()

    def _end_step(self, end: Callable[[Step], Any]) -> bool:
        """End the step of all workers by `end`; False if a worker was lost."""
        self.views.unless_lost(lambda: self._settle_and(end))
        if self.group.recovers:  # what a loop does between steps is no part of one, and may take longer
            self._watch.set_phase(Phase.EVALUATION, self.group.comm)
        self._next_step()
        return not self.views.lost

    def _settle_and(self, end: Callable[[Step], Any]) -> None:
        assert self._replica is not None
        if not self._forward_ended:
            self._end_forward(last=self._last or not self.planned)
        if not self._last and self.planned:
            raise UnisonoError("optimizer.step(), or batches.skip(), came before all micro-batches of this worker and "
                               "step were computed")  # fmt: skip
        with self._watch(Phase.COMMUNICATION):
            step = self._replica.settle()
        if self.group.session is not None:
            self.group.session.check()
        end(step)
        if self._inputs is not None and step.extra is not None:
            self._inputs.compare(step.extra)
        self._count()
        if self.group.recovers and step.extra is not None:
            self.views.act_on_control(step.extra, self._replica)

    def _count(self) -> None:
        self.state.set_steps(self.state.progress.steps + 1)
        if self.group.recovers and self.group.session is not None:
            self.group.session.stepped()
        else:
            self._watch.commit(self._watch.steps + 1)

    def release(self) -> None:
        """Give the optimizer its own step back."""
        self._close_first_forward()
        self._close_inputs()
        self._replaced.restore()
        if self._replica is not None:
            self._replica.unbind()

    # ---- loops without a plan ----

    def _before_forward(self) -> None:
        """Before the first forward pass."""
        if not self.planned and not (self._model.training and torch.is_grad_enabled()):
            return
        if not self.planned and not self._single:
            _check_own(self._model, self._optimizer)
            self._start_unplanned()
        self._close_first_forward()

    def _close_inputs(self) -> None:
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None

    def _close_first_forward(self) -> None:
        for hook in self._first_forward:
            hook.remove()

    def _start_unplanned(self) -> None:
        self._close_first_forward()
        self.group.freeze()
        self._start(self.group.size, float(self.group.size))
        self._next_step()

    # ---- the replica ----

    def _start(self, micro_batches: int, reference_weight: float) -> None:
        """Collective: bind a replica, which continues with what an earlier one shared, and with its residuals."""
        control = NUMBERS * self.group.size if self.group.recovers else 0
        options = ReplicaOptions(
            micro_batches,
            reference_weight,
            self._options["clip"],
            self._options["overlap"],
            control_width=control + (self._inputs.words if self._inputs else 0),
            may_repeat=self.planned,  # a worker may be lost, or the step skipped
            group_may_grow=self.group.recovers and self.state.local_steps,
        )
        groups = ProcessGroups.replicated(self.group.comm)
        self._replica = Replica(
            self.state.local, self._optimizer, groups, self._options["sync"], self._options["compress"], options,
            self._gradient)  # fmt: skip
        if self.state.progress.shared:
            self._replica.sync.load_state_dict(self.state.progress.shared)
        if residuals := self.checkpoints.take_residuals():
            self._replica.sync.load_residuals(residuals)

    def _next_step(self) -> None:
        """Without a plan, what this worker computes between two steps is one micro-batch."""
        self._given, self._entered, self._forward_ended = False, False, True
        if self.planned:
            self._last = False
        else:
            self.begin_micro_batch(self.group.rank, 1.0, last=self._passes == 1)
            self._pass, self._came = 0, set[str]()

    def _gradient(self, name: str) -> None:
        """A gradient is complete. The first one of a backward pass ends the forward pass before it."""
        if not self.planned:
            if name in self._came:
                self._pass, self._came = self._pass + 1, set()
                self._last = self._pass >= self._passes - 1
            self._came.add(name)
        if not self._forward_ended and (self._last or self.planned):
            self._end_forward(self._last)

    def _control_numbers(self) -> list[float]:
        return self.views.control_word() + (self._inputs.control_word() if self._inputs else [])

    def _end_forward(self, last: bool) -> None:
        assert self._replica is not None
        self._replica.end_forward(last=last, extra=self._control_numbers() if last else None)
        self._forward_ended, self._last = True, last


def _check_own(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `UnisonoError` if other tensors replace the parameters of `model` in the forward pass that begins."""
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise UnisonoError(
            "the first forward pass has other tensors in place of the model's parameters, as "
            "torch.func.functional_call does, so that gradients cannot be followed: take the data from "
            "world.steps, or call the model itself first"
        )
