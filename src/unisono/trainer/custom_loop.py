"""The models and optimizers of a user's own training loop, which take part in the steps of a world.

Gradients are exchanged in the backward passes that the user's loop runs, and `optimizer.step` takes what is then in
``grad``. Without a plan, every backward pass ends with an exchange. With the plan of `World.steps`, that of this
worker's last micro-batch does.

The loss of a worker is noticed in calls that the loop makes. Where the run can recover, they raise nothing: the step is
void, all gradients are zero, and the view ends before the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.comm import Communicator
from unisono.config import takes_local_steps
from unisono.data import Loader, WorkItem
from unisono.elastic.agreement import start_alike
from unisono.elastic.control_word import NUMBERS
from unisono.elastic.extra_state import ExtraState
from unisono.elastic.loop_group import LoopGroup
from unisono.elastic.model_state import weights_of
from unisono.elastic.recovery_loop import Attempt
from unisono.elastic.session import Session
from unisono.elastic.training_state import TrainingState
from unisono.errors import InvalidInput, UnisonoError
from unisono.layout import LocalModel
from unisono.notation import show
from unisono.observe import ThreadTracker
from unisono.observe.activity import Phase
from unisono.sync import AllReduce
from unisono.trainer.any_step import any_step
from unisono.trainer.bound_optimizer import BoundOptimizer, Closure
from unisono.trainer.compatibility import check_loop, foreign_parameter
from unisono.trainer.drift_check import DriftCheck
from unisono.trainer.duplicate_inputs import SameInputs
from unisono.trainer.loop_checkpoint import LoopCheckpoints
from unisono.trainer.loop_model import LoopModel, LoopOptions, LoopShape
from unisono.trainer.loop_models import LoopModels
from unisono.trainer.loop_views import LoopViews
from unisono.trainer.model_hooks import before_forward
from unisono.trainer.optimizer_set import OptimizerSet
from unisono.trainer.replica import copy_from

T = TypeVar("T")


class CustomLoop:
    """One worker's models and optimizers in a loop of the user's own.

    Args:
        group: the workers.

    Attributes:
        planned: whether `World.steps` assigns the data.
        state: of all models and optimizers that are bound, as of one model and one optimizer.
        models, optimizers: that are bound.
        views: the membership of this worker.
        checkpoints: of the loop.
    """

    def __init__(self, group: LoopGroup, watch: ThreadTracker, options: LoopOptions) -> None:
        self.group, self._watch, self._options = group, watch, options
        self._passes = options.backward_passes
        optimizer: Any = OptimizerSet([])
        self.state = TrainingState(local_steps=takes_local_steps(options.sync), extra=ExtraState(optimizer))
        self.models, self.optimizers = LoopModels(), list[BoundOptimizer]()
        self.views = LoopViews(group, watch, self.state)
        self.checkpoints = LoopCheckpoints(group, self.state, options)
        self.planned = self._leasing = self._locally = self._started = False
        self._shape: LoopShape | None = None
        self._first_forward: list[RemovableHandle] = []
        self._thaw_hooks: list[RemovableHandle] = []
        self._frozen: list[nn.Parameter] = []
        self._flags: Communicator | None = None  # where workers may run out of data at different times
        any_step().add(self._before_any_step)
        self._drift = DriftCheck(0, 1)
        self._names: dict[int, str] = {}  # of all trained parameters, by their identities
        self._had_data = 0  # a rank that was among the last to have data
        self._known = WeakTensorKeyDictionary()  # of tensors that all workers have alike; only its keys count
        self._inputs: SameInputs | None = None  # the data that a loop reads may be the same on all workers by mistake
        self._changes_early = True  # whether a step may change weights before its last exchange; yes, until one ends
        self._begin_item()
        self._task: int | None = None  # the backward pass that runs, by autograd's number, and whether it exchanges
        self._exchanging = False
        self._pass = 0  # of the backward passes before a step, without a plan

    # ---- what is bound ----

    def add(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], options: LoopOptions) -> None:
        """See `World.bind`."""
        if self.planned:
            raise UnisonoError("world.bind came after world.steps: bind all models and optimizers before it")
        self._started = False
        if options != self._options:
            raise InvalidInput("bind", options, f"an earlier call was given {self._options}", "give all calls the same")
        known = [model.local.model for model in self.models]
        new = [module for module in modules if not any(module is each for each in known)]
        check_loop(known + new, new, [each.optimizer for each in self.optimizers], optimizers, options.sync)
        self._release_replaced()
        self._agree([*known, *new], optimizers)
        for module in new:
            own = optimizers[0] if len(optimizers) == 1 else self.state.optimizer
            local = LocalModel.whole(module)
            self.models.add([LoopModel(local, {}, own, options, self.exchanges, self.on_gradient)])
        self.optimizers += [
            BoundOptimizer(optimizer, self.step, self.check_zero_grad, self.check_new_group, self.find_parameters)
            for optimizer in optimizers
        ]
        self.find_parameters()
        if new and not known and self.group.size > 1:
            self._inputs = SameInputs(new[0], self.group.rank, self.group.size)
        if self._shape is not None:
            fresh = [model for model in self.models if not model.bound]
            self.models.bind(self.group.comm, self._shape)
            self._begin_cycle(fresh)
        else:
            every = (each for module in new for each in module.modules())
            self._first_forward += before_forward(every, self._before_forward)
            for model in self.models if not self._alone else ():
                model.attach()

    def remove(self, module: nn.Module) -> None:
        """See `World.release`."""
        if self.planned:
            raise UnisonoError("world.release came after world.steps: its models are trained until its end")
        removed = [each for each in self.models if each.local.model is module]
        for model in removed:
            self.models.remove(model)
        self._release_replaced()
        self._build_state([each.local.model for each in self.models], [each.optimizer for each in self.optimizers])
        every = {id(p) for model in self.models for p in model.local.model.parameters()}
        if any(id(p) in every for model in removed for p in model.parameters.values()):
            self.find_parameters()  # another model trains them from now on
        else:  # nothing collective: a wrapper that is garbage-collected releases its model
            self._frozen = [p for p in self._frozen if id(p) in every]
            self._name_parameters()

    def _release_replaced(self) -> None:
        """An optimizer with a parameter that is in none of the models any more is not bound any more."""
        every = {id(p) for model in self.models for p in model.local.model.parameters()}
        for optimizer in [each for each in self.optimizers if any(id(p) not in every for p in each.parameters)]:
            optimizer.restore()
            self.optimizers.remove(optimizer)

    def _agree(self, modules: Sequence[nn.Module], new_optimizers: Sequence[Optimizer]) -> None:
        """Collective: the modules and optimizers that are new start from what worker 0 has."""
        whole = self._build_state(modules, [*(each.optimizer for each in self.optimizers), *new_optimizers])
        if not self.group.late:
            start_alike(self.group.comm, whole, OptimizerSet.of(new_optimizers), self._known)
        self._known.update(dict.fromkeys(weights_of(whole).values()))

    def _build_state(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> nn.Module:
        """The state of the loop is that of these. Returns the modules as one."""
        whole = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        every = OptimizerSet.of(optimizers)
        self.state.build(LocalModel.whole(whole), every)
        assert self.state.extra is not None
        self.state.extra.replace_optimizer(every)
        return whole

    def find_parameters(self, *, anew: bool = False) -> None:
        """Collective if there are any: train parameters that were added to a model, or unfrozen.

        Args:
            anew: parameters that were frozen again are not trained any more, where the synchronizer allows it.

        Raises:
            InvalidInput: an optimizer has parameters of none of the models, or the synchronizer cannot take new ones.
        """
        owned = set[int]()
        for model in self.models:
            trained = {
                name: p for name, p in model.local.model.named_parameters() if p.requires_grad and id(p) not in owned
            }
            owned |= {id(p) for p in trained.values()}
            fewer = anew and isinstance(self._options.sync, AllReduce) and len(trained) < len(model.parameters)
            if fewer or any(model.parameters.get(name) is not p for name, p in trained.items()):
                self._share_new(weights_of(model.local.model))
                if model.parameters and not isinstance(self._options.sync, AllReduce):
                    raise InvalidInput(
                        "sync", show(self._options.sync), "it keeps state of the parameters that were bound, and "
                        "trains no others", "use AllReduce(), or unfreeze and add them before world.bind")  # fmt: skip
                model.train(trained)
        self._name_parameters()
        self._watch_frozen()

    def _name_parameters(self) -> None:
        """Know the names of the parameters that are trained, and which models each optimizer has parameters of."""
        self._names = {id(p): name for model in self.models for name, p in model.parameters.items()}
        for optimizer in self.optimizers:
            optimizer.find(self.models)
            every = {id(p) for model in self.models for p in model.local.model.parameters()}
            for parameter in optimizer.untrained:
                if id(parameter) not in every:
                    raise foreign_parameter(parameter)

    def _share_new(self, tensors: Mapping[str, Tensor]) -> None:
        """Collective: those of `tensors` that are not known yet become those of worker 0."""
        if self.models.bound:
            with torch.no_grad():
                for _, tensor in sorted(tensors.items()):
                    if tensor not in self._known:
                        tensor.copy_(self.group.comm.broadcast(tensor.detach().clone()).wait())
        self._known.update(dict.fromkeys(tensors.values()))

    def _watch_frozen(self) -> None:
        """Look for parameters that are unfrozen later, before each forward pass of a model or module that has frozen
        ones: of the model, since those of its modules that are called before may write buffers."""
        for hook in self._thaw_hooks:
            hook.remove()
        self._frozen = [p for model in self.models for p in model.local.model.parameters() if not p.requires_grad]
        owners = [
            module
            for model in self.models
            for module in model.local.model.modules()
            if any(not p.requires_grad for p in module.parameters(recurse=module is model.local.model))
        ]
        self._thaw_hooks = before_forward(owners, self._find_unfrozen)

    def _find_unfrozen(self) -> None:
        """Collective if there are any: train the parameters that were unfrozen since they were last looked for."""
        if any(p.requires_grad for p in self._frozen) and not torch.compiler.is_compiling():
            self._in_step(self.find_parameters)

    @property
    def begun(self) -> bool:
        """Whether training has begun."""
        return self.planned or self.models.bound or self.state.progress.steps > 0

    @property
    def leases_steps(self) -> bool:
        """Whether each worker takes as many steps as it can now."""
        return self._leasing

    @property
    def _alone(self) -> bool:
        """Whether autograd's own gradients are the mean: there is no other worker, and nothing to round."""
        return not self.planned and self.group.size == 1 and all(model.lossless for model in self.models)

    def _before_any_step(self, optimizer: Optimizer) -> None:
        """Before the step of any optimizer of this process: refuse one that would train a model by gradients or steps
        of this worker alone."""
        if self._shape is None:  # a worker alone, or training has not begun
            return
        trained = self._names
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        mine = [p for p in parameters if id(p) in trained]
        if mine:
            self._drift.before_step(optimizer, trained)
        if any(optimizer is each.optimizer for each in self.optimizers):
            return
        wrong = any(p.grad is not None for p in mine) and not isinstance(self._options.sync, AllReduce)
        if len(mine) < len(parameters):
            within = {id(p) for model in self.models for p in model.local.model.parameters()}
            others = (p for p in parameters if id(p) not in trained and p.grad is not None)
            wrong = wrong or any(id(p) in within for p in others)
        if wrong:
            raise UnisonoError(
                f"an optimizer ({type(optimizer).__name__}) steps parameters of a bound model that are not bound: call "
                "model, optimizer = world.bind(model, optimizer) when you make it"
            )

    def release(self) -> None:
        """Give models and optimizers back as they were."""
        any_step().remove(self._before_any_step)
        for hook in self._thaw_hooks:
            hook.remove()
        self._end_first_forward()
        self._close_inputs()
        for optimizer in self.optimizers:
            optimizer.restore()
        for model in self.models:
            model.release()

    # ---- views ----

    def begin(self, micro_batches: int, reference_weight: float) -> Session:
        """`World.steps` assigns the data from now on. Returns the session whose views the loop goes through."""
        if self.models.bound:
            raise UnisonoError(
                "world.steps came too late: call it once, right after bind, with steps= or epochs= for all the training"
            )
        self.planned = True
        self._plan = micro_batches, reference_weight
        self._end_first_forward()
        self._close_inputs()
        sync = self._options.sync
        return self.group.begin(recovers=self.state.local_steps or isinstance(sync, AllReduce))

    def join_view(self, session: Session, attempt: Attempt) -> None:
        """Collective: connect to the members of the view, and receive the state from which the view starts."""
        if session.elastic:
            self._take_snapshots()
        self.views.join(session, attempt)
        self.find_parameters(anew=True)  # all members train the same, whatever they did in a step that was void
        self._bind(*self._plan)
        self._begin_item()

    def release_view(self) -> None:
        """Detach models and optimizers, in the state after the last step that was taken."""
        if self.models.bound:
            self.state.progress = replace(self.state.progress, shared=self.models.state_dict())
            for model in self.models:
                model.drop()
                model.unbind()
        self.group.disconnect()

    def _bind(self, micro_batches: int, reference_weight: float) -> None:
        """Collective: bind all models. They continue with what an earlier view shared, and with their residuals."""
        self._drift = DriftCheck(self.group.rank, self.group.size if isinstance(self._options.sync, AllReduce) else 1)
        control = NUMBERS * self.group.size if self.group.recovers else 0
        width = control + self._drift.words + (self._inputs.words if self._inputs else 0)
        grows = self.group.recovers and self.state.local_steps
        self._shape = LoopShape(micro_batches, reference_weight, width, self.planned, grows)
        self.models.bind(self.group.comm, self._shape)
        if self.state.progress.shared:
            self.models.load_state_dict(self.state.progress.shared)
        if residuals := self.checkpoints.take_residuals():
            self.models.load_residuals(residuals)

    # ---- a loop without a plan ----

    def _before_forward(self) -> None:
        """Before the first forward pass."""
        if not (self.planned or torch.compiler.is_compiling()) and torch.is_grad_enabled():
            self._start()  # in a compiled pass: when the first gradient arrives

    def _start(self) -> None:
        """Collective: training begins, or goes on with models that were added."""
        if self._started:
            return
        self._started = True
        self._end_first_forward()
        if self._shape is None and not self._alone:
            self.group.freeze()
            self._bind(self.group.size, float(self.group.size))
            self._begin_cycle(self.models)

    def _begin_cycle(self, models: Sequence[LoopModel] | LoopModels) -> None:
        """Without a plan, what this worker computes between two exchanges is one micro-batch."""
        for model in models:
            model.begin_micro_batch(self.group.rank, 1.0)

    def _end_first_forward(self) -> None:
        for hook in self._first_forward:
            hook.remove()
        self._first_forward = []

    def _close_inputs(self) -> None:
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `World.no_sync`."""
        if self.planned:
            raise UnisonoError("world.no_sync() in a loop over world.steps: there gradients of micro-batches add up by "
                               "themselves, and are exchanged once; leave it out")  # fmt: skip
        before, self._locally = self._locally, True
        try:
            yield
        finally:
            self._locally = before

    @contextmanager
    def uneven_inputs(self) -> Iterator[None]:
        """See `World.uneven_inputs`."""
        if self.planned:
            raise UnisonoError("world.uneven_inputs() in a loop over world.steps, where workers have equal steps: "
                               "leave it out")  # fmt: skip
        if self.group.size == 1:
            yield
            return
        self._start()
        self._flags = self.group.comm.channel("uneven inputs")
        yield
        while (rows := self._gather_flags(has_data=False)) is not None:  # the others have data
            for model, used in zip(self.models, rows.any(0).tolist(), strict=True):
                if used:
                    self._finish_round(model)
                    model.clear_gradients()
        self._flags = None
        with torch.no_grad():
            for model in self.models:
                copy_from(self.group.comm, self._had_data, weights_of(model.local.model))

    def _gather_flags(self, *, has_data: bool) -> Tensor | None:
        """Collective: which models have gradients to exchange, of shape ``[workers, models]``; None: no worker has data
        left."""
        assert self._flags is not None
        mine = [float(has_data), *(float(model.open) for model in self.models)]
        rows = self._flags.gather(torch.tensor(mine)).wait()
        active = rows[:, 0].nonzero().flatten().tolist()
        if not active:
            return None
        self._had_data = active[0]
        return rows[:, 1:]

    # ---- the data of a plan ----

    def work_items(self, loader: Loader, mine: range, first: int, count: int) -> Iterator[WorkItem]:
        """The work items of this worker: those that it leases, else `mine` of each step from `first` to before `count`.

        Raises:
            PeerLost: a worker was lost.
        """
        while first < count and not self.views.ended:
            sync = next(iter(self.models)).sync
            leased = sync.work_items(first, count, lambda: False)
            if leased is None:
                yield from ((t, mine, loader.batches(t)) for t in range(first, count))
                return
            self._leasing = True
            yield from loader.work_items(leased)
            self._leasing, first = False, sync.leased_until
            self.state.set_steps(first)
            if self.group.recovers and not self.views.lost:
                self.views.gather_control(self.models)

    def begin_step(self) -> None:
        """The data of a step is given out."""
        self._given = True
        if self.group.recovers:
            self.state.begin_step()
            self._watch.set_phase(Phase.COMPUTE, self.group.comm)

    def begin_pass(self) -> None:
        """Before the first micro-batch of a pass through this worker's data of the step."""
        if not self._given:
            raise UnisonoError("the data of a step was asked for after the step had ended")
        self._in_step(self._end_pass)
        self._find_unfrozen()
        self._entered, self._last, self._pass_weight = True, False, 0.0

    def begin_micro_batch(self, m: int, weight: float, last: bool) -> None:
        """Before micro-batch `m`; `last` of this worker in this pass."""
        self._last, self._unfolded = last, True
        self._pass_weight += weight
        for model in self.models:
            model.begin_micro_batch(m, weight)

    def end_step(self) -> None:
        """Collective: the loop asks for the data of another step, or saves its state. Does nothing between two steps.

        Raises:
            UnisonoError: some micro-batches of the step were not computed.
        """
        if not self._given:
            return
        if not (self._entered or self._stepped):
            raise UnisonoError(
                "the next step's batches were asked for before optimizer.step(): one step is one global batch; "
                "batches.skip() leaves it out"
            )
        if self._entered and not self._last:
            raise UnisonoError("the next step was asked for before all micro-batches of this worker and step were "
                               "computed; batches.skip() leaves a step out")  # fmt: skip
        if not self._is_complete():
            self._in_step(self._complete)
        self._count_step()

    def skip(self) -> None:
        """See `Batches.skip`."""
        if not self._given or self._stepped:
            raise UnisonoError("batches.skip() came after optimizer.step(): call one of them in each step")
        if self._entered and not self._last:
            raise UnisonoError("batches.skip() came before all micro-batches of this worker and step were computed: "
                               "call it before the first of them, or after the last")  # fmt: skip
        if self._entered and not all(model.sync.gradients_only for model in self.models):
            raise UnisonoError("batches.skip() came after data of the step was taken, and replicas take local steps: "
                               "call it before")  # fmt: skip
        for model in self.models if self._entered else ():
            model.drop()
        self._count_step()

    def _is_complete(self) -> bool:
        """Whether nothing is left to exchange in this step: a worker that is lost from now on does not make it void.

        Local steps are complete at the next synchronization only: until then a lost worker takes its steps with it.
        """
        untaken = any(model.update is not None and not model.sync.gradients_only for model in self.models)
        return not (self.state.local_steps or untaken or self._unfolded or any(model.open for model in self.models))

    def _complete(self) -> None:
        """Collective: what this worker and the others have still to exchange in this step."""
        if self._entered:
            self._finish_rounds()
            for model in self.models:
                if model.update is not None and not model.sync.gradients_only:  # a step without a change
                    self._note(model.take_step(lambda: None))
            self._end_pass()

    def _end_pass(self) -> None:
        """Collective: fold the buffers, unless they are since the last micro-batch and exchange."""
        if self._unfolded:
            self._unfolded = False
            for model in self.models:
                model.fold_buffers()

    def _begin_item(self) -> None:
        """Between two steps: nothing of the next one is given out, computed or taken; no worker was lost in it."""
        self._given = self._entered = self._last = self._stepped = self._void = False
        self._unfolded = self._changed = False  # buffers are to be folded; weights have changed
        self._evaluates = False  # an optimizer has been given a closure
        self._rounds, self._pass_weight = 0, 0.0
        self._words: list[float] | None = None

    def _count_step(self) -> None:
        """The step of a plan has ended: count it, unless it is void, and act on the control words."""
        void, words, rounds, evaluates = self._void, self._words, self._rounds, self._evaluates
        if void and self._changed and self.state.snapshot is None:
            raise UnisonoError(
                "a worker was lost in a step in which an optimizer had stepped already, and steps before had only one "
                "exchange, so no copy of the state was kept: start again from a checkpoint"
            )
        self._begin_item()
        for model in self.models:
            if void:
                model.drop()
            model.begin_pass()
        if void:
            return
        self._count()
        if not self.group.recovers:
            return
        self._changes_early = evaluates or rounds > 1
        self._take_snapshots()
        if self.views.lost:
            self.state.commit()
        elif words is not None:
            self.views.unless_lost(lambda: self.views.act_on_control(words, self.models))
        elif not self.state.local_steps:
            self.views.unless_lost(lambda: self.views.commit(self.models))

    def _take_snapshots(self) -> None:
        """Keep the state of the last commit, if a step may change the state before a worker is lost in it."""
        if not self.state.local_steps:
            self.state.take_snapshots(self._changes_early or len(self.optimizers) > 1)

    def _count(self) -> None:
        self.state.set_steps(self.state.progress.steps + 1)
        if self.group.recovers and self.group.session is not None:
            self.group.session.stepped()
        else:
            self._watch.commit(self._watch.steps + 1)

    # ---- gradients ----

    def exchanges(self) -> bool:
        """Whether a gradient that arrives now is exchanged; else it is added to ``grad``, as by autograd alone."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # the first gradient of a backward pass
            if not self.planned:
                self._start()
            self._task, self._exchanging = task, self._is_exchanging()
            Variable._execution_engine.queue_callback(self._end_backward)
        return self._exchanging

    def _is_exchanging(self) -> bool:
        early = not self.planned and self._pass < self._passes - 1
        return self.models.bound and not (self._void or self._locally or early)

    def on_gradient(self, model: LoopModel) -> None:
        """A gradient of `model` has arrived, and will be exchanged."""
        if not model.closed and (self._last or not self.planned):
            model.close_round(self._control_numbers())

    def _end_backward(self) -> None:
        """Autograd has computed all gradients of a backward pass."""
        self._task = None
        exchanging = self._is_exchanging()
        if not self.planned and not self._locally:
            self._pass += 1
        if exchanging and (self._last or not self.planned):
            self._in_step(self._finish_rounds)

    def _finish_rounds(self) -> None:
        """Collective: exchange the gradients that have arrived."""
        if self._flags is not None:
            self._gather_flags(has_data=True)
        for model in self.models:
            if model.open:
                self._finish_round(model)

    def _finish_round(self, model: LoopModel) -> None:
        with self._watch(Phase.COMMUNICATION):
            if not model.closed:
                model.close_round(self._control_numbers())
            words = model.finish_round()
            if not self.planned:
                model.fold_buffers()
                model.begin_micro_batch(self.group.rank, 1.0)
            elif self._last:
                self._unfolded = True
        self._rounds += 1
        self._note(words)

    def _note(self, words: list[float] | None) -> None:
        """Keep the control words of all workers, if they were exchanged."""
        if words is None:
            return
        drift = self._drift.words
        if self._flags is None:
            self._drift.compare(words[:drift])
        self._words = words[drift:]
        if self._inputs is not None:
            self._inputs.compare(self._words)

    def _control_numbers(self) -> list[float]:
        inputs = self._inputs.control_word() if self._inputs else []
        return self._drift.control_word() + self.views.control_word() + inputs

    def _in_step(self, call: Callable[[], T]) -> T | None:
        """``call()``; if a worker was lost, the step is void: its gradients are zero, and None is returned."""
        if self._void:
            return None
        result = self.views.unless_lost(call)
        if self.views.lost:
            self._void = True
            for model in self.models:
                model.clear_gradients()
            for optimizer in self.optimizers:
                optimizer.zero_gradients()
        return result

    # ---- the optimizer's step ----

    def step(self, optimizer: BoundOptimizer, closure: Closure = None) -> Any:
        """Replaces the optimizer's own: take its step. False if it was not taken, since a worker was lost."""
        if not self.planned:
            self._start()
        elif not self._given:
            raise UnisonoError("optimizer.step() was called outside of the loop over world.steps")
        elif closure is None:
            self._check_computed()
        self._pass, self._stepped = 0, True
        if self._shape is None:
            result = self._plain_step(optimizer, closure)
        else:
            result = self._in_step(lambda: self._shared_step(optimizer, closure))
            self._changed = self._changed or not self._void
        if self.group.recovers:  # what a loop does between steps is no part of one, and may take longer
            self._watch.set_phase(Phase.EVALUATION, self.group.comm)
        if not self.planned:
            self._count()
        return result if closure is not None else not self._void

    def _check_computed(self) -> None:
        """Raise `UnisonoError` unless this worker has computed its part of the mean gradient."""
        if self.planned and not self._last:
            raise UnisonoError("optimizer.step() came before all micro-batches of this worker and step were computed")

    def _plain_step(self, optimizer: BoundOptimizer, closure: Closure) -> Any:
        if self._options.clip is not None and closure is None:
            nn.utils.clip_grad_norm_(optimizer.parameters, self._options.clip)
        return optimizer.take(closure) if closure is not None else optimizer.take()

    def _shared_step(self, optimizer: BoundOptimizer, closure: Closure) -> Any:
        """Collective: exchange what is left to exchange, and take the step."""
        if any(p.grad is not None for p in optimizer.untrained):
            raise InvalidInput(
                "optimizer", type(optimizer.optimizer).__name__, "a parameter that was frozen has a gradient, which is "
                "that of this worker's data alone", "unfreeze it before the forward pass of a module")  # fmt: skip
        models = optimizer.models
        local = next((model for model in models if not model.sync.gradients_only), None)
        if closure is not None and local is None:
            loss = self._plain_step(optimizer, self._with_mean_loss(closure))
            for model in models:
                model.take_step(lambda: None)
            return loss
        loss = self._local_loss(optimizer.optimizer, closure) if closure is not None else None
        self._check_computed()
        for model in models:
            if model.rounds == optimizer.rounds.get(model, 0):
                model.check_gradients()
                self._finish_round(model)  # there was no backward pass here, but perhaps on other workers
            optimizer.rounds[model] = model.rounds
        if self.planned:
            self._end_pass()
        if local is None:
            for model in models:
                model.take_step(lambda: None)
            return self._plain_step(optimizer, None)
        self._note(local.take_step(lambda: self._plain_step(optimizer, None)))
        return loss

    def _local_loss(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """The closure's loss on this worker, before a step that is local or a server's: its gradients are computed."""
        if not type(optimizer).__module__.startswith("torch.optim"):  # those that call it twice are not bound
            raise InvalidInput("closure", type(optimizer).__name__, "it may compute the loss several times, which with "
                               "local steps or servers has no mean over all workers",
                               "use AllReduce(), or call closure() and then step()")  # fmt: skip
        with torch.enable_grad():
            return closure()

    def _with_mean_loss(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure`, with the mean of its losses over all workers, so that all of them decide alike."""

        def mean_loss() -> Any:
            self._changed |= self._evaluates  # before any evaluation but the first, weights may change
            self._evaluates = True
            with torch.enable_grad():
                loss = closure()
            self._check_computed()
            if loss is None:
                return None
            loss = loss.detach() if isinstance(loss, Tensor) else loss
            weight = self._pass_weight if self.planned else 1.0
            mine = torch.tensor([float(loss) * weight, weight], dtype=torch.float64)
            sums = self.views.unless_lost(lambda: self.group.metrics.gather(mine).wait())
            if sums is None:
                return loss
            mean = math.fsum(sums[:, 0].tolist()) / math.fsum(sums[:, 1].tolist())
            return loss.new_tensor(mean) if isinstance(loss, Tensor) else mean

        return mean_loss

    def average_gradients(self) -> None:
        """See `World.average_gradients`."""
        if not self.planned:
            self._start()
        if self._shape is None:
            return
        for model in self.models:
            model.take_gradients(self._pass_weight if self.planned else 1.0)
        self._in_step(self._finish_rounds)

    def check_zero_grad(self, optimizer: BoundOptimizer) -> None:
        """Raise `UnisonoError` if gradients of micro-batches, which have been folded, were to be discarded."""
        if self.planned and self._entered and any(model.open for model in optimizer.models):
            raise UnisonoError(
                "optimizer.zero_grad() between the micro-batches of a step would discard gradients of those before: "
                "call it before the first micro-batch, or after optimizer.step()"
            )

    def check_new_group(self, optimizer: BoundOptimizer) -> None:
        """Raise `InvalidInput` if `optimizer` cannot get a group of parameters now."""
        if self.group.recovers:
            raise InvalidInput(
                "add_param_group", type(optimizer.optimizer).__name__, "a worker that joins this loop would lack the "
                "group, and a step that is repeated would add it again", "give the optimizer all parameters before "
                "world.steps, and freeze until then those that are trained later")  # fmt: skip

    # ---- between two steps ----

    def save(self, directory: Path, keep: int) -> Path | None:
        """See `World.save`."""
        if not (self._given and self._entered and not self._stepped):
            self.end_step()
        if self._leasing or self._given or any(model.open or model.holds_step for model in self.models):
            raise UnisonoError("world.save came in the middle of a step: call it between two steps, on all workers; "
                               "after the loop where each takes steps at its own pace")  # fmt: skip
        if not self.state.progress.steps:
            raise UnisonoError("world.save has nothing to save: no step has been taken yet")
        self.synchronize()
        return self.checkpoints.save(directory, keep, self.models if self.models.bound else None)

    def synchronize(self) -> None:
        """See `World.synchronize`."""
        if not self.models.bound:
            return
        self.end_step()
        self.models.synchronize()
        if self.group.recovers and self.state.local_steps:
            self.views.commit(self.models)
