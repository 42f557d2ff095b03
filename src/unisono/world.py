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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.comm import Communicator, connect
from unisono.compress import Cast, Compressor
from unisono.config import LIBRARY_GLOBAL_BATCH, checked
from unisono.data import Load, Loader, MicroBatchPlan
from unisono.elastic.agreement import start_alike
from unisono.elastic.extra_state import Stateful
from unisono.elastic.loop_group import STUCK_IN, ElasticLoopGroup, LoopGroup
from unisono.elastic.training_state import TrainingState
from unisono.elastic.trait_check import Traits
from unisono.errors import InvalidInput, UnisonoError
from unisono.launch import WorkerIdentity, claim_identity
from unisono.launch.script import take_elastic_context
from unisono.observe import ThreadTracker, Watchdog
from unisono.sync import AllReduce, Synchronizer
from unisono.tasks.checks import check_whole
from unisono.tasks.task import build_dataset
from unisono.tensors.batch import Batch
from unisono.trainer.custom_loop import CustomLoop
from unisono.trainer.device import choose_device, fair_threads
from unisono.trainer.loop_model import LoopOptions
from unisono.trainer.loop_steps import Batches, all_steps
from unisono.trainer.optimizer_set import OptimizerSet
from unisono.trainer.traits import of_data, of_groups, of_model, of_script

LOG = logging.getLogger("unisono")


def join(
    *, device: str = "auto", communicator: str = "auto", threads: int = 0, timeout_seconds: float = 300.0
) -> World:
    """Collective: connect to the other workers. A process that no launcher started is the only worker.

    Reads the environment of ``unisono launch``, torchrun, Slurm and Open MPI. Processes that this one starts later are
    not workers, though they inherit that environment.

    Args:
        threads: compute threads of this worker; 0 shares the cores among the workers of this host.

    Raises:
        InvalidInput: the environment is contradictory, an argument is not one that `Config` takes, or the device or
            communicator does not exist here.
        UnisonoError: multiprocessing started this process (for example a DataLoader worker by spawn or forkserver), and
            the script that it imports has no ``if __name__ == "__main__":`` around this call.
        PeerLost: other workers did not connect within `timeout_seconds`.
    """
    return World(*join_group(device, communicator, threads, timeout_seconds))


def join_group(
    device: str, communicator: str, threads: int, timeout_seconds: float, identity: WorkerIdentity | None = None
) -> tuple[LoopGroup, torch.device, ThreadTracker]:
    """Collective: the workers, as an interface uses them that has a loop of its own; arguments and errors of `join`.

    Args:
        identity: of this worker; None: what the environment says.

    Returns:
        The group, where this worker computes, and what records its activity.
    """
    asked = checked(device=device, communicator=communicator, threads=threads, timeout_seconds=timeout_seconds)
    who = claim_identity(identity)
    where = choose_device(asked["device"], who.local_rank)
    torch.set_num_threads(asked["threads"] or fair_threads(who.local_size))
    watch, elastic = ThreadTracker(), take_elastic_context()
    kind, seconds = asked["communicator"], asked["timeout_seconds"]
    connect_all = partial(
        connect,
        who.rank,
        who.size,
        rendezvous=who.rendezvous,
        local_size=who.local_size,
        kind=kind,
        device=where,
        timeout_seconds=seconds,
    )
    if elastic is not None:
        return ElasticLoopGroup(elastic, where, watch, kind, seconds, connect_all), where, watch
    return LoopGroup(who, connect_all(), watch, Watchdog(watch, STUCK_IN)), where, watch


class World:
    """All workers of a run, as a custom training loop on one of them uses them.

    Attributes:
        device: where this worker computes.
    """

    def __init__(self, group: LoopGroup, device: torch.device, watch: ThreadTracker) -> None:
        self.device = device
        self._group, self._watch = group, watch
        self._loop: CustomLoop | None = None

    @property
    def rank(self) -> int:
        """This worker's number, from 0. It may change when workers join or leave."""
        return self._group.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._group.size

    @property
    def comm(self) -> Communicator:
        """The communicator of all workers."""
        return self._group.comm

    def bind(
        self,
        *things: nn.Module | Optimizer,
        sync: Synchronizer | str = AllReduce(),
        compress: Compressor | str = Cast(),
        clip: float | None = None,
        backward_passes: int = 1,
        overlap: bool = True,
    ) -> Any:
        """Collective: train `things`, any number of models and optimizers, on all workers. Returns them in this order.

        All workers get the weights, buffers and optimizer states of worker 0. From then on, a backward pass leaves the
        mean gradient over all workers in ``parameter.grad``, as torch's DistributedDataParallel does. What the loop
        does to it before ``optimizer.step()`` counts. With local steps and parameter servers, it is this worker's own
        gradient. A step returns True; or False if it was not taken since a worker was lost: gradients are then zero,
        and `steps` gives the data of the step again.

        May be called again for further models and optimizers; without a plan of `steps`, also during training.

        Args:
            sync, compress: as in `Config`; text is read in the notation, as on the command line. The same in all calls.
                Synchronizers other than `AllReduce` take one model and one optimizer in each call.
            clip: largest 2-norm of the gradient of an optimizer's parameters, in its step.
            backward_passes: calls of ``backward()`` before each ``step()``; the exchange is in the last of them.
                Gradients of a worker's passes add up, those of workers are averaged. No effect inside `steps`.
            overlap: exchange gradients during backward.

        Raises:
            InvalidInput: an argument is not one that `Config` takes, or models and optimizers do not fit each other.
        """
        given = checked(sync=sync, compress=compress, clip=clip, overlap=overlap)
        check_whole("backward_passes", backward_passes, 1)
        options = LoopOptions(**given, backward_passes=backward_passes)
        _check_kinds(things)
        if self._loop is None:
            self._loop = CustomLoop(self._group, self._watch, options)
        models = [thing for thing in things if isinstance(thing, nn.Module)]
        self._loop.add(models, [thing for thing in things if isinstance(thing, Optimizer)], options)
        return things if len(things) > 1 else things[0]

    def share(self, module: nn.Module) -> None:
        """Collective: `module` gets the weights and buffers of worker 0. `bind` does it too.

        Raises:
            InvalidInput: workers have built different modules.
        """
        nothing: Any = OptimizerSet([])
        start_alike(self._group.comm, module, nothing)

    def release(self, module: nn.Module) -> None:
        """Give a bound model back, with the optimizers of its parameters: its gradients are this worker's own again.

        All workers call it alike, between two steps. Not in a loop over `steps`.
        """
        self._bound().remove(module)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes add this worker's own gradients to ``grad``, as DistributedDataParallel's ``no_sync``
        does. The next backward pass outside averages all of it. Not in a loop over `steps`, which adds up by itself.
        """
        return self._bound().no_sync()

    def uneven_inputs(self) -> AbstractContextManager[None]:
        """Collective: inside, workers may run out of data at different times, as in DistributedDataParallel's ``join``.

        A worker that leaves the block takes part in the exchanges of the others, with gradients of zero, until the last
        one leaves it. Then all have the weights and buffers of one that was among the last. Not in a loop over `steps`.
        """
        return self._bound().uneven_inputs()

    def average_gradients(self) -> None:
        """Collective: every ``grad`` becomes its mean over all workers.

        For gradients that are set without a backward pass, as from ``torch.autograd.grad`` or ``torch.func.grad``.
        """
        self._bound().average_gradients()

    def _bound(self) -> CustomLoop:
        if self._loop is None:
            raise UnisonoError("nothing is bound: call world.bind(model, optimizer) first")
        return self._loop

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
        if self._loop is None or self._loop.planned:
            raise UnisonoError("call world.register_state between world.bind and world.steps")
        assert self._loop.state.extra is not None
        self._loop.state.extra.add(name, stateful)

    def save(self, directory: str | os.PathLike[str], *, keep: int = 2) -> Path | None:
        """Collective, between two steps: write a checkpoint of model, optimizer, synchronizer, registered state and
        number of steps, which `load` reads. Replicas with local steps synchronize first.

        Args:
            directory: of the checkpoints; may be that of a run of `unisono train`.
            keep: the number of newest checkpoints that are not deleted.

        Returns:
            The directory of the checkpoint, once it is on disk. None if it could not be written, for which a warning is
            logged, or if a worker was lost.

        Raises:
            CheckpointError: `directory` cannot be used.
        """
        loop = self._bound()
        check_whole("keep", keep, 1)
        return loop.views.unless_lost(partial(loop.save, Path(directory), keep))

    def load(self, directory: str | os.PathLike[str]) -> int:
        """Collective, after `bind` and `register_state` and before the first step: load the newest undamaged checkpoint
        in `directory`, on any number of workers. `steps` then begins with the step after it.

        Hyperparameters of the optimizer's groups, and which of its parameters are frozen, are part of the state. A
        worker that joins later reads nothing and returns 0: it receives the state of the others when its loop begins.

        Returns:
            The steps that the checkpoint holds; 0, and nothing has changed, if there is none.

        Raises:
            InvalidInput: the checkpoint is of another model, optimizer or compressor, or other state was registered.
            CheckpointDamaged: all checkpoints are damaged.
        """
        if self._loop is None or self._loop.begun:
            raise UnisonoError("call world.load between world.bind and the first step")
        return self._loop.checkpoints.load(Path(directory))

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
        """Collective: the training data; for each step, this worker's micro-batches.

            for batches in world.steps(dataset, global_batch=64):
                optimizer.zero_grad()
                for x, y in batches:
                    loss_of(model(x), y).backward()      # the mean over the micro-batch
                optimizer.step()

        Samples, their order, micro-batches and random streams depend on `seed` and the step alone. The step is that of
        the mean over the global batch, whichever worker computes what. ``batches.step`` is its number, from 0. It
        repeats if the step was not taken; with local steps, the whole round repeats after the loss of a worker.

        Args:
            global_batch, micro_batch, seed, load: as in `Config`; text is read in the notation. `global_batch` is 64
                by default.
            steps: optimizer steps in all; excludes `epochs`.
            epochs: passes over `dataset`, also a fraction, rounded down to whole steps; 1 by default. Worker 0 logs a
                warning if samples are left out.
            collate: makes a batch of a list of samples. Default: torch's.

        Raises:
            InvalidInput: an argument is not one that `Config` takes, or batch sizes do not fit.
            TaskMismatch: other workers have another script, model, optimizer or dataset, or other arguments here.
            Left: this worker was asked to leave, and the others continue.
        """
        if self._loop is None:
            raise UnisonoError("world.steps needs the model: call world.bind(model, optimizer) first")
        asked = checked(
            global_batch=global_batch, micro_batch=micro_batch, steps=steps, epochs=epochs, seed=seed, load=load
        )
        _check_collate(collate)
        dataset = build_dataset(dataset)
        plan, count = _plan(len(dataset), asked, warns=self.rank == 0)
        self._loop.checkpoints.set_plan(plan)
        make = partial(Loader, dataset, plan, collate=collate, load=asked["load"], seed=plan.seed)
        self._group.admit(partial(_traits, dataset, plan, count, self._loop.state))
        return all_steps(self._loop, self._watch, plan, make, count)

    def synchronize(self) -> None:
        """Collective, between two steps: makes weights and optimizer state equal on all workers.

        Under ``AllReduce()`` they always are; `steps` does it at its end. After the loss of a worker this does nothing
        until the next step is asked for.
        """
        if self._loop is not None:
            self._loop.views.unless_lost(self._loop.synchronize)

    def mean(self, value: float, weight: float = 1.0) -> float:
        """The weighted mean of everybody's `value`, the same bits on all workers; NaN if all weights are 0.

        All workers call it alike. NaN also where a worker was lost, until the next step.

        Raises:
            UnisonoError: each worker takes as many steps as it can, so that calls do not pair.
        """
        if self._loop is not None and self._loop.leases_steps:
            raise UnisonoError("world.mean came in a loop in which each worker takes as many steps as it can, so that "
                               "calls of workers do not pair: call it after the loop")  # fmt: skip
        mine = torch.tensor([value * weight, weight], dtype=torch.float64)

        def gather() -> Tensor:
            return self._group.metrics.gather(mine).wait()

        sums = self._loop.views.unless_lost(gather) if self._loop is not None else gather()
        if sums is None:
            return math.nan
        total = math.fsum(sums[:, 1].tolist())
        return math.fsum(sums[:, 0].tolist()) / total if total else math.nan

    def close(self) -> None:
        """Leave; gives back what the operating system lent."""
        self._close(sys.exc_info()[0])

    def _close(self, failure: type[BaseException] | None) -> None:
        if self._loop is not None:
            self._loop.release()
        lost = self._loop is not None and self._loop.views.lost
        self._group.close(finished=failure is None and not lost)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(kind)


def synchronizer_state(world: World) -> dict[str, Tensor]:
    """Collective, between two steps: synchronize, and what a checkpoint needs besides models and optimizers.

    The same on all workers; empty under ``AllReduce()``.
    """
    loop = world._bound()
    loop.synchronize()
    return loop.models.state_dict() if loop.models.bound else dict(loop.state.progress.shared)


def load_synchronizer_state(world: World, state: Mapping[str, Tensor]) -> None:
    """Between `World.bind` and the first step: continue from the `synchronizer_state` of an equal synchronizer.

    Models and optimizers have been loaded by then, on all workers alike.
    """
    loop = world._bound()
    if loop.begun:
        raise UnisonoError("the synchronizer's state was loaded after the first step: load it before")
    loop.state.progress = replace(loop.state.progress, shared=dict(state))


def _plan(samples: int, asked: Mapping[str, Any], *, warns: bool) -> tuple[MicroBatchPlan, int]:
    """The plan of micro-batches, and the number of steps."""
    size = asked["global_batch"] or LIBRARY_GLOBAL_BATCH
    plan, epochs = MicroBatchPlan(samples, size, asked["micro_batch"], asked["seed"]), asked["epochs"] or 1.0
    if not asked["steps"] and warns and (words := plan.left_out(epochs)):
        LOG.warning(words)
    return plan, asked["steps"] or plan.steps_in(epochs)


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


def _check_collate(collate: Any) -> None:
    if collate is not None and not callable(collate):
        raise InvalidInput("collate", type(collate).__name__, "cannot be called", "pass a function of a list of "
                           "samples that returns a batch")  # fmt: skip


def _check_kinds(things: Sequence[Any]) -> None:
    """Raise `InvalidInput` unless `world.bind` was given models and optimizers."""
    if not things:
        raise InvalidInput("bind", "nothing", "there is nothing to train", "write world.bind(model, optimizer)")
    for thing in things:
        if not isinstance(thing, nn.Module | Optimizer):
            also = ', and world.register_state("scheduler", scheduler)' if isinstance(thing, LRScheduler) else ""
            raise InvalidInput(
                "bind", type(thing).__name__, "neither a torch.nn.Module nor a torch.optim.Optimizer",
                f"write world.bind(model, optimizer){also}")  # fmt: skip
