"""One worker of a run: from its spec, through its views, to its result."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import resource
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.bad_steps import AnomalyDetector
from unisono.checkpoint import (
    Event,
    OpenedCheckpoint,
    Writer,
    fingerprint,
    fingerprint_of,
    newest,
    open_newest,
    verified,
)
from unisono.comm import Communicator, SingleWorker
from unisono.comm.process_groups import ProcessGroups
from unisono.comm.text import broadcast_text
from unisono.config import Config
from unisono.elastic.admission import admit, compare
from unisono.elastic.session import ElasticSession, RendezvousPoint, Session, StaticSession
from unisono.elastic.sharded_recovery import ShardedRecovery
from unisono.elastic.sharded_state import ShardedModel
from unisono.elastic.snapshot import Snapshot
from unisono.elastic.state_transfer import Parts, Progress, describe, digest_of, take_over
from unisono.elastic.trait_check import Traits
from unisono.errors import CheckpointDamaged, CheckpointMismatch, CommunicationError, Diverged, InvalidInput, RunFailed
from unisono.launch import WorkerContext, claim_identity
from unisono.launch.lock import Holder, hold_lock
from unisono.layout import AXES, DATA_AXES, LocalModel, RankMesh, WholeTensors
from unisono.membership import View
from unisono.notation import show
from unisono.observe import NullRecorder, ProgressReporter, Recorder, RunRecorder, ThreadTracker, in_words, write_config
from unisono.observe.activity import Phase
from unisono.observe.record_files import SUMMARY
from unisono.observe.user_frames import exit_in_words
from unisono.run.directory import CHECKPOINTS, claimed, resumable
from unisono.run.resolve import check_same_run, settle
from unisono.run.spec import Result, RunSpec
from unisono.system.process import age_seconds
from unisono.tasks.task import Task, with_data
from unisono.trainer.build import DataFeed, bind, build
from unisono.trainer.checkpointing import Checkpointer, history
from unisono.trainer.device import choose_device, fair_threads
from unisono.trainer.loop import Outcome, Trainer
from unisono.trainer.loop_checkpoint import same_directory
from unisono.trainer.traits import of_config, of_data, of_model, of_optimizer, of_task

log = logging.getLogger("unisono")


def work(worker: WorkerContext, order: RunSpec) -> dict[str, Any] | None:
    """Train as one of the workers of a run; returns the fields of a `Result`, or None from a worker that left before
    the end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    claim_identity()
    with _no_exit(worker.identity.rank):
        return _work(worker, order)


def _work(worker: WorkerContext, order: RunSpec) -> dict[str, Any] | None:
    task = with_data(order.source.load())
    config = settle(task, order.settings)
    if config.remove_slower_than and not order.contact and worker.identity.size > 1:
        raise InvalidInput(
            "remove_slower_than",
            config.remove_slower_than,
            "workers of this run cannot leave it",
            "leave it out; or start the run by unisono train, with AllReduce(), without sync_batchnorm",
        )
    watch = ThreadTracker(age_seconds=age_seconds())
    life = WorkerRun(worker, order, task, config, choose_device(config.device, worker.identity.local_rank), watch)
    if order.contact and config.recovers_from_loss and config.layout.workers == 1:
        life.build()
    if order.contact:
        admit(order.contact, worker, life.traits(), lambda: worker.stop.requested or worker.stop.leaving)
    how = (config.communicator, config.timeout_seconds)
    views = ElasticSession(worker, *how, order.contact, watch) if order.contact else StaticSession(worker, *how, watch)
    with life.lock, views:
        result = life.go_through(views)
        return dataclasses.asdict(result) if result else None


@dataclasses.dataclass
class WorkerRun:
    """What a worker keeps from view to view: model, optimizer and their progress.

    Attributes:
        reached: None before this worker has met others.
        make_writer: of checkpoints.
        keeper: where replicas lie on several workers, of what this one has of the state; the model is built anew in
            every view.
        milestone: where replicas that walk by themselves have last met, if workers may come and go.
        lock: holds this worker's share of the lock on the run's directory.
        startup_seconds: from the command to the first step.
        trained: steps that were taken here; `step_seconds` each.
    """

    worker: WorkerContext
    order: RunSpec
    task: Task
    config: Config
    device: torch.device
    watch: ThreadTracker
    built: tuple[LocalModel, Optimizer] | None = None
    make_writer: Callable[..., Writer] = Writer
    judge: AnomalyDetector | None = None
    reached: Progress | None = None
    keeper: ShardedRecovery = dataclasses.field(default_factory=ShardedRecovery)
    milestone: Snapshot | None = None
    lock: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    locked: bool = False
    startup_seconds: float | None = None
    trained: int = 0
    step_seconds: list[float] = dataclasses.field(default_factory=list)

    def traits(self) -> Traits:
        """What all workers must have in common, as far as it is known before the first view."""
        found = {**of_task(self.task), **of_config(self.config), **of_data(self.task.data)}
        if self.built is None:
            return found
        held, optimizer = self.built
        return {**found, **of_model(held.model), **of_optimizer(optimizer)}

    def build(self) -> None:
        """Build model and optimizer before the first view of an elastic run, so that its members do not wait for it."""
        torch.set_num_threads(self.config.threads or fair_threads(self.worker.identity.local_size))
        self.built = build(self.task, self.config, self.device, SingleWorker(self.device))

    def go_through(self, views: Session) -> Result | None:
        """Train from view to view; None if the others continue without this worker."""
        while views.next():
            try:
                result = self.live(views)
            except CommunicationError as error:
                self.watch.discard()
                self.watch.set_phase(Phase.RECOVERY)
                self.roll_back()
                views.broken(error, self.digest())
                continue
            if result is not None:
                views.finish()
                return result
            self.watch.set_phase(Phase.RECOVERY)
            views.ended(self.digest())
        return None

    @contextlib.contextmanager
    def _late(self) -> Iterator[None]:
        """Add the number of completed steps to errors; input found invalid after the first step raises `RunFailed`."""
        try:
            yield
        except (CommunicationError, Diverged):  # which name the step, where it matters
            raise
        except (Exception, SystemExit) as error:
            if not self.step_seconds or self.reached is None:
                raise
            done = f"after {self.reached.steps:,} step{'s' * (self.reached.steps != 1)}"
            if isinstance(error, InvalidInput):
                raise RunFailed(f"worker {self.worker.identity.rank} {done}: {error}") from error
            error.add_note(done)
            raise

    def live(self, views: Session) -> Result | None:
        """Train in the current view; None if it ended at a step boundary.

        Raises:
            CommunicationError: it ended within a step; the model is in the state after the last completed step.
        """
        with contextlib.ExitStack() as stack:
            meeting, size = views.meeting(self.device), len(views.view.members)
            comm = meeting.connect(range(size))
            stack.callback(comm.close)
            if not views.changing:  # in an elastic run, a worker that differs was refused at admission
                compare(comm, self.traits)
            # Hosts without the run's directory cannot know the settings of an earlier attempt: worker 0 sends them.
            self.config = Config.of(json.loads(broadcast_text(comm, json.dumps(self.config.mapping()))))
            torch.set_num_threads(self.config.threads or fair_threads(self.worker.identity.local_size))
            feed = DataFeed(self.task, self.config, comm.rank, size, stack, partial(_notice, self.worker))
            place = _place(comm, self.config, self.order, stack, self._share)
            if self.order.path is None:  # no launcher of ours has the path, and could say how to resume
                stack.enter_context(resumable(place.path))
            stack.enter_context(self._late())
            keeps = bool(self.order.contact) and self.config.memory_checkpoints
            wires = _wires(meeting, comm, feed.places, comm.rank, stack, keeps)
            stack.callback(wires.close)
            if wires.torch:
                stack.enter_context(wires.torch.translate_errors())
                stack.callback(self._put_down)
            trainer, first_step = self._set_up(views, feed, wires, place, stack)
            self.worker.stop.listen()
            if self.startup_seconds is None:
                self.startup_seconds = time.time() - self.order.began
            outcome = self._train(trainer, first_step)
            return None if trainer.view_ending else self._result(trainer, wires, outcome, place.path)

    def roll_back(self) -> None:
        """Undo the local steps since the last synchronization."""
        if self.milestone and self.built:
            held, optimizer = self.built
            self.reached = self.milestone.restore(held.local, optimizer)

    def digest(self) -> str:
        """Digest of the replicated state. Empty before the first step, and for sharded replicas, whose shards are
        matched by `StateVersion` instead."""
        if self.reached is None or self.built is None:
            return ""
        held, optimizer = self.built
        return digest_of(*describe(held.local, optimizer, self.reached), walks=self.config.takes_local_steps)

    def _set_up(
        self, views: Session, feed: DataFeed, wires: ProcessGroups, place: _RunLocation, stack: contextlib.ExitStack
    ) -> tuple[Trainer, int]:
        """Build and bind everything; returns the trainer and the number of steps in the state."""
        comm, config, path = wires.world, self.config, place.path
        mesh, sample = (_mesh(feed.places, self.device), feed.sample()) if wires.is_sharded else (None, None)
        self.built = self.built or build(self.task, config, self.device, wires.batch, mesh, sample, wires.model)
        held, optimizer = self.built
        parts = Parts(held.parts, held.stepped)
        record = _recorder(self.worker, comm, path, config.record_seconds)
        stack.callback(record.close)
        tell = _teller(self.worker, comm, record)
        make = partial(self.make_writer, keep=config.keep_checkpoints, on_event=tell, attempt=place.life)
        writer = _writer(make, comm, config, place, stack, wires.is_sharded)
        meta = {"config": config.mapping(), "samples": len(feed.dataset), "optimizer": type(optimizer).__name__}
        judge = self.judge = self.judge or AnomalyDetector(config.bad_step)
        persistence = Checkpointer(
            writer, held.local, optimizer, comm.channel("checkpoint"), config.checkpoint_every, meta,
            parts if wires.is_sharded else None, wires.dp_replicate.channel("start") if wires.is_sharded else None,
            judge=judge, newest=partial(_sound, path, record))  # fmt: skip
        view = views.view
        laid, hosts = ShardedModel(held.local, parts, optimizer), [place.host for place in view.places]
        taken = None
        if view.start.view and wires.is_sharded:
            taken = self.keeper.assemble(comm, laid, judge, hosts)
        elif view.start.view:
            taken = self._take_over(view, comm, held.local, optimizer, judge)
        if taken is not None:
            reached = taken
            persistence.set_progress(reached)
        else:
            again = config.resume or view.number > 1
            found = _newest(config, path, meta, record) if again and comm.rank == 0 else None
            reached = Progress(_begin(persistence, found, path), persistence.committed, persistence.shared)
        if views.changing and config.takes_local_steps:
            self.milestone = self.milestone or Snapshot()
            self.milestone.take(held.local, optimizer, reached)
        self.reached, first_step = reached, reached.steps
        if wires.is_sharded:
            copies = self.keeper.begin(
                view.number, first_step, laid, judge, comm.channel("keeping"), wires.peer_copies, hosts,
                feed.places.of(comm.rank).replica if self.milestone else None)  # fmt: skip
            stack.callback(copies.close if copies else lambda: None)
        # The coordinator's count of steps does not decrease when training rolls back.
        views.met(view.start.step if view.start.view else first_step, view.start.digest)
        _write_down(self.order, config, comm, path, record, self.reached, view)
        if feed.left_out and not view.start.view:
            record.event("samples left out", words=feed.left_out)
        trainer = bind(
            self.task, config, feed, held, optimizer, wires, persistence=persistence, record=record,
            device=self.device, first_step=first_step, presence=views, watch=self.watch,
            milestone=self.milestone)  # fmt: skip
        trainer.last_loss = self.reached.loss
        if wires.is_sharded:
            trainer.on_commit = lambda parting: self.keeper.after_step(self._now(trainer), parting=parting)
        return trainer, first_step

    def _share(self, path: Path, holder: Holder) -> None:
        """Share the lock of the directory `path` with all processes of the command `holder`, from now on."""
        if not self.locked:
            with contextlib.suppress(OSError):  # the directory is not writable: the checkpoint writer reports it
                self.lock.enter_context(hold_lock(path, holder))
        self.locked = True

    def _put_down(self) -> None:
        """Keep this worker's shard of the state, and drop the model, whose process groups belong to this view."""
        self.roll_back()
        if self.reached is not None:
            self.keeper.leave(self.reached)
        self.built = self.milestone = None

    def _now(self, trainer: Trainer) -> Progress:
        """The progress that is committed."""
        if self.milestone and self.milestone.reached:
            return self.milestone.reached
        shared = trainer.replica.state_dict() if trainer.replica.synchronous else {}
        return Progress(trainer.done, trainer.checkpointer.committed, shared, trainer.last_loss)

    def _take_over(
        self, view: View, comm: Communicator, model: nn.Module, optimizer: Optimizer, judge: AnomalyDetector
    ) -> Progress:
        """The state that the view starts from: this worker's own, or one received from workers that have it. With local
        steps, local state is the mean of the survivors'."""
        has = self.reached if view.members[comm.rank] in view.sources else None
        words = [judge.state(), has.loss] if has else None
        taken = take_over(view, comm, model, optimizer, has, words, walks=self.config.takes_local_steps)
        judged, loss = taken.words
        if not has:
            judge.replace(judged)
        return dataclasses.replace(taken.reached, loss=loss)

    def _train(self, trainer: Trainer, first_step: int) -> Outcome:
        try:
            return trainer.run(first_step)
        finally:
            now = self._now(trainer)
            trainer.unbind()
            self.reached = now
            self.trained += trainer.done - first_step
            self.step_seconds += trainer.step_seconds

    def _result(self, trainer: Trainer, wires: ProcessGroups, outcome: Outcome, path: Path) -> Result:
        peaks = trainer.comm.gather(torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024])).wait()
        sent = trainer.comm.gather(torch.tensor([wires.bytes_sent])).wait()
        mine = torch.tensor(list(self.watch.ledger.seconds().values()), dtype=torch.float64)
        spent = trainer.comm.gather(mine).wait()
        seconds = sum(self.step_seconds) if trainer.replica.synchronous or self.milestone else trainer.seconds
        return Result(
            steps=outcome.steps,
            samples=outcome.steps * trainer.global_batch,
            loss=outcome.loss,
            metrics=dict(outcome.metrics),
            weights_sha256=_hash(trainer, path, outcome.steps),
            wall_seconds=time.time() - self.order.began,
            startup_seconds=self.startup_seconds or 0.0,
            samples_per_second=self.trained * trainer.global_batch / seconds if seconds else 0.0,
            bytes_sent_per_worker=int(sent.max()),
            step_seconds_median=statistics.median(self.step_seconds or [0.0]),
            peak_rss_bytes=int(peaks.max()),
            run=str(path),
            complete=outcome.steps >= trainer.steps,
            ending=_ending(outcome.steps, trainer.steps),
            skipped_steps=len(trainer.checkpointer.judge.skipped),
            healed=trainer.checkpointer.judge.healed,
            ledger=[in_words(dict(zip(Phase, row))) for row in spent.tolist()],
        )


@contextlib.contextmanager
def _no_exit(rank: int) -> Iterator[None]:
    """Make `sys.exit` in user code a failure of this worker, whatever its argument: the other workers need it."""
    try:
        yield
    except SystemExit as leave:
        when = " ".join(getattr(leave, "__notes__", ["before its first step"]))
        raise RunFailed(f"worker {rank}: {exit_in_words(leave)} {when}") from leave


def _ending(done: int, steps: int) -> str:
    return f"all {done:,} steps are done" if done >= steps else f"stopped on request after {done:,} of {steps:,} steps"


def _begin(persistence: Checkpointer, found: OpenedCheckpoint | None, path: Path) -> int:
    """Collective: load the state that worker 0 has `found` on disk, or agree on first weights; returns its steps."""
    persistence.broadcast_initial_weights()
    try:
        return persistence.resume(found)
    except CheckpointMismatch as error:
        raise InvalidInput(
            "resume", str(path), f"the checkpoint belongs to another model: {error}", "give the task and the arguments "
            "that the run was started with, or start a run of its own with another --run-dir") from error  # fmt: skip


def _wires(
    meeting: RendezvousPoint, comm: Communicator, places: RankMesh, rank: int, stack: contextlib.ExitStack, keeps: bool
) -> ProcessGroups:
    """Collective: the process groups of the layout. `keeps`: with one for memory checkpoints."""
    if places.layout.workers == 1:
        return ProcessGroups.replicated(comm)
    world = meeting.open_world()
    stack.callback(world.close)
    here = places.of(rank)
    return ProcessGroups(
        comm,
        dp_replicate=meeting.connect(places.along(rank, "replica"), "dp_replicate"),
        model=meeting.connect(places.along(rank, *AXES), "model"),
        batch=meeting.connect(places.along(rank, "replica", *DATA_AXES), "batch"),
        dp_shard=meeting.connect(places.along(rank, *DATA_AXES), "dp_shard"),
        reports_loss=here.tensor == 0,
        reports_weight=here.tensor == here.context == here.pipeline == 0,
        torch=world,
        peer_copies=meeting.connect(range(places.workers), "peer_copies") if keeps else None,
    )


def _mesh(places: RankMesh, device: torch.device) -> Any:
    from unisono.layout.parallelize import device_mesh  # imports more of torch than others need

    return device_mesh(places, device.type)


def _hash(trainer: Trainer, path: Path, steps: int) -> str:
    """Digest of the weights; of sharded replicas, of those in the last checkpoint, on worker 0."""
    if trainer.replica.held.pipeline is None:
        return fingerprint(WholeTensors(trainer.model))
    if trainer.comm.rank == 0:
        with contextlib.suppress(CheckpointDamaged):
            opened = open_newest(path / CHECKPOINTS, log.warning)
            if opened is not None and opened.step == steps:
                return fingerprint_of(opened)
    return ""


@dataclasses.dataclass(frozen=True)
class _RunLocation:
    """Where the files of the run are.

    Args:
        path: its directory on worker 0's host.
        life: a name for this life of the run, which no other has.
        writers: the workers that can write there, in order; others may be on hosts without that directory.
    """

    path: Path
    life: str
    writers: tuple[int, ...]


def _place(
    comm: Communicator,
    config: Config,
    order: RunSpec,
    stack: contextlib.ExitStack,
    share: Callable[[Path, Holder], None],
) -> _RunLocation:
    """The run's directory, which the launcher has made or worker 0 makes now.

    Args:
        share: takes this worker's share of the lock on the directory; called where the worker can write there.
    """
    life = broadcast_text(comm, secrets.token_hex(8))
    if order.path is not None and order.contact is None:
        if order.holder:
            share(order.path, order.holder)
        return _RunLocation(order.path, life, tuple(range(comm.size)))
    if comm.rank == 0 and order.path is None:
        holder = Holder.current()
        order = dataclasses.replace(
            order, path=stack.enter_context(claimed(config, order.source, holder)), holder=holder
        )
    path, writers = same_directory(comm, str(order.path) if comm.rank == 0 else "", life)
    told = json.loads(broadcast_text(comm, json.dumps(order.holder and dataclasses.asdict(order.holder))))
    if comm.rank in writers and told:
        share(path, Holder(**told))
    return _RunLocation(path, life, writers)


def _writer(
    make: Callable[..., Writer],
    comm: Communicator,
    config: Config,
    place: _RunLocation,
    stack: contextlib.ExitStack,
    spread: bool,
) -> Writer | None:
    """This worker's checkpoint writer, if it can reach the directory."""
    if spread and len(place.writers) < comm.size:
        raise InvalidInput(
            "layout", show(config.layout), f"every worker writes its own part of a checkpoint, and {place.path} is not "
            f"the same directory on all {comm.size}", "give --run-dir a directory that all hosts share")  # fmt: skip
    if comm.rank not in place.writers:
        return None
    rank, size = place.writers.index(comm.rank), len(place.writers)
    writer = make(place.path / CHECKPOINTS, rank, size)
    stack.callback(writer.close)
    return writer


def _recorder(worker: WorkerContext, comm: Communicator, path: Path, step_seconds: float) -> Recorder:
    """The recorder of worker 0; one that records nothing on the others, since worker 0 knows all that they do."""
    if comm.rank != 0:
        return NullRecorder()
    return ProgressReporter(RunRecorder(path, step_seconds=step_seconds), worker.report)


def _write_down(
    order: RunSpec, config: Config, comm: Communicator, path: Path, record: Recorder, reached: Progress, view: View
) -> None:
    """The configuration, once it is sure that the run begins; later, who goes on from where, and the loss of the last
    step before, which may have died with whoever was to record it."""
    if view.start.view:
        who = f"workers {', '.join(view.members)} go" if comm.size > 1 else f"worker {view.members[0]} goes"
        record.event("view", number=view.number, members=list(view.members), step=reached.steps, loss=reached.loss,
                      words=f"{who} on from step {reached.steps}")  # fmt: skip
    elif comm.rank == 0:
        with contextlib.suppress(OSError):
            (path / SUMMARY).unlink()  # of an earlier life of the run: that of this one comes at its end
        try:
            write_config(path, config.mapping(), order.source.absolute(), order.source.arguments)
        except OSError as error:
            record.event("config failed", words=f"config.toml stays as it was: {error.strerror}")
        record.event("start", workers=comm.size, first_step=reached.steps, config=config.mapping())


def _notice(worker: WorkerContext, words: str) -> None:
    """Report a sentence that concerns this worker alone."""
    log.warning(words)
    worker.report({"kind": "notice", "text": f"worker {worker.name or worker.identity.rank}: {words}"})


def _teller(worker: WorkerContext, comm: Communicator, record: Recorder) -> Callable[[Event], None]:
    def tell(event: Event) -> None:
        log.info(event.words)
        if event.kind == "failed":
            record.event("checkpoint failed", step=event.step, worker=comm.rank, words=event.words)
            if comm.rank:  # whose record is none
                worker.report({"kind": "notice", "text": f"worker {comm.rank}: {event.words}"})
        else:
            record.event("checkpoint", step=event.step)

    return tell


def _damaged(record: Recorder, error: CheckpointDamaged) -> None:
    log.warning(error)
    record.event("checkpoint damaged", words=f"damaged checkpoint passed over: {error}")


def _sound(path: Path, record: Recorder) -> OpenedCheckpoint | None:
    """The newest sound checkpoint of this run, if there is one."""
    try:
        return newest(path / CHECKPOINTS, partial(_damaged, record), verified)
    except CheckpointDamaged as error:
        _damaged(record, error)
        return None


def _newest(
    config: Config,
    path: Path,
    meta: Mapping[str, Any],
    record: Recorder,
) -> OpenedCheckpoint | None:
    """The newest sound checkpoint of the run, if it belongs to it. Damaged ones are reported and skipped.

    `meta` is what this life of the run would write into its own.
    """

    try:
        found = newest(path / CHECKPOINTS, partial(_damaged, record), verified)
    except CheckpointDamaged as error:
        raise InvalidInput("resume", str(path), str(error), "start a run of its own with another --run-dir") from error
    if found is None:
        record.event("resume", words="there is no checkpoint yet: starting from the beginning")
        return None
    before = history(found)
    if not before:
        record.event("resume", step=found.step, words="starting from the weights that the checkpoint is made of")
        return found
    check_same_run(config, before["config"])
    reasons = {"samples": "whose order differs", "optimizer": "whose state is another"}
    for name, reason in reasons.items():
        if before[name] != meta[name]:
            raise InvalidInput(
                name, meta[name], f"the run to resume was started with {before[name]}, {reason}",
                "give the task as it was, or start a run of its own with another --run-dir")  # fmt: skip
    record.event("resume", step=found.step, words=f"going on from the checkpoint of step {found.step}")
    return found
