"""One worker of a run: from what it was ordered to do to what it returns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import resource
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.assemble import Feed, bind, build
from unisono.badstep import Judge
from unisono.checkpoint import (
    Event,
    Loaded,
    Opened,
    Writer,
    fingerprint,
    fingerprint_of,
    load_newest,
    newest,
    open_newest,
    verified,
)
from unisono.comm import Communicator, Meeting
from unisono.config import Config
from unisono.directory import claimed
from unisono.errors import CheckpointDamaged, CheckpointMismatch, InvalidInput
from unisono.launch import Worker
from unisono.layout import AXES, SIDE_BY_SIDE, Places, Whole
from unisono.notation import show
from unisono.observe import Nothing, Recorder, RunRecorder, Telling, write_config
from unisono.order import Order, Result
from unisono.persist import Persistence, broadcast_text, history
from unisono.settings import check_same_run, settle
from unisono.task import Task
from unisono.trainer import Outcome, Trainer
from unisono.wires import Wires
from unisono.world import choose_device, fair_threads

log = logging.getLogger("unisono")
Found = Loaded | Opened
Read = Callable[[Path, Callable[[CheckpointDamaged], None]], Found | None]


def work(worker: Worker, order: Order) -> dict[str, Any]:
    """Train as one of ``worker.identity.size`` workers; returns the fields of a `Result`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    who = worker.identity
    task = order.source.load()
    config = settle(task, order.settings)
    with contextlib.ExitStack() as stack:
        device = choose_device(config.device, who)
        meeting = Meeting(who.rank, who.size, who.rendezvous, who.local_size, config.communicator, device,
                          config.deadline_seconds)  # fmt: skip
        comm = meeting.among(range(who.size))
        stack.callback(comm.close)
        # Hosts without the run's directory cannot know what an earlier life was given: worker 0 says it.
        config = Config.of(json.loads(broadcast_text(comm, json.dumps(config.mapping()))))
        torch.set_num_threads(config.threads or fair_threads(who))
        feed = Feed(task, config, who.rank, who.size, stack)
        place = _place(comm, config, order, stack)
        wires = _wires(meeting, comm, feed.places, who.rank)
        stack.callback(wires.close)
        trainer, first_step = _set_up(worker, order, task, config, feed, device, wires, place, stack)
        worker.stop.listen()
        startup = time.time() - order.began
        outcome = trainer.run(first_step)
        return dataclasses.asdict(_result(order, trainer, wires, outcome, first_step, startup, place.path))


def _set_up(
    worker: Worker,
    order: Order,
    task: Task,
    config: Config,
    feed: Feed,
    device: torch.device,
    wires: Wires,
    place: _Place,
    stack: contextlib.ExitStack,
) -> tuple[Trainer, int]:
    """Build everything and bind it; returns the trainer and the steps done by earlier lives of the run."""
    comm, path = wires.everybody, place.path
    mesh, sample = (_mesh(feed.places, device), feed.sample()) if wires.spread else (None, None)
    held, optimizer = build(task, config, device, wires.lanes, mesh, sample)
    record = _recorder(worker, path)
    stack.callback(record.close)
    writer = _writer(comm, config, place, _teller(worker, record), stack, wires.spread)
    meta = {"config": config.mapping(), "samples": len(feed.dataset), "optimizer": type(optimizer).__name__}
    read: Read = partial(newest, read=verified) if wires.spread else load_newest
    persistence = Persistence(
        writer, held.local, optimizer, comm.lane("checkpoint"), config.checkpoint_every, meta,
        held.parts if wires.spread else None, wires.replicas.lane("start") if wires.spread else None,
        judge=Judge(config.bad_step), newest=partial(_sound, read, path, record))  # fmt: skip
    persistence.agree()
    loaded = _newest(read, config, path, meta, record) if config.resume and comm.rank == 0 else None
    try:
        first_step = persistence.resume(loaded)
    except CheckpointMismatch as error:
        raise InvalidInput(
            "resume", str(path), f"the checkpoint belongs to another model: {error}", "give the task and the arguments "
            "that the run was started with, or start a run of its own with another --run") from error  # fmt: skip
    _write_down(order, config, comm, path, record, first_step)
    trainer = bind(
        task, config, feed, held, optimizer, wires, persistence=persistence, record=record, device=device,
        first_step=first_step, stop_asked=lambda: worker.stop.requested)  # fmt: skip
    return trainer, first_step


def _wires(meeting: Meeting, comm: Communicator, places: Places, rank: int) -> Wires:
    """Who talks with whom under the layout; all workers call it alike."""
    if places.layout.workers == 1:
        return Wires.whole(comm)
    world = meeting.open_world()
    here = places.of(rank)
    return Wires(
        comm,
        replicas=meeting.among(places.along(rank, "replica"), "replicas"),
        inside=meeting.among(places.along(rank, *AXES), "inside"),
        lanes=meeting.among(places.along(rank, "replica", *SIDE_BY_SIDE), "lanes"),
        shards=meeting.among(places.along(rank, *SIDE_BY_SIDE), "shards"),
        speaks=here.tensor == 0,
        weighs=here.tensor == here.context == here.pipeline == 0,
        torch=world,
    )


def _mesh(places: Places, device: torch.device) -> Any:
    from unisono.layout.lay import mesh_of  # imports more of torch than others need

    return mesh_of(places, device.type)


def _result(
    order: Order, trainer: Trainer, wires: Wires, outcome: Outcome, first_step: int, startup: float, path: Path
) -> Result:
    peaks = trainer.comm.gather(torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024])).wait()
    sent = trainer.comm.gather(torch.tensor([wires.bytes_sent])).wait()
    trained = (outcome.steps - first_step) * trainer.global_batch
    seconds = sum(trainer.step_seconds) if trainer.replica.lockstep else trainer.seconds
    return Result(
        steps=outcome.steps,
        samples=outcome.steps * trainer.global_batch,
        loss=outcome.loss,
        metrics=dict(outcome.metrics),
        weights_sha256=_hash(trainer, path, outcome.steps),
        wall_seconds=time.time() - order.began,
        startup_seconds=startup,
        samples_per_second=trained / seconds if seconds else 0.0,
        bytes_sent_per_worker=int(sent.max()),
        step_seconds_median=outcome.step_seconds_median,
        peak_rss_bytes=int(peaks.max()),
        run=str(path),
        skipped_steps=len(trainer.persistence.judge.skipped),
        healed=trainer.persistence.judge.healed,
    )


def _hash(trainer: Trainer, path: Path, steps: int) -> str:
    """Of the weights; of stages that are spread over workers, as the last checkpoint has them, on worker 0."""
    if trainer.replica.held.pipeline is None:
        return fingerprint(Whole(trainer.model))
    if trainer.comm.rank == 0:
        with contextlib.suppress(CheckpointDamaged):
            opened = open_newest(path / "checkpoints", log.warning)
            if opened is not None and opened.step == steps:
                return fingerprint_of(opened)
    return ""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the run lies.

    Args:
        path: its directory on worker 0's host.
        life: a name for this life of the run, which no other has.
        writers: the workers that can write there, in order; others may be on hosts without that directory.
    """

    path: Path
    life: str
    writers: tuple[int, ...]


def _place(comm: Communicator, config: Config, order: Order, stack: contextlib.ExitStack) -> _Place:
    """Where our launcher made the run's directory, or where worker 0 makes it now."""
    life = broadcast_text(comm, secrets.token_hex(8))
    if order.path is not None:
        return _Place(order.path, life, tuple(range(comm.size)))
    mine = str(stack.enter_context(claimed(config, order.source))) if comm.rank == 0 else ""
    with contextlib.suppress(OSError):  # then worker 0 writes alone
        if comm.rank == 0:
            Path(mine, f".{life}").touch(mode=0o600)
    path = Path(broadcast_text(comm, mine))
    seen = comm.gather(torch.tensor([(path / f".{life}").exists() or comm.rank == 0])).wait()
    if comm.rank == 0:
        (path / f".{life}").unlink(missing_ok=True)
    return _Place(path, life, tuple(rank for rank, sees in enumerate(seen.view(-1).tolist()) if sees))


def _writer(
    comm: Communicator,
    config: Config,
    place: _Place,
    tell: Callable[[Event], None],
    stack: contextlib.ExitStack,
    spread: bool,
) -> Writer | None:
    """This worker's hand in the checkpoints, if it can reach them."""
    if spread and len(place.writers) < comm.size:
        raise InvalidInput(
            "layout", show(config.layout), f"every worker writes its own part of a checkpoint, and {place.path} is not "
            f"the same directory on all {comm.size}", "give --run a directory that all hosts share")  # fmt: skip
    if comm.rank not in place.writers:
        return None
    rank, size = place.writers.index(comm.rank), len(place.writers)
    writer = Writer(place.path / "checkpoints", rank, size, config.keep, tell, attempt=place.life)
    stack.callback(writer.close)
    return writer


def _recorder(worker: Worker, path: Path) -> Recorder:
    """Worker 0 records; the others have nothing to add that it does not know."""
    if worker.identity.rank != 0:
        return Nothing()
    return Telling(RunRecorder(path), worker.report)


def _write_down(
    order: Order, config: Config, comm: Communicator, path: Path, record: Recorder, first_step: int
) -> None:
    """The configuration, once it is sure that the run begins."""
    if comm.rank == 0:
        try:
            write_config(path, config.mapping(), order.source.absolute(), order.source.arguments)
        except OSError as error:
            record.event("config failed", words=f"config.toml stays as it was: {error.strerror}")
        record.event("start", workers=comm.size, first_step=first_step, config=config.mapping())


def _teller(worker: Worker, record: Recorder) -> Callable[[Event], None]:
    def tell(event: Event) -> None:
        log.info(event.words)
        if event.kind == "failed":
            record.event("checkpoint failed", step=event.step, worker=worker.identity.rank, words=event.words)
        else:
            record.event("checkpoint", step=event.step)

    return tell


def _damaged(record: Recorder, error: CheckpointDamaged) -> None:
    log.warning(error)
    record.event("checkpoint damaged", words=f"damaged checkpoint passed over: {error}")


def _sound(read: Read, path: Path, record: Recorder) -> Found | None:
    """The newest checkpoint of a run that is under way, if there is a sound one."""
    try:
        return read(path / "checkpoints", partial(_damaged, record))
    except CheckpointDamaged as error:
        _damaged(record, error)
        return None


def _newest(
    read: Read,
    config: Config,
    path: Path,
    meta: Mapping[str, Any],
    record: Recorder,
) -> Found | None:
    """The newest sound checkpoint of the run, if it belongs to it. What is damaged is named and passed over.

    `meta` is what this life of the run would write into its own.
    """

    try:
        loaded = read(path / "checkpoints", partial(_damaged, record))
    except CheckpointDamaged as error:
        raise InvalidInput("resume", str(path), str(error), "start a run of its own with another --run") from error
    if loaded is None:
        record.event("resume", words="there is no checkpoint yet: starting from the beginning")
        return None
    before = history(loaded)
    if not before:
        record.event("resume", step=loaded.step, words="starting from the weights that the checkpoint is made of")
        return loaded
    check_same_run(config, before["config"])
    reasons = {"samples": "whose order differs", "optimizer": "whose state is another"}
    for name, reason in reasons.items():
        if before[name] != meta[name]:
            raise InvalidInput(
                name, meta[name], f"the run to resume was started with {before[name]}, {reason}",
                "give the task as it was, or start a run of its own with another --run")  # fmt: skip
    record.event("resume", step=loaded.step, words=f"going on from the checkpoint of step {loaded.step}")
    return loaded
