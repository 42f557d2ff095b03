"""A custom training loop on many workers, in two added lines.

    world = unisono.join()
    model, optimizer = world.bind(model, optimizer)

The loop then runs under ``unisono launch``, torchrun, Slurm or Open MPI, or alone as one process, unchanged.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.comm import Communicator, connect
from unisono.compress import Cast, Compressor
from unisono.config import LIBRARY_GLOBAL_BATCH, Config, checked, takes_local_steps
from unisono.data import Load, Loader, MicroBatchPlan, WorkItem, assign, seed_compute, stream
from unisono.elastic.extra_state import Stateful
from unisono.elastic.loop_group import STUCK_IN, ElasticGroup, LoopGroup, StaticGroup, TrainingState, words_of
from unisono.elastic.trait_check import Traits
from unisono.errors import InvalidInput, PeerLost, UnisonoError
from unisono.launch import claim_identity
from unisono.launch.script import take_elastic_context
from unisono.observe import ThreadTracker, Watchdog
from unisono.observe.activity import Phase
from unisono.sync import AllReduce, Synchronizer
from unisono.tasks.checks import check_whole
from unisono.tasks.task import build_dataset
from unisono.tensors.batch import Batch, samples_in
from unisono.trainer.device import choose_device, fair_threads
from unisono.trainer.duplicate_inputs import SameInputs
from unisono.trainer.loop_checkpoint import Plan, Recalled, load, save
from unisono.trainer.model_hooks import before_forward
from unisono.trainer.replica import Replica, Step, check_fit, check_trainable
from unisono.trainer.traits import of_data, of_groups, of_model, of_script

LOG = logging.getLogger("unisono")


def join(
    *, device: str = "auto", communicator: str = "auto", threads: int = 0, timeout_seconds: float = 300.0
) -> World:
    """Meet the other workers; alone, where no launcher started this process.

    Reads the environment of ``unisono launch``, torchrun, Slurm and Open MPI. Processes that this one starts later are
    none of its workers, though they inherit that environment. `threads` is the number of compute
    threads of this worker; 0 shares the cores among the workers of this host.

    Raises:
        InvalidInput: the environment is contradictory, an argument is not one that `Config` takes, or what is asked for
            is not there.
        UnisonoError: multiprocessing started this process (a DataLoader worker by spawn or forkserver, say), and the
            script that it imports has no ``if __name__ == "__main__":`` around this call.
        PeerLost: the others did not come within `timeout_seconds`.
    """
    asked = checked(device=device, communicator=communicator, threads=threads, timeout_seconds=timeout_seconds)
    who = claim_identity()
    where = choose_device(asked["device"], who.local_rank)
    torch.set_num_threads(asked["threads"] or fair_threads(who.local_size))
    watch, given = ThreadTracker(), take_elastic_context()
    kind, seconds = asked["communicator"], asked["timeout_seconds"]
    meet = partial(
        connect,
        who.rank,
        who.size,
        rendezvous=who.rendezvous,
        local_size=who.local_size,
        kind=kind,
        device=where,
        timeout_seconds=seconds,
    )
    if given is not None:
        return World(ElasticGroup(given, where, watch, kind, seconds, meet), where, watch)
    return World(StaticGroup(who, meet(), watch, Watchdog(watch, STUCK_IN)), where, watch)


class World:
    """All workers of a run, as one of them sees it.

    Attributes:
        device: where this worker computes.
    """

    def __init__(self, company: LoopGroup, device: torch.device, watch: ThreadTracker) -> None:
        self.device = device
        self._company, self._watch = company, watch
        self._bound: _CustomLoop | None = None

    @property
    def rank(self) -> int:
        """This worker's number, from 0; where workers come and go, another one at times."""
        return self._company.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._company.size

    @property
    def comm(self) -> Communicator:
        """What connects them."""
        return self._company.comm

    def bind(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync: Synchronizer | str = AllReduce(),
        compress: Compressor | str = Cast(),
        clip: float | None = None,
        backward_passes: int = 1,
        overlap: bool = True,
    ) -> tuple[nn.Module, Optimizer]:
        """Make `optimizer.step` take the step of all workers together; returns both, the same objects.

        The step returns True, or False if it was not taken, since a worker was lost: `steps` then gives its data once
        more. Worker 0's weights and optimizer state are copied to all. Between ``backward()`` and ``step()`` the
        gradients are on their way, and ``parameter.grad`` is None: clipping is therefore an argument here.

        Args:
            sync, compress: as in `Config`; text is read in the notation, as on the command line.
            clip: largest 2-norm of the mean gradient over all workers.
            backward_passes: how often ``backward()`` runs before each ``step()``; gradients of a worker's passes add
                up, those of workers are averaged. Without effect inside `steps`, which knows.
            overlap: exchange gradients while backward still runs.

        Raises:
            InvalidInput: an argument is not one that `Config` takes, or model and optimizer do not fit each other.
        """
        if self._bound is not None:
            raise UnisonoError("world.bind was called already: one world trains one model")
        _check_kinds(model, optimizer)
        options = checked(sync=sync, compress=compress, clip=clip, overlap=overlap)
        check_whole("backward_passes", backward_passes, 1)
        check_fit(model, optimizer)
        check_trainable(model)
        state = TrainingState(model, optimizer, walks=takes_local_steps(options["sync"]))
        self._company.agree(state)
        self._bound = _CustomLoop(self._company, self._watch, state, backward_passes, options)
        return model, optimizer

    def register_state(self, name: str, stateful: Stateful) -> None:
        """Make `stateful`, such as a learning-rate scheduler, part of the state of this run.

        A worker that joins later receives it, checkpoints contain it, and it is rolled back with a step that did not
        count. To be called on all workers alike, between `bind` and `steps`.

        Args:
            name: unique among those registered.
            stateful: has ``state_dict()``, of numbers, texts, tensors, lists and dictionaries, copied at every step,
                and ``load_state_dict(state)``.

        Raises:
            InvalidInput: it lacks one of these methods.
        """
        if self._bound is None or self._bound.planned:
            raise UnisonoError("call world.register_state between world.bind and world.steps")
        self._bound.state.kept.add(name, stateful)

    def save(self, directory: str | os.PathLike[str], *, keep: int = 2) -> Path | None:
        """Collective, between two steps: write a checkpoint of model, optimizer, synchronizer, registered state, and
        the number of steps taken, from which `load` goes on.

        Returns when it lies on disk, with its directory; None, if it could not be written (a warning is logged) or a
        worker was lost meanwhile. Where replicas take steps of their own, they meet first.

        Args:
            directory: of the checkpoints; that of a run that `unisono train` made, will do.
            keep: how many stay, the newest.

        Raises:
            CheckpointError: `directory` cannot be used.
        """
        if self._bound is None:
            raise UnisonoError("world.save needs the model: call world.bind(model, optimizer) first")
        check_whole("keep", keep, 1)
        if self._company.lost:
            return None
        try:
            return self._bound.save(Path(directory), keep)
        except PeerLost as error:
            self._company.lose(error)
            return None

    def load(self, directory: str | os.PathLike[str]) -> int:
        """Collective, between `bind` (and `register_state`) and the first step: go on from the newest sound checkpoint
        in `directory`, on any number of workers. Returns the steps that it holds; 0, and nothing has changed, where
        there is none yet.

        `steps` then begins with the step after those. Hyperparameters of the optimizer's groups are part of the state.
        In a worker that comes later, nothing is read, and 0 returned: it
        has the state of the others once its loop begins.

        Raises:
            InvalidInput: the checkpoint is of another model, optimizer or compressor, or holds other things than are
                kept here.
            CheckpointDamaged: there are checkpoints, and not one is sound.
        """
        if self._bound is None or self._bound.begun:
            raise UnisonoError("call world.load between world.bind and the first step")
        return self._bound.load(Path(directory))

    def steps(
        self,
        dataset: Any,
        *,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        seed: int = 0,
        collate: Callable[[list[Any]], Batch] | None = None,
        load: Load | str | None = None,
    ) -> Iterator[Batches]:
        """The training data, dealt out: for each step, this worker's micro-batches.

            for batches in world.steps(dataset, global_batch=64):
                for x, y in batches:
                    loss_of(model(x), y).backward()      # the mean over the micro-batch
                optimizer.step()

        The samples of a step, their order, their micro-batches and random streams depend on `seed` and the step
        alone; the step taken is that of the mean over the global batch, whoever computed what. ``batches.step`` is its
        number, from 0: the same again if it was not taken, and that of the others in a worker that comes later. Under
        `LocalSGD` and its like a worker that is lost takes the steps along that it took since all last met: they are
        given once more.

        Args:
            global_batch, micro_batch, seed, load: as in `Config`; text is read in the notation. 64 samples a step where
                `global_batch` is None.
            steps: optimizer steps in all; excludes `epochs`.
            epochs: passes over `dataset`, a fraction allowed, rounded down to whole steps; 1 where neither is given.
                Worker 0 logs a warning if samples are left out.
            collate: makes a batch of a list of samples. Default: torch's.

        Raises:
            InvalidInput: an argument is not one that `Config` takes; batch sizes that do not fit each other, the
                dataset or the number of workers.
            TaskMismatch: other workers have another script, model, optimizer or dataset, or other arguments here.
            Left: this worker was asked to leave, and the others go on.
        """
        if self._bound is None:
            raise UnisonoError("world.steps needs the model: call world.bind(model, optimizer) first")
        asked = checked(
            global_batch=global_batch, micro_batch=micro_batch, steps=steps, epochs=epochs, seed=seed, load=load
        )
        if collate is not None and not callable(collate):
            raise InvalidInput("collate", type(collate).__name__, "cannot be called", "pass a function of a list of "
                               "samples that returns a batch")  # fmt: skip
        dataset = build_dataset(dataset)
        size = asked["global_batch"] or LIBRARY_GLOBAL_BATCH
        plan = MicroBatchPlan(len(dataset), size, asked["micro_batch"], asked["seed"])
        passes = asked["epochs"] or 1.0
        if not asked["steps"] and self.rank == 0 and (words := plan.left_out(passes)):
            LOG.warning(words)
        count = asked["steps"] or plan.steps_in(passes)
        self._bound.check_plan(plan)
        make = partial(Loader, dataset, plan, collate=collate, load=asked["load"], seed=plan.seed, last_step=count)
        self._company.admit(partial(_traits, dataset, plan, count, self._bound.state))
        return self._in_all_views(self._bound, plan, make, count)

    def _in_all_views(
        self, bound: _CustomLoop, plan: MicroBatchPlan, make: Callable[..., Loader], count: int
    ) -> Iterator[Batches]:
        """All of the steps, with whichever workers there are."""
        company = self._company
        bound.plan(plan.micro_batches, float(plan.global_batch))
        while True:
            try:
                yield from self._in_one_view(bound, make, plan.seed, count)
                if not company.ended:
                    bound.synchronize()
                    company.finish()
                    return
            except PeerLost as error:
                company.lose(error)
            bound.let_go()
            if not company.again():
                return

    def _in_one_view(self, bound: _CustomLoop, make: Callable[..., Loader], seed: int, count: int) -> Iterator[Batches]:
        """As many of the steps as those who are there now take together."""
        first, micro_batches = bound.state.reached.steps, bound.micro_batches
        mine = assign(micro_batches, [1.0] * self.size)[self.rank]
        loader = make(mine=lambda _: mine, first_step=first)
        bound.begin()
        try:
            for t, share, batches in self._watch.each(Phase.COMMUNICATION, bound.turns(loader, mine, first, count)):
                bound.turn()
                yield Batches(t, self._micro_batches(t, share, batches, seed, bound), bound.skip)
                if self._company.ended:
                    return
                bound.check_ended()
        finally:
            loader.close()

    def synchronize(self) -> None:
        """Collective, between two steps: makes weights and optimizer state equal on all workers.

        Under ``AllReduce()`` they always are; `steps` does it at its end. After the loss of a worker this does nothing
        until the next step is asked for.
        """
        if self._bound is None or self._company.lost:
            return
        try:
            self._bound.synchronize()
        except PeerLost as error:
            self._company.lose(error)

    def mean(self, value: float, weight: float = 1.0) -> float:
        """The weighted mean of everybody's `value`, the same bits on all workers; NaN if all weights are 0.

        All workers call it alike. NaN also where a worker was lost, until the next step.
        """
        mine = torch.tensor([value * weight, weight], dtype=torch.float64)
        if self._company.lost:
            return math.nan
        try:
            sums = self._company.metrics.gather(mine).wait()
        except PeerLost as error:
            self._company.lose(error)
            return math.nan
        total = math.fsum(sums[:, 1].tolist())
        return math.fsum(sums[:, 0].tolist()) / total if total else math.nan

    def close(self) -> None:
        """Leave; gives back what the operating system lent."""
        self._close(sys.exc_info()[0])

    def _close(self, failure: type[BaseException] | None) -> None:
        if self._bound is not None:
            self._bound.release()
        self._company.close(finished=failure is None)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(kind)

    def _micro_batches(
        self, t: int, mine: range, batches: Iterator[tuple[int, Batch]], seed: int, bound: _CustomLoop
    ) -> Iterator[Batch]:
        for m, batch in self._watch.each(Phase.DATA, batches):
            bound.enter(m, float(samples_in(batch)), last=m == mine[-1])
            seed_compute(stream(seed, t, m, "compute"))
            yield batch


def _traits(dataset: Any, plan: MicroBatchPlan, steps: int, state: TrainingState) -> Traits:
    """What all workers of a loop are to have in common."""
    return {
        "global_batch": str(plan.global_batch),
        "micro_batch": str(plan.micro_batch),
        "seed": str(plan.seed),
        **of_script(),
        **of_model(state.model),
        **of_groups(state.optimizer),  # a worker that comes later has the others' hyperparameters
        **of_data(dataset),
        "steps": str(steps),  # which depends on what comes before
    }


class Batches:
    """This worker's micro-batches of one step.

    Attributes:
        step: its number, from 0.
    """

    def __init__(self, step: int, batches: Iterator[Batch], skip: Callable[[], None]) -> None:
        self.step, self._batches, self._skip = step, batches, skip

    def skip(self) -> None:
        """Collective, in place of ``optimizer.step()``: leave this step out. It counts as done, and model and optimizer
        stay as they are; what was computed for it is dropped. Either before any of its data was asked for, or after
        all.

        Raises:
            UnisonoError: some of the data was taken; or all was, and replicas take steps of their own.
        """
        self._skip()

    def __iter__(self) -> Iterator[Batch]:
        return self._batches

    def __next__(self) -> Batch:
        return next(self._batches)


class _CustomLoop:
    """A user's model and optimizer while they belong to a world."""

    def __init__(
        self, company: LoopGroup, watch: ThreadTracker, state: TrainingState, passes: int, options: dict[str, Any]
    ) -> None:
        self._company, self._watch, self.state = company, watch, state
        self._model, self._optimizer = model, optimizer = state.model, state.optimizer
        self._passes, self._options = passes, options
        self._replica: Replica | None = None
        self._plan: MicroBatchPlan | None = None
        self._recalled = Recalled()
        self.planned = self._given = self._entered = self._last = self._dealing = False
        self.micro_batches, self._reference = 0, 0.0
        self._held = 0  # steps that count
        self._left = True
        # With nobody to agree with and nothing to round, autograd's own gradients are the mean.
        keeps = all(options["compress"].is_lossless(p.dtype) for p in model.parameters() if p.requires_grad)
        self._alone = company.size == 1 and keeps
        self._plain_step, self._own = optimizer.step, optimizer.__dict__.get("step")

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        if hasattr(self._plain_step, "_wrapped_by_lr_sched"):  # else a scheduler made earlier warns that it was lost
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        # A bound method of the optimizer itself, since learning-rate schedulers wrap its function and bind it again.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        # Data that the loop reads by itself may be the same on all workers by mistake.
        self._inputs = SameInputs(model, company.rank, company.size) if company.size > 1 else None
        self._first_forward = before_forward(model.modules(), self._ready)

    @property
    def begun(self) -> bool:
        """Whether the training is under way."""
        return self.planned or self._replica is not None or self.state.reached.steps > 0

    def check_plan(self, plan: MicroBatchPlan) -> None:
        """Raise `InvalidInput` if what was loaded was saved in steps of another `plan`."""
        self._plan = plan
        self._recalled.check(self._described())

    def load(self, directory: Path) -> int:
        """See `World.load`."""
        if not self._company.late:
            self._recalled = load(self._company.metrics, directory, self.state, self._described())
        return self.state.reached.steps

    def save(self, directory: Path, keep: int) -> Path | None:
        """See `World.save`."""
        if self._given or self._dealing or (not self.planned and self._replica is not None and self._came):
            raise UnisonoError("world.save came in the middle of a step: call it between two steps, on all workers; "
                               "after the loop where each takes steps at its own pace")  # fmt: skip
        if not self.state.reached.steps:
            raise UnisonoError("world.save has nothing to save: no step has been taken yet")
        self.synchronize()
        return save(self._company.metrics, directory, keep, self.state, self._described(), self._replica)

    def _described(self) -> Plan:
        plan = self._plan
        given = {"workers": self._company.size, "threads": torch.get_num_threads(), **self._options}
        if plan is not None:
            given |= {"global_batch": plan.global_batch, "micro_batch": plan.micro_batch, "seed": plan.seed}
        return Plan(Config(**given), plan.samples if plan is not None else None)

    def plan(self, micro_batches: int, reference: float) -> None:
        """`World.steps` deals out the data from now on."""
        if self._replica is not None:
            raise UnisonoError(
                "world.steps came too late: call it once, right after bind, with steps= or epochs= for all the training"
            )
        self.planned = True
        self.micro_batches, self._reference = micro_batches, reference
        self._forget_hooks()
        self._forget_inputs()
        if self.state.walks or isinstance(self._options["sync"], AllReduce):
            self._company.begin(self.state)
        else:
            self._company.stay()

    def begin(self) -> None:
        """Those who are there now begin with the step after those that are in the state."""
        self._start(self.micro_batches, self._reference)
        assert self._replica is not None
        self._held = self.state.reached.steps
        self._go_on()
        self._next_step()

    def _go_on(self) -> None:
        """The new replica takes up what an earlier one shared and owed."""
        assert self._replica is not None
        if self.state.reached.shared:
            self._replica.load_state_dict(self.state.reached.shared)
        if self._recalled.owed and self._recalled.meta["config"]["workers"] == self._company.size:
            self._replica.load_residuals(self._recalled.owed)
        self._recalled = Recalled()

    def let_go(self) -> None:
        """Leave model and optimizer as the last step that was taken left them."""
        assert self._replica is not None
        self.state.reached = replace(self.state.reached, shared=self._replica.state_dict())
        self._replica.discard_step()
        self._replica.unbind()

    def turns(self, loader: Loader, mine: range, first: int, count: int) -> Iterator[WorkItem]:
        """The work of this worker: what is dealt out to it, else `mine` of each step from `first` to before `count`.
        Raises `PeerLost`."""
        replica = self._replica
        assert replica is not None
        while first < count and not self._company.ended:
            shares = replica.work_items(first, count, lambda: False)
            if shares is None:
                yield from ((t, mine, loader.batches(t)) for t in range(first, count))
                return
            self._dealing = True
            yield from loader.work_items(shares)
            self._dealing, first = False, replica.leased_until
            self.state.reached = replace(self.state.reached, steps=first)
            if self._company.recovers and not self._company.lost:
                self._meet_after(first)

    def _meet_after(self, dealt: int) -> None:
        """All that was dealt out, to before step `dealt`, is computed, here; wait for the others."""
        words = self._company.comm.gather(torch.tensor(self._company.says(), dtype=torch.float64)).wait()
        self.state.reached = replace(self.state.reached, steps=dealt)
        self._met(words.sum(0).tolist())

    def _met(self, words: Sequence[float]) -> None:
        """All have met, and said `words`."""
        assert self._replica is not None
        self._company.hear(words)
        if self._company.ended:  # who leaves leaves its share of what all have come to
            self._replica.synchronize()
        self._hold()

    def synchronize(self) -> None:
        """See `World.synchronize`."""
        if self._replica is None:
            return
        self._replica.synchronize()
        if self._company.recovers and self.state.walks:
            self._hold()

    def turn(self) -> None:
        """A step's data is given out."""
        self._given = True
        if self._company.recovers:
            self.state.begin()
            self._watch.set_phase(Phase.COMPUTE, self._company.comm)

    def check_ended(self) -> None:
        """Raise `UnisonoError` if the step that was given out was neither taken nor left out."""
        if self._given:
            raise UnisonoError(
                "the next step's batches were asked for before optimizer.step(): one step is one global batch; "
                "batches.skip() leaves it out"
            )

    def enter(self, m: int, weight: float, last: bool) -> None:
        """A micro-batch begins; `last` of this worker in this step."""
        assert self._replica is not None
        if not self._left:  # the one before had no backward pass
            self._leave(self._last)
        self._replica.begin_micro_batch(m, weight)
        self._last, self._left, self._entered = last, False, True

    def step(self, closure: Callable[[], Any] | None = None) -> bool:
        """In place of the optimizer's own: wait for the mean, then step. False if it was not taken."""
        if closure is not None:
            raise InvalidInput("closure", closure, "the step of many workers cannot run it again", "call step()")
        if self._replica is None and self._alone:
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
            raise UnisonoError("batches.skip() came after data of the step was taken, and replicas take steps of their "
                               "own: call it before")  # fmt: skip
        if self._entered:
            self._end_step(Step.drop)
            return
        self._count()
        if self._company.recovers and not self.state.walks:
            self._hold()
        self._next_step()

    def _end_step(self, end: Callable[[Step], Any]) -> bool:
        """Have the step of all workers end by `end`; whether it has."""
        try:
            self._take(self._settled(), end)
        except PeerLost as error:
            self._company.lose(error)
        taken = not self._company.lost
        if self._company.recovers:  # what a loop does between steps is no part of one, and may take longer
            self._watch.set_phase(Phase.EVALUATION, self._company.comm)
        self._next_step()
        return taken

    def _settled(self) -> Step:
        assert self._replica is not None
        if not self._left:
            self._leave(last=self._last or not self.planned)
        if not self._last and self.planned:
            raise UnisonoError("optimizer.step(), or batches.skip(), came before all micro-batches of this worker and "
                               "step were computed")  # fmt: skip
        with self._watch(Phase.COMMUNICATION):
            step = self._replica.settle()
        self._company.check()
        return step

    def _take(self, step: Step, end: Callable[[Step], Any]) -> None:
        end(step)
        if self._inputs is not None and step.extra is not None:
            self._inputs.hear(step.extra)
        self._count()
        if self._company.recovers and step.extra is not None:
            self._met(step.extra)

    def _count(self) -> None:
        self.state.take()
        if self._company.recovers:
            self._company.stepped()
        else:
            self._watch.commit(self._watch.done + 1)

    def _hold(self) -> None:
        """All have met: what they have now counts."""
        assert self._replica is not None
        self._replica.quiesce()
        self.state.hold(self._replica.state_dict() if self.state.walks else None)
        if new := self.state.reached.steps - self._held:
            self._held += new
            self._company.done(new)
            self._watch.commit(self._watch.done + new)

    def release(self) -> None:
        """Give the optimizer its own step back."""
        self._forget_hooks()
        self._forget_inputs()
        if self._own is None:
            self._optimizer.__dict__.pop("step", None)
        else:
            self._optimizer.step = self._own  # type: ignore[method-assign]
        if self._replica is not None:
            self._replica.unbind()

    def _ready(self) -> None:
        if not self.planned and not (self._model.training and torch.is_grad_enabled()):
            return
        if not self.planned and not self._alone:
            self._check_own()
            self._start_unplanned()
        self._forget_hooks()

    def _check_own(self) -> None:
        """Raise `UnisonoError` where other tensors stand in for the parameters, in a forward pass that begins."""
        held = {id(p) for p in self._model.parameters()}
        if not any(id(p) in held for group in self._optimizer.param_groups for p in group["params"]):
            raise UnisonoError(
                "the first forward pass has other tensors in place of the model's parameters, as "
                "torch.func.functional_call does, so that gradients cannot be followed: take the data from "
                "world.steps, or call the model itself first"
            )

    def _forget_inputs(self) -> None:
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None

    def _forget_hooks(self) -> None:
        for hook in self._first_forward:
            hook.remove()

    def _start_unplanned(self) -> None:
        self._forget_hooks()
        self._company.stay()
        self._start(self._company.size, float(self._company.size))
        self._go_on()
        self._next_step()

    def _start(self, micro_batches: int, reference: float) -> None:
        self._replica = Replica(
            self._model,
            self._optimizer,
            self._company.comm,
            micro_batches=micro_batches,
            reference=reference,
            listener=self._gradient,
            extra=words_of(self._company) + (self._inputs.words if self._inputs else 0),
            repeats=self.planned,  # a worker may be lost, or the step skipped
            awaits=self._company.recovers and self.state.walks,
            **self._options,
        )

    def _next_step(self) -> None:
        """Without a plan, all that happens between two steps is this worker's one micro-batch."""
        self._given, self._entered, self._left = False, False, True
        if self.planned:
            self._last = False
        else:
            self.enter(self._company.rank, 1.0, last=self._passes == 1)
            self._pass, self._came = 0, set[str]()

    def _gradient(self, name: str) -> None:
        """The first gradient of a backward pass says that the forward pass before it is over."""
        if not self.planned:
            if name in self._came:
                self._pass, self._came = self._pass + 1, set()
                self._last = self._pass >= self._passes - 1
            self._came.add(name)
        if not self._left and (self._last or self.planned):
            self._leave(self._last)

    def _says(self) -> list[float]:
        """This worker's numbers for the control word."""
        return self._company.says() + (self._inputs.says() if self._inputs else [])

    def _leave(self, last: bool) -> None:
        assert self._replica is not None
        try:
            self._replica.end_forward(last=last, extra=self._says() if last else None)
        except PeerLost as error:  # perhaps inside of the user's backward pass
            self._replica.fail(error)
        self._left, self._last = True, last


def _check_kinds(model: Any, optimizer: Any) -> None:
    """Raise `InvalidInput` unless `world.bind` was given a model and its optimizer, in this order."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            "model", type(model).__name__, "not a torch.nn.Module", "write world.bind(model, optimizer)")  # fmt: skip
    if not isinstance(optimizer, Optimizer):
        also = ', and world.register_state("scheduler", scheduler)' if isinstance(optimizer, LRScheduler) else ""
        raise InvalidInput("optimizer", type(optimizer).__name__, "not a torch.optim.Optimizer",
                           f"write world.bind(model, optimizer){also}")  # fmt: skip
