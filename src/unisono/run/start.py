"""A run from a task and its settings to a result: what is checked first, and who starts whom."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.config import FIELDS, RECOVERY_REQUIREMENTS, Config, expand_worker_range
from unisono.errors import InvalidInput, UnisonoError
from unisono.launch import (
    ElasticOptions,
    ForkServer,
    Interrupted,
    LaunchOptions,
    StopRequest,
    WorkerContext,
    WorkerIdentity,
    call_in_worker,
    claim_identity,
    current_identity,
    launch,
    launch_script,
    start_fork_server,
)
from unisono.launch.limit import check_worker_count
from unisono.launch.lock import Holder
from unisono.launch.stop_request import STOP
from unisono.membership import CoordinatorAddress
from unisono.membership.endpoint import CoordinatorOptions
from unisono.observe import write_summary
from unisono.observe.display import Display
from unisono.observe.record_files import SUMMARY
from unisono.run.consent import Consent
from unisono.run.directory import claimed, resumable, with_earlier
from unisono.run.elastic_run import Script, called, gathered
from unisono.run.resolve import settle
from unisono.run.spec import PickledTask, Result, RunSpec, TaskSource
from unisono.system.process import age_seconds
from unisono.tasks.task import Task

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "unisono.run.worker")
LAID = (*PRELOAD, "unisono.layout.parallelize", "unisono.plan.layout_check")  # what workers of a layout need besides
Messages = Callable[[int, Mapping[str, Any]], None]


def train(task: Task, config: Config | None = None, *, json: Path | None = None, quiet: bool = False) -> Result | None:
    """Train `task` as `config` says; returns the result when all workers are done.

    Progress, notices and the run's directory are printed to standard error, as ``unisono train`` prints them.

    Started once per worker by ``unisono launch``, torchrun, Slurm or Open MPI, this process is one of the workers;
    otherwise it starts ``config.workers`` processes of its own. Such a worker other than 0 returns None.

    Args:
        json: path of a file that receives the result as JSON.
        quiet: print nothing. Errors are raised all the same, and the run's directory keeps its records.

    Raises:
        InvalidInput: what is asked for cannot work.
        WorkerFailed: a worker ended badly; carries its traceback.
        Diverged: the loss is not finite.
        Interrupted: the run was asked to stop before all steps were done. Its last step is in a checkpoint if
            ``results`` has what the workers returned.
    """
    config = config or Config()
    settings = {name: value for name, value in config.mapping().items() if name in config.given}
    source = PickledTask.of(task)
    if quiet or current_identity().rank > 0:  # under another launcher, worker 0 prints for all
        return start(source, settings, json=json, on_message=lambda rank, message: None)
    with Display(task.name, sys.stderr) as display:
        return start(source, settings, json=json, on_message=display.handle)


def start(
    source: TaskSource, settings: Mapping[str, Any], *, json: Path | None, on_message: Messages,
    calling: CoordinatorOptions | None = None, debug: int | None = None,
) -> Result | None:  # fmt: skip
    """Run the task of `source` under `settings` (Config fields that the user gave).

    Returns the result; None in a worker other than 0 that another launcher started, and where all workers of this one
    have left, and others go on.

    Args:
        json: where to write the result as JSON besides ``summary.json``.
        on_message: told of progress, notices and where the run lies, with the rank of the worker that says so.
        calling: where the workers find their coordinator, if that is said.
        debug: the worker that has this terminal for ``breakpoint()``. Default: one that is alone.
    """
    began = time.time() - age_seconds()
    identity = claim_identity()
    if identity.launcher != "none":
        if calling is not None:
            raise InvalidInput(
                "coordinator", calling.endpoint.host,
                f"{identity.launcher} started this worker, and who it starts stay", "leave it out")  # fmt: skip
        return _be_worker(identity, source, settings, began, json, on_message)
    preload = LAID if settings.get("layout") else PRELOAD
    with start_fork_server(preload) as server:  # imports torch while this process checks what was written
        settings = with_earlier(settings)
        config = settle(source.load(FIELDS), settings)
        check_worker_count(config.workers)
        if debug is not None and not 0 <= debug < config.workers:
            raise InvalidInput("debug", debug, f"there are workers 0 to {config.workers - 1}", "choose one of them")
        if config.layout.workers > 1:  # what workers would refuse is refused before there are any
            _ask("unisono.plan.layout_check:check", source, settings, server)
        holder = Holder.current()
        with claimed(config, source, holder) as path, resumable(path), contextlib.ExitStack() as stack:
            on_message(0, {"kind": "run", "path": str(path)})
            order = RunSpec(source, settings, path, began, holder=holder)
            elastic = stack.enter_context(_may_come_and_go(config, order, server, on_message, calling))
            order = replace(order, contact=elastic.contact if elastic else None)
            try:
                results = launch(
                    "unisono.run.worker:run_worker",
                    (order,),
                    LaunchOptions(path / "logs", config.workers, debug_rank=debug),
                    fork_server=server,
                    on_message=on_message,
                    elastic=elastic,
                )
            except Interrupted as stopped:
                result = next((result for result in stopped.results if result is not None), None)
                if result is None:
                    raise
                return conclude(result, path, json, on_message, stopped.number)
    return None if results[0] is None else conclude(results[0], path, json, on_message)


def join(
    contact: CoordinatorAddress, workers: int, consent: Consent, *, logs: Path | None = None, on_message: Messages
) -> Mapping[str, Any] | None:
    """Start `workers` processes here that take part in the run whose coordinator `contact` reaches.

    Returns the fields of its `Result` once it is over (of a script, only where it lies); None if all of them have left
    before.

    Args:
        consent: what this host runs.
        logs: directory for what they print; default: one in ``runs``, of this launcher's own name.
        on_message: as for `start`.

    Raises:
        InvalidInput: nobody answers there, or this host cannot do what the run's workers do, or is not to do it.
        WorkerFailed: as `launch`.
    """
    check_worker_count(workers, "--workers")
    name = f"{os.uname().nodename}-{secrets.token_hex(2)}"
    with start_fork_server(PRELOAD) as server:
        order = called(contact, server, consent)
        logs = logs or Path("runs", name, "logs")
        if isinstance(order, Script):
            elastic = ElasticOptions(order.contact, launcher=name, independent_exit=True)
            done = launch_script(
                order.path, order.arguments, LaunchOptions(logs, workers), fork_server=server,
                on_message=on_message, elastic=elastic)  # fmt: skip
            return {"run": order.run} if done else None
        settle(order.source.load(FIELDS), order.settings)
        assert order.contact is not None
        results = launch(
            "unisono.run.worker:run_worker",
            (order,),
            LaunchOptions(logs, workers),
            fork_server=server,
            on_message=on_message,
            elastic=ElasticOptions(order.contact, launcher=name),
        )
    result: Mapping[str, Any] | None = results[0]
    return result


def _may_come_and_go(
    config: Config, order: RunSpec, server: ForkServer, on_message: Messages, calling: CoordinatorOptions | None
) -> contextlib.AbstractContextManager[ElasticOptions | None]:
    """What workers need to do so, if they may.

    Raises:
        InvalidInput: they may not, and the user wants it.
    """
    if config.recovers_from_loss:
        told = lambda words: on_message(0, {"kind": "notice", "text": words})
        alone = max(config.workers, config.max_workers or 1) == 1 and calling is None
        return (
            contextlib.nullcontext()
            if alone
            else gathered(config, order, server, told, calling or CoordinatorOptions())
        )
    if config.min_workers > 1 or config.max_workers not in (None, config.workers) or calling is not None:
        raise InvalidInput(
            "workers", f"{config.min_workers}:{config.max_workers or config.workers}",
            "in this run none can come or go",
            f"give one number; or leave elastic on, with {RECOVERY_REQUIREMENTS}")  # fmt: skip
    return contextlib.nullcontext()


def estimate_layout(source: TaskSource, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What workers would hold of the task of `source` under ``settings``: the fields of a `LayoutEstimate` of
    `unisono.plan.layout_estimate`.

    Raises:
        InvalidInput: what is asked for cannot work.
    """
    with start_fork_server(LAID) as server:
        found: Mapping[str, Any] = _ask("unisono.plan.layout_estimate:estimate_mapping", source, settings, server)
        return found


def _ask(target: str, source: TaskSource, settings: Mapping[str, Any], server: ForkServer) -> Any:
    """In a process of its own, since a model may be built, and torch's default process group be a false one."""
    return call_in_worker(target, (source, settings), server, threads=len(os.sched_getaffinity(0)))


def _be_worker(
    identity: WorkerIdentity,
    source: TaskSource,
    settings: Mapping[str, Any],
    began: float,
    json: Path | None,
    on_message: Messages,
) -> Result | None:
    """This process is one of several that somebody else's launcher started."""
    from unisono.run.worker import run_worker  # imports torch

    settings = expand_worker_range(settings)
    said = settings.get("workers")
    if said is not None and int(said) != identity.size:
        raise InvalidInput(
            "workers", said, f"{identity.launcher} started {identity.size}", "leave it out, or start as many"
        )
    settings = {**with_earlier(settings), "workers": identity.size}
    with contextlib.closing(StopRequest()) as stop:
        worker = WorkerContext(identity, lambda message: on_message(identity.rank, message), stop)
        result = run_worker(worker, RunSpec(source, settings, None, began))
    if result is None:
        return None
    if identity.rank == 0:
        return conclude(result, Path(result["run"]), json, on_message)
    _check_complete(result, STOP)
    return None


def conclude(
    result: Mapping[str, Any], path: Path, json: Path | None, on_message: Messages, number: int = STOP
) -> Result:
    """Write what worker 0 returned to the run's directory, as far as the disk takes it, and to `json`.

    Args:
        number: of the signal that asked to stop, if any did.

    Raises:
        UnisonoError: `json` cannot be written.
        Interrupted: not all steps are done.
    """
    try:
        write_summary(path / SUMMARY, result)
    except OSError as error:
        on_message(0, {"kind": "notice", "text": f"{SUMMARY} was not written: {error.strerror}"})
    try:
        if json is not None:
            write_summary(json, result)
    except OSError as error:
        raise UnisonoError(f"the result was not written to {json}: {error.strerror}") from error
    _check_complete(result, number)
    return Result(**result)


def _check_complete(result: Mapping[str, Any], number: int) -> None:
    if not result["complete"]:
        raise Interrupted(number, [result], result["ending"])
