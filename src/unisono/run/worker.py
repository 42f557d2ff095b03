"""The main loop of one worker: from the run's spec, through its views, to a result."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from unisono.bad_steps import AnomalyDetector
from unisono.checkpoint import Event, Writer, fingerprint, fingerprint_of, open_newest
from unisono.comm import Communicator, SingleWorker
from unisono.comm.process_groups import ProcessGroups
from unisono.comm.text import broadcast_text
from unisono.config import Config
from unisono.elastic.admission import admit, compare
from unisono.elastic.recovery_loop import Attempt, attempts
from unisono.elastic.session import ElasticSession, Session, StaticSession, ViewRendezvous
from unisono.elastic.sharded_state_recovery import ShardedRecovery
from unisono.elastic.state_recovery import Recovery, ReplicatedRecovery
from unisono.elastic.state_transfer import Parts, Progress
from unisono.elastic.training_state import TrainingState
from unisono.elastic.trait_check import Traits
from unisono.errors import CheckpointDamaged, CommunicationError, Diverged, InvalidInput, RunFailed
from unisono.launch import WorkerContext, claim_identity
from unisono.layout import AXES, DATA_AXES, LocalModel, RankMesh, WholeTensors
from unisono.membership import View
from unisono.observe import (
    NullRecorder,
    ProgressReporter,
    Recorder,
    RunRecorder,
    ThreadTracker,
    Watchdog,
    seconds_by_name,
    write_config,
)
from unisono.observe.activity import Phase
from unisono.observe.record_files import SUMMARY
from unisono.observe.user_frames import describe_exit
from unisono.run.directory import CHECKPOINTS, resumable
from unisono.run.location import DirectoryLock, RunLocation, locate
from unisono.run.resolve import resolve_config
from unisono.run.resume import load_checkpoint, newest_sound, resumable_checkpoint
from unisono.run.spec import Result, RunSpec
from unisono.system.process import age_seconds
from unisono.tasks.task import Task, with_data
from unisono.trainer.build import build_trainer
from unisono.trainer.build_model import build_model
from unisono.trainer.checkpoint_restorer import CheckpointScope
from unisono.trainer.checkpointing import Checkpointer
from unisono.trainer.context import RunContext
from unisono.trainer.data_feed import DataFeed
from unisono.trainer.device import choose_device, fair_threads
from unisono.trainer.loop import Outcome, Trainer
from unisono.trainer.traits import of_config, of_data, of_model, of_optimizer, of_task

log = logging.getLogger("unisono")


def run_worker(worker: WorkerContext, spec: RunSpec) -> dict[str, Any] | None:
    """Train as one of the workers of a run.

    Returns:
        The fields of a `Result`; None if this worker left before the end.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    claim_identity()
    with _exit_is_failure(worker.identity.rank):
        return _run_worker(worker, spec)


def _run_worker(worker: WorkerContext, spec: RunSpec) -> dict[str, Any] | None:
    task = with_data(spec.source.load())
    config = resolve_config(task, spec.settings)
    if config.remove_slower_than and not spec.contact and worker.identity.size > 1:
        raise InvalidInput(
            "remove_slower_than",
            config.remove_slower_than,
            "workers of this run cannot leave it",
            "leave it out; or start the run by unisono train, with AllReduce(), without sync_batchnorm",
        )
    tracker = ThreadTracker(age_seconds=age_seconds())
    run = WorkerRun(worker, spec, task, config, choose_device(config.device, worker.identity.local_rank), tracker)
    with contextlib.ExitStack() as stack:
        stack.callback(run.lock.close)
        session: Session
        if spec.contact:
            if config.recovers_from_loss and config.layout.workers == 1:
                run.build()
            admit(spec.contact, worker, run.traits(), lambda: worker.stop.requested or worker.stop.leaving)
            session = ElasticSession(worker, config.communicator, config.timeout_seconds, spec.contact, tracker)
        else:
            stack.callback(Watchdog(tracker).close)  # no coordinator detects that this worker is stuck
            session = StaticSession.connecting(worker, config.communicator, config.timeout_seconds)
        stack.callback(session.close)
        result = run.run(session)
        return dataclasses.asdict(result) if result else None


class WorkerRun:
    """One worker of a run: its main loop, and its state and measurements over all its views.

    Args:
        make_writer: constructs a checkpoint writer.

    Attributes:
        state: the training state of the replica; a sharded model is built again in every view.
        lock: this worker's share of the lock on the run's directory.
        startup_seconds: the time from the start of the command to the first step.
        trained: the number of steps that this worker has taken.
        step_seconds: the seconds of each of these steps.
    """

    def __init__(
        self,
        worker: WorkerContext,
        spec: RunSpec,
        task: Task,
        config: Config,
        device: torch.device,
        tracker: ThreadTracker,
        make_writer: Callable[..., Writer] = Writer,
    ) -> None:
        self.worker, self.spec, self.task, self.config = worker, spec, task, config
        self.device, self.tracker, self._make_writer = device, tracker, make_writer
        self.state = TrainingState(local_steps=config.takes_local_steps)
        self.lock = DirectoryLock()
        self._recovery: Recovery | None = None
        self.startup_seconds: float | None = None
        self.trained, self.step_seconds = 0, list[float]()

    def traits(self) -> Traits:
        """What must be equal on all workers, as far as it is known before the first view."""
        traits = {**of_task(self.task), **of_config(self.config), **of_data(self.task.data)}
        if not self.state.built:
            return traits
        return {**traits, **of_model(self.state.local.model), **of_optimizer(self.state.optimizer)}

    def build(self) -> None:
        """Build model and optimizer before the first view of an elastic run, so that its members need not wait."""
        torch.set_num_threads(self.config.threads or fair_threads(self.worker.identity.local_size))
        self.state.build(*build_model(self.task, self.config, self.device, SingleWorker(self.device)))

    def run(self, session: Session) -> Result | None:
        """The main loop: train in one view after the other. Returns None if the others continue without this worker."""
        result = None
        for attempt in attempts(session, self.state, self.tracker):
            with attempt:
                result = self.run_view(session, attempt)
                if result is not None:
                    attempt.finish()
        return result

    def run_view(self, session: Session, attempt: Attempt) -> Result | None:
        """Collective: train in the current view. Returns None if the view ended between two steps.

        Raises:
            CommunicationError: the view ended within a step; the model has the state after the last completed step.
        """
        with contextlib.ExitStack() as stack:
            rendezvous, size = session.rendezvous(self.device), len(session.view.members)
            comm = rendezvous.connect(range(size))
            stack.callback(comm.close)
            if not session.elastic:  # an elastic run compares traits at admission
                compare(comm, self.traits)
            # Hosts without the run's directory do not have the settings of an earlier attempt: worker 0 sends them.
            self.config = Config.of(json.loads(broadcast_text(comm, json.dumps(self.config.mapping()))))
            torch.set_num_threads(self.config.threads or fair_threads(self.worker.identity.local_size))
            feed = DataFeed(self.task, self.config, comm.rank, size, stack, partial(_notify, self.worker))
            location = locate(comm, self.config, self.spec, self.lock, stack)
            if self.spec.path is None:  # otherwise the launcher adds this note
                stack.enter_context(resumable(location.path))
            stack.enter_context(self._note_steps())
            copies = bool(self.spec.contact) and self.config.memory_checkpoints
            groups = _process_groups(rendezvous, comm, feed.mesh, comm.rank, stack, copies)
            stack.callback(groups.close)
            if groups.torch:
                stack.enter_context(groups.torch.translate_errors())
            stack.callback(self._recovery_for(groups).release, self.state)
            trainer = self._build_view(session, attempt, feed, groups, location, stack)
            self.worker.stop.listen()
            if self.startup_seconds is None:
                self.startup_seconds = time.time() - self.spec.started_at
            outcome = self._train(trainer)
            return None if trainer.view_ending else self._result(trainer, groups, outcome, location.path)

    def _recovery_for(self, groups: ProcessGroups) -> Recovery:
        """The `Recovery` of this worker, made in its first view."""
        if self._recovery is None:
            detector = AnomalyDetector(self.config.bad_step)
            self._recovery = ShardedRecovery(detector) if groups.is_sharded else ReplicatedRecovery(detector)
        return self._recovery

    def _build_view(
        self, session: Session, attempt: Attempt, feed: DataFeed, groups: ProcessGroups, location: RunLocation,
        stack: contextlib.ExitStack,
    ) -> Trainer:  # fmt: skip
        """Collective: bring model and optimizer into the state from which the view starts, and build their trainer."""
        comm, config, state, view = groups.world, self.config, self.state, session.view
        if not state.built:
            state.build(*self._build_model(feed, groups))
        record = _recorder(self.worker, comm, location.path, config.record_seconds)
        stack.callback(record.close)
        checkpointer = self._checkpointer(feed, groups, location, record, stack)
        recovery, here = self._recovery_for(groups), feed.mesh.of(comm.rank)
        if recovery.restore(view, groups, state):
            checkpointer.set_progress(state.progress)
        else:
            reads = (config.resume or view.number > 1) and comm.rank == 0
            opened = resumable_checkpoint(config, location.path, checkpointer.scope.meta, record) if reads else None
            steps = load_checkpoint(checkpointer, opened, location.path)
            state.progress = Progress(steps, checkpointer.committed, checkpointer.restored.shared)
        if session.elastic:
            state.allow_roll_back()
        state.commit()
        recovery.begin(view, groups, state, here.replica)
        attempt.joined()
        _record_start(self.spec, config, comm, location.path, record, state.progress, view)
        if feed.left_out and not view.start.view:
            record.event("samples left out", words=feed.left_out)
        return build_trainer(
            RunContext(
                self.task, config, feed, state, groups, checkpointer, record, self.device, session, recovery,
                self.tracker))  # fmt: skip

    def _build_model(self, feed: DataFeed, groups: ProcessGroups) -> tuple[LocalModel, Optimizer]:
        mesh, sample = (_mesh(feed.mesh, self.device), feed.sample()) if groups.is_sharded else (None, None)
        return build_model(self.task, self.config, self.device, groups.batch, mesh, sample, groups.model)

    def _checkpointer(
        self, feed: DataFeed, groups: ProcessGroups, location: RunLocation, record: Recorder,
        stack: contextlib.ExitStack,
    ) -> Checkpointer:  # fmt: skip
        comm, config, state = groups.world, self.config, self.state
        report = _checkpoint_reporter(self.worker, comm, record)
        make = partial(self._make_writer, keep=config.keep_checkpoints, on_event=report, attempt=location.attempt)
        writer = location.writer(make, comm, config, stack)
        meta = {"config": config.mapping(), "samples": len(feed.dataset), "optimizer": type(state.optimizer).__name__}
        parts = Parts(state.local.parts, state.local.stepped) if groups.is_sharded else None
        scope = CheckpointScope(
            state.model, state.optimizer, comm.channel("checkpoint"), meta, self._recovery_for(groups).detector, parts
        )
        return Checkpointer(
            scope, writer, config.checkpoint_every,
            dp_replicate=groups.dp_replicate.channel("start") if groups.is_sharded else None,
            newest=partial(newest_sound, location.path, record))  # fmt: skip

    def _train(self, trainer: Trainer) -> Outcome:
        first = self.state.progress.steps
        try:
            return trainer.run()
        finally:
            progress = trainer.committed_progress()
            trainer.unbind()
            self.state.progress = progress
            self.trained += trainer.done - first
            self.step_seconds += trainer.step_seconds

    def _result(self, trainer: Trainer, groups: ProcessGroups, outcome: Outcome, path: Path) -> Result:
        peaks = trainer.comm.gather(torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024])).wait()
        sent = trainer.comm.gather(torch.tensor([groups.bytes_sent])).wait()
        own_seconds = torch.tensor(list(self.tracker.ledger.seconds().values()), dtype=torch.float64)
        ledgers = trainer.comm.gather(own_seconds).wait()
        same_steps = trainer.replica.synchronous or trainer.commits_late
        seconds = sum(self.step_seconds) if same_steps else trainer.seconds
        detector = trainer.checkpointer.detector
        return Result(
            steps=outcome.steps,
            samples=outcome.steps * trainer.global_batch,
            loss=outcome.loss,
            metrics=dict(outcome.metrics),
            weights_sha256=_weights_digest(trainer, path, outcome.steps),
            wall_seconds=time.time() - self.spec.started_at,
            startup_seconds=self.startup_seconds or 0.0,
            samples_per_second=self.trained * trainer.global_batch / seconds if seconds else 0.0,
            bytes_sent_per_worker=int(sent.max()),
            step_seconds_median=statistics.median(self.step_seconds or [0.0]),
            peak_rss_bytes=int(peaks.max()),
            run=str(path),
            complete=outcome.steps >= trainer.steps,
            ending=_ending(outcome.steps, trainer.steps),
            skipped_steps=len(detector.skipped),
            healed=detector.healed,
            ledger=[seconds_by_name(dict(zip(Phase, row))) for row in ledgers.tolist()],
        )

    @contextlib.contextmanager
    def _note_steps(self) -> Iterator[None]:
        """Note the number of completed steps in errors. Raise `RunFailed` for `InvalidInput` after the first step."""
        try:
            yield
        except (CommunicationError, Diverged):  # their messages name the step
            raise
        except (Exception, SystemExit) as error:
            if not self.step_seconds or not self.state.joined:
                raise
            steps = self.state.progress.steps
            when = f"after {steps:,} step{'s' * (steps != 1)}"
            if isinstance(error, InvalidInput):
                raise RunFailed(f"worker {self.worker.identity.rank} {when}: {error}") from error
            error.add_note(when)
            raise


@contextlib.contextmanager
def _exit_is_failure(rank: int) -> Iterator[None]:
    """Translate `sys.exit` in user code, with any argument, into `RunFailed`: the other workers need this one."""
    try:
        yield
    except SystemExit as error:
        when = " ".join(getattr(error, "__notes__", ["before its first step"]))
        raise RunFailed(f"worker {rank}: {describe_exit(error)} {when}") from error


def _ending(done: int, steps: int) -> str:
    return f"all {done:,} steps are done" if done >= steps else f"stopped on request after {done:,} of {steps:,} steps"


def _process_groups(
    rendezvous: ViewRendezvous, comm: Communicator, places: RankMesh, rank: int, stack: contextlib.ExitStack,
    copies: bool,
) -> ProcessGroups:  # fmt: skip
    """Collective: the process groups of the layout; with `copies`, also a process group for memory checkpoints."""
    if places.layout.workers == 1:
        return ProcessGroups.replicated(comm)
    world = rendezvous.open_world()
    stack.callback(world.close)
    here = places.of(rank)
    return ProcessGroups(
        comm,
        dp_replicate=rendezvous.connect(places.along(rank, "replica"), "dp_replicate"),
        model=rendezvous.connect(places.along(rank, *AXES), "model"),
        batch=rendezvous.connect(places.along(rank, "replica", *DATA_AXES), "batch"),
        dp_shard=rendezvous.connect(places.along(rank, *DATA_AXES), "dp_shard"),
        reports_loss=here.tensor == 0,
        reports_weight=here.tensor == here.context == here.pipeline == 0,
        torch=world,
        peer_copies=rendezvous.connect(range(places.workers), "peer_copies") if copies else None,
    )


def _mesh(places: RankMesh, device: torch.device) -> Any:
    from unisono.layout.parallelize import device_mesh  # imports more of torch than other runs need

    return device_mesh(places, device.type)


def _weights_digest(trainer: Trainer, path: Path, steps: int) -> str:
    """Collective: the digest of the weights. With a pipeline, rank 0 computes it from the last checkpoint; empty
    without a sound one of the last step."""
    if trainer.replica.local.pipeline is None:
        return fingerprint(WholeTensors(trainer.model))
    digest = ""
    if trainer.comm.rank == 0:
        with contextlib.suppress(CheckpointDamaged):
            opened = open_newest(path / CHECKPOINTS, log.warning)
            if opened is not None and opened.step == steps:
                digest = fingerprint_of(opened)
    return broadcast_text(trainer.comm, digest)


def _recorder(worker: WorkerContext, comm: Communicator, path: Path, step_seconds: float) -> Recorder:
    """The recorder of worker 0, which has all values to record; a `NullRecorder` on the others."""
    if comm.rank != 0:
        return NullRecorder()
    return ProgressReporter(RunRecorder(path, step_seconds=step_seconds), worker.report)


def _record_start(
    spec: RunSpec, config: Config, comm: Communicator, path: Path, record: Recorder, progress: Progress, view: View
) -> None:
    """Record the configuration in the first view of an attempt, and in later views the members, first step and loss.

    The loss is that of the step before the view, which a lost worker may not have recorded.
    """
    if view.start.view:
        who = f"workers {', '.join(view.members)} continue" if comm.size > 1 else f"worker {view.members[0]} continues"
        record.event("view", number=view.number, members=list(view.members), step=progress.steps, loss=progress.loss,
                      words=f"{who} from step {progress.steps}")  # fmt: skip
    elif comm.rank == 0:
        with contextlib.suppress(OSError):
            (path / SUMMARY).unlink()  # of an earlier attempt
        try:
            write_config(path, config.mapping(), spec.source.absolute(), spec.source.arguments)
        except OSError as error:
            record.event("config failed", words=f"config.toml was not updated: {error.strerror}")
        record.event("start", workers=comm.size, first_step=progress.steps, config=config.mapping())


def _notify(worker: WorkerContext, words: str) -> None:
    """Log and report a sentence that concerns only this worker."""
    log.warning(words)
    worker.report({"kind": "notice", "text": f"worker {worker.name or worker.identity.rank}: {words}"})


def _checkpoint_reporter(worker: WorkerContext, comm: Communicator, record: Recorder) -> Callable[[Event], None]:
    """The function that logs, records and reports events of the checkpoint writer."""

    def report(event: Event) -> None:
        log.info(event.words)
        if event.kind == "failed":
            record.event("checkpoint failed", step=event.step, worker=comm.rank, words=event.words)
            if comm.rank:  # only worker 0 records events
                worker.report({"kind": "notice", "text": f"worker {comm.rank}: {event.words}"})
        else:
            record.event("checkpoint", step=event.step)

    return report
