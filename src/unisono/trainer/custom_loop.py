"""A model and an optimizer of the user's, while their own training loop belongs to a world.

The optimizer's `step` is replaced by one that takes the mean step of all workers. The loss of a worker is noticed in
calls that the user's loop makes. Where the run can recover, they raise nothing: the view ends before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.comm.process_groups import ProcessGroups
from unisono.config import Config
from unisono.data import Loader, MicroBatchPlan, WorkItem
from unisono.elastic.control_word import NUMBERS, ControlWord, decode, encode
from unisono.elastic.loop_group import LoopGroup
from unisono.elastic.recovery import receive
from unisono.elastic.session import Session
from unisono.elastic.training_state import TrainingState
from unisono.elastic.view_loop import Attempt
from unisono.errors import InvalidInput, Left, PeerLost, UnisonoError
from unisono.observe import ThreadTracker
from unisono.observe.activity import Phase
from unisono.sync import AllReduce
from unisono.trainer.duplicate_inputs import SameInputs
from unisono.trainer.loop_checkpoint import Plan, Recalled, load, save
from unisono.trainer.model_hooks import before_forward
from unisono.trainer.replica import Replica, ReplicaOptions, Step

T = TypeVar("T")


class CustomLoop:
    """One worker's model and optimizer in a loop of the user's own.

    Args:
        group: the workers.
        state: with the user's model and optimizer.
        backward_passes: before each step, where the loop does not take its data from `World.steps`.
        options: the arguments of `World.bind` that `Replica` takes.

    Attributes:
        planned: whether `World.steps` assigns the data.
    """

    def __init__(
        self, group: LoopGroup, watch: ThreadTracker, state: TrainingState, backward_passes: int,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        self._group, self._watch, self.state = group, watch, state
        self._model, self._optimizer = model, optimizer = state.model, state.optimizer
        self._passes, self._options = backward_passes, options
        self._replica: Replica | None = None
        self._plan: MicroBatchPlan | None = None
        self._recalled = Recalled()
        self._attempt: Attempt | None = None
        self._all_leave = self._view_ending = False
        # Of the current step: whether its data was given out, some of it was taken, and its last pass was seen.
        self.planned = self._given = self._entered = self._last = self._leasing = False
        self._micro_batches, self._reference_weight = 0, 0.0
        self._committed = 0
        self._forward_ended = True
        # With no other worker and nothing to round, autograd's own gradients are the mean.
        exact = all(options["compress"].is_lossless(p.dtype) for p in model.parameters() if p.requires_grad)
        self._single = group.size == 1 and exact
        self._plain_step, self._own_step = optimizer.step, optimizer.__dict__.get("step")

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        if hasattr(self._plain_step, "_wrapped_by_lr_sched"):  # else a scheduler made earlier warns that it was lost
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        # A bound method of the optimizer itself, since learning-rate schedulers wrap its function and bind it again.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        # Data that the loop reads itself may be the same on all workers by mistake.
        self._inputs = SameInputs(model, group.rank, group.size) if group.size > 1 else None
        self._first_forward = before_forward(model.modules(), self._before_forward)

    # ---- before the first step ----

    @property
    def begun(self) -> bool:
        """Whether training has begun."""
        return self.planned or self._replica is not None or self.state.progress.steps > 0

    def check_plan(self, plan: MicroBatchPlan) -> None:
        """Raise `InvalidInput` if what was loaded was saved in steps of another `plan`."""
        self._plan = plan
        self._recalled.check(self._described())

    def load(self, directory: Path) -> int:
        """See `World.load`."""
        if not self._group.late:
            self._recalled = load(self._group.metrics, directory, self.state, self._described())
        return self.state.progress.steps

    def save(self, directory: Path, keep: int) -> Path | None:
        """See `World.save`."""
        if self._given or self._leasing or (not self.planned and self._replica is not None and self._came):
            raise UnisonoError("world.save came in the middle of a step: call it between two steps, on all workers; "
                               "after the loop where each takes steps at its own pace")  # fmt: skip
        if not self.state.progress.steps:
            raise UnisonoError("world.save has nothing to save: no step has been taken yet")
        self.synchronize()
        return save(self._group.metrics, directory, keep, self.state, self._described(), self._replica)

    def _described(self) -> Plan:
        plan = self._plan
        given = {"workers": self._group.size, "threads": torch.get_num_threads(), **self._options}
        if plan is not None:
            given |= {"global_batch": plan.global_batch, "micro_batch": plan.micro_batch, "seed": plan.seed}
        return Plan(Config(**given), plan.samples if plan is not None else None)

    # ---- views ----

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
        return self._group.begin(recovers=self.state.local_steps or isinstance(self._options["sync"], AllReduce))

    def join_view(self, session: Session, attempt: Attempt) -> None:
        """Collective: connect to the members of the view, and have the state that it starts from."""
        self._attempt = attempt
        comm = self._group.connect(session.view)
        if session.elastic:
            self.state.allow_roll_back()
            if not receive(session.view, comm, self.state):
                self.state.broadcast_initial(comm)
        self.state.commit()
        attempt.joined()
        self._view_ending, self._committed = False, self.state.progress.steps
        self._start(self._micro_batches, self._reference_weight)
        self._next_step()

    def end_view(self, attempt: Attempt) -> None:
        """After the last step that the members of the view take: finish, if it is the last one of all.

        Raises:
            Left: all workers were asked to leave.
        """
        if self._all_leave:
            raise Left
        if not self.view_ended:
            self.synchronize()
            self._group.finish()
            attempt.finish()

    def end(self, session: Session) -> None:
        """There is no further view.

        Raises:
            Left: the others continue without this worker.
        """
        attempt = self._attempt
        if attempt is not None and attempt.finished:
            return
        if attempt is None or session.leave_requested or not self.state.joined:
            raise Left
        attempt.fail(PeerLost((), "view", "the others have come to the end of their loops"))
        self._group.finished_by_others()

    def release_view(self) -> None:
        """Detach model and optimizer, in the state after the last step that was taken."""
        if self._replica is not None:
            self.state.progress = replace(self.state.progress, shared=self._replica.sync.state_dict())
            self._replica.discard_step()
            self._replica.unbind()
            self._replica = None
        self._group.disconnect()

    @property
    def lost(self) -> bool:
        """Whether a worker was lost, and the view is over."""
        return self._attempt is not None and self._attempt.lost

    @property
    def view_ended(self) -> bool:
        """Whether the view ends before the next step."""
        return self._view_ending or self.lost

    def unless_lost(self, call: Callable[[], T]) -> T | None:
        """See `Attempt.unless_lost`. Before the loop begins, the loss of a worker is an error."""
        return self._attempt.unless_lost(call) if self._attempt is not None else call()

    # ---- steps ----

    def work_items(self, loader: Loader, mine: range, first: int, count: int) -> Iterator[WorkItem]:
        """The work items of this worker: those that it leases, else `mine` of each step from `first` to before `count`.

        Raises:
            PeerLost: a worker was lost.
        """
        replica = self._replica
        assert replica is not None
        while first < count and not self.view_ended:
            leased = replica.sync.work_items(first, count, lambda: False)
            if leased is None:
                yield from ((t, mine, loader.batches(t)) for t in range(first, count))
                return
            self._leasing = True
            yield from loader.work_items(leased)
            self._leasing, first = False, replica.sync.leased_until
            self.state.set_steps(first)
            if self._group.recovers and not self.lost:
                self._gather_control()

    def _gather_control(self) -> None:
        """Collective: exchange control words, once this worker has computed all that it has leased."""
        words = self._group.comm.gather(torch.tensor(self._control_word(), dtype=torch.float64)).wait()
        self._act_on_control(words.sum(0).tolist())

    def _act_on_control(self, numbers: Sequence[float]) -> None:
        """Collective, between two steps: end the view if the control words of all workers say so, and commit."""
        words = decode(numbers)
        self._all_leave = all(word.leave for word in words)
        self._view_ending = self._all_leave or any(word.end_view for word in words)
        if self.view_ended:  # a worker that leaves contributes its local steps
            assert self._replica is not None
            self._replica.synchronize()
        self._commit()

    def _commit(self) -> None:
        """All workers have synchronized: commit the steps that they have taken."""
        session = self._group.session
        assert self._replica is not None
        assert session is not None
        self._replica.sync.quiesce()
        self.state.commit(self._replica.sync.state_dict() if self.state.local_steps else None)
        if new := self.state.progress.steps - self._committed:
            self._committed += new
            session.committed(new)
            self._watch.commit(self._watch.steps + new)

    def synchronize(self) -> None:
        """See `World.synchronize`."""
        if self._replica is None:
            return
        self._replica.synchronize()
        if self._group.recovers and self.state.local_steps:
            self._commit()

    def begin_step(self) -> None:
        """The data of a step is given out."""
        self._given = True
        if self._group.recovers:
            self.state.begin_step()
            self._watch.set_phase(Phase.COMPUTE, self._group.comm)

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
            self._plain_step()
            self._count()
            return True
        if self._replica is None:  # no forward pass here, but perhaps on other workers
            self._start_unplanned()
        if self.planned and not self._given:
            raise UnisonoError("optimizer.step() was called twice for one step, or outside of the loop of world.steps")
        return self._end_step(lambda step: step.apply(self._plain_step))

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
        if self._group.recovers and not self.state.local_steps:
            self._commit()
        self._next_step()

    def _end_step(self, end: Callable[[Step], Any]) -> bool:
        """End the step of all workers by `end`; False if a worker was lost."""
        self.unless_lost(lambda: self._take(self._settled(), end))
        if self._group.recovers:  # what a loop does between steps is no part of one, and may take longer
            self._watch.set_phase(Phase.EVALUATION, self._group.comm)
        self._next_step()
        return not self.lost

    def _settled(self) -> Step:
        assert self._replica is not None
        if not self._forward_ended:
            self._end_forward(last=self._last or not self.planned)
        if not self._last and self.planned:
            raise UnisonoError("optimizer.step(), or batches.skip(), came before all micro-batches of this worker and "
                               "step were computed")  # fmt: skip
        with self._watch(Phase.COMMUNICATION):
            step = self._replica.settle()
        if self._group.session is not None:
            self._group.session.check()
        return step

    def _take(self, step: Step, end: Callable[[Step], Any]) -> None:
        end(step)
        if self._inputs is not None and step.extra is not None:
            self._inputs.hear(step.extra)
        self._count()
        if self._group.recovers and step.extra is not None:
            self._act_on_control(step.extra)

    def _count(self) -> None:
        self.state.set_steps(self.state.progress.steps + 1)
        if self._group.recovers and self._group.session is not None:
            self._group.session.stepped()
        else:
            self._watch.commit(self._watch.steps + 1)

    def release(self) -> None:
        """Give the optimizer its own step back."""
        self._close_first_forward()
        self._close_inputs()
        if self._own_step is None:
            self._optimizer.__dict__.pop("step", None)
        else:
            self._optimizer.step = self._own_step  # type: ignore[method-assign]
        if self._replica is not None:
            self._replica.unbind()

    # ---- loops without a plan ----

    def _before_forward(self) -> None:
        """Before the first forward pass."""
        if not self.planned and not (self._model.training and torch.is_grad_enabled()):
            return
        if not self.planned and not self._single:
            self._check_own()
            self._start_unplanned()
        self._close_first_forward()

    def _check_own(self) -> None:
        """Raise `UnisonoError` if other tensors replace the parameters in the forward pass that begins."""
        own = {id(p) for p in self._model.parameters()}
        if not any(id(p) in own for group in self._optimizer.param_groups for p in group["params"]):
            raise UnisonoError(
                "the first forward pass has other tensors in place of the model's parameters, as "
                "torch.func.functional_call does, so that gradients cannot be followed: take the data from "
                "world.steps, or call the model itself first"
            )

    def _close_inputs(self) -> None:
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None

    def _close_first_forward(self) -> None:
        for hook in self._first_forward:
            hook.remove()

    def _start_unplanned(self) -> None:
        self._close_first_forward()
        self._group.freeze()
        self._start(self._group.size, float(self._group.size))
        self._next_step()

    # ---- the replica ----

    def _start(self, micro_batches: int, reference_weight: float) -> None:
        """Collective: bind a replica, which continues with what an earlier one shared, and with its residuals."""
        control = NUMBERS * self._group.size if self._group.recovers else 0
        options = ReplicaOptions(
            micro_batches,
            reference_weight,
            self._options["clip"],
            self._options["overlap"],
            control_width=control + (self._inputs.words if self._inputs else 0),
            may_repeat=self.planned,  # a worker may be lost, or the step skipped
            group_may_grow=self._group.recovers and self.state.local_steps,
        )
        groups = ProcessGroups.replicated(self._group.comm)
        self._replica = Replica(
            self.state.local, self._optimizer, groups, self._options["sync"], self._options["compress"], options,
            self._gradient)  # fmt: skip
        if self.state.progress.shared:
            self._replica.sync.load_state_dict(self.state.progress.shared)
        if self._recalled.owed and self._recalled.meta["config"]["workers"] == self._group.size:
            self._replica.sync.load_residuals(self._recalled.owed)
        self._recalled = Recalled()

    def _next_step(self) -> None:
        """Without a plan, what this worker computes between two steps is one micro-batch."""
        self._given, self._entered, self._forward_ended = False, False, True
        if self.planned:
            self._last = False
        else:
            self.begin_micro_batch(self._group.rank, 1.0, last=self._passes == 1)
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

    def _control_word(self) -> list[float]:
        """This worker's part of the control word."""
        session, word = self._group.session, list[float]()
        if session is not None and session.elastic:
            asked = ControlWord(end_view=session.view_end_requested, leave=session.leave_requested)
            word = encode(asked, self._group.rank, self._group.size)
        return word + (self._inputs.says() if self._inputs else [])

    def _end_forward(self, last: bool) -> None:
        assert self._replica is not None
        self._replica.end_forward(last=last, extra=self._control_word() if last else None)
        self._forward_ended, self._last = True, last
