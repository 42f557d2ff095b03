"""Starts a run from a task and its settings, or joins one, and returns its result."""

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
from unisono.run.directory import claim_run_directory, resumable, with_previous_settings
from unisono.run.elastic_run import Script, elastic_run, fetch_work
from unisono.run.resolve import resolve_config
from unisono.run.spec import PickledTask, Result, RunSpec, TaskSource
from unisono.system.process import age_seconds
from unisono.tasks.task import Task

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "unisono.run.worker")
PRELOAD_LAYOUT = (*PRELOAD, "unisono.layout.parallelize", "unisono.plan.layout_check")  # for workers of a layout
Messages = Callable[[int, Mapping[str, Any]], None]


def train(task: Task, config: Config | None = None, *, json: Path | None = None, quiet: bool = False) -> Result | None:
    """Train `task` under `config`; returns the result when all workers are done.

    Prints progress, notices and the run's directory to standard error, as ``unisono train`` does.

    Where ``unisono launch``, torchrun, Slurm or Open MPI starts this process once per worker, it is one of the workers,
    and returns None on all but worker 0. Otherwise it starts ``config.workers`` processes.

    Args:
        json: path of a file that receives the result as JSON.
        quiet: print nothing. Errors are still raised, and the run's directory has its records.

    Raises:
        InvalidInput: the settings are invalid, or cannot be combined.
        WorkerFailed: a worker failed; carries its traceback.
        Diverged: the loss is not finite.
        Interrupted: the run was asked to stop before all steps were done. If ``results`` has the values that the
            workers returned, the last step is in a checkpoint.
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
    coordinator: CoordinatorOptions | None = None, debug: int | None = None,
) -> Result | None:  # fmt: skip
    """Run the task of `source` under `settings` (Config fields that the user gave).

    Returns the result. Returns None in a worker other than 0 that another launcher started, and if all workers of this
    launcher left while other workers continue the run.

    Args:
        json: path of a file that receives the result as JSON, besides ``summary.json``.
        on_message: receives progress, notices and the run's directory, with the rank of the worker that sent them.
        coordinator: address of the coordinator, if the user gave one.
        debug: the worker that gets this terminal for ``breakpoint()``. Default: a run's only worker.
    """
    started_at = time.time() - age_seconds()
    identity = claim_identity()
    if identity.launcher != "none":
        if coordinator is not None:
            raise InvalidInput(
                "coordinator", coordinator.endpoint.host,
                f"{identity.launcher} started this worker, and its workers cannot join or leave",
                "leave it out")  # fmt: skip
        return _run_as_worker(identity, source, settings, started_at, json, on_message)
    preload = PRELOAD_LAYOUT if settings.get("layout") else PRELOAD
    with start_fork_server(preload) as server:  # imports torch while this process checks the settings
        settings = with_previous_settings(settings)
        config = _checked_config(source, settings, debug, server)
        holder = Holder.current()
        with claim_run_directory(config, source, holder) as path, resumable(path), contextlib.ExitStack() as stack:
            on_message(0, {"kind": "run", "path": str(path)})
            spec = RunSpec(source, settings, path, started_at, holder=holder)
            elastic = stack.enter_context(_elastic_options(config, spec, server, on_message, coordinator))
            spec = replace(spec, contact=elastic.contact if elastic else None)
            try:
                results = launch(
                    "unisono.run.worker:run_worker",
                    (spec,),
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


def _checked_config(source: TaskSource, settings: Mapping[str, Any], debug: int | None, server: ForkServer) -> Config:
    """The `Config` of the run. Raises `InvalidInput` for errors that workers would find only after their start."""
    config = resolve_config(source.load(FIELDS), settings)
    check_worker_count(config.workers)
    if debug is not None and not 0 <= debug < config.workers:
        raise InvalidInput("debug", debug, f"there are workers 0 to {config.workers - 1}", "choose one of them")
    if config.layout.workers > 1:
        _call("unisono.plan.layout_check:check", source, settings, server)
    return config


def join(
    contact: CoordinatorAddress, workers: int, consent: Consent, *, logs: Path | None = None, on_message: Messages
) -> Mapping[str, Any] | None:
    """Start `workers` processes on this host, which join the run whose coordinator is at `contact`.

    Returns the fields of the run's `Result` when the run has finished; for a script, only the run's directory. Returns
    None if all of these workers left before the run finished.

    Args:
        consent: what this host agrees to run.
        logs: directory for the output of the workers; default: in ``runs``, in a directory with this launcher's name.
        on_message: see `start`.

    Raises:
        InvalidInput: no coordinator answers; this host cannot run what the run's workers run; or `consent` does not
            allow it.
        WorkerFailed: see `launch`.
    """
    check_worker_count(workers, "--workers")
    name = f"{os.uname().nodename}-{secrets.token_hex(2)}"
    with start_fork_server(PRELOAD) as server:
        spec = fetch_work(contact, server, consent)
        logs = logs or Path("runs", name, "logs")
        if isinstance(spec, Script):
            elastic = ElasticOptions(spec.contact, launcher=name, independent_exit=True)
            done = launch_script(
                spec.path, spec.arguments, LaunchOptions(logs, workers), fork_server=server,
                on_message=on_message, elastic=elastic)  # fmt: skip
            return {"run": spec.run} if done else None
        resolve_config(spec.source.load(FIELDS), spec.settings)
        assert spec.contact is not None
        results = launch(
            "unisono.run.worker:run_worker",
            (spec,),
            LaunchOptions(logs, workers),
            fork_server=server,
            on_message=on_message,
            elastic=ElasticOptions(spec.contact, launcher=name),
        )
    result: Mapping[str, Any] | None = results[0]
    return result


def _elastic_options(
    config: Config, spec: RunSpec, server: ForkServer, on_message: Messages, coordinator: CoordinatorOptions | None
) -> contextlib.AbstractContextManager[ElasticOptions | None]:
    """The coordinator of an elastic run; None if there is only one worker, or workers cannot join or leave.

    Raises:
        InvalidInput: workers cannot join or leave, and the settings require it.
    """
    if config.recovers_from_loss:
        if max(config.workers, config.max_workers or 1) == 1 and coordinator is None:
            return contextlib.nullcontext()
        notify = lambda words: on_message(0, {"kind": "notice", "text": words})
        return elastic_run(config, spec, server, notify, coordinator or CoordinatorOptions())
    if config.min_workers > 1 or config.max_workers not in (None, config.workers) or coordinator is not None:
        raise InvalidInput(
            "workers", f"{config.min_workers}:{config.max_workers or config.workers}",
            "workers of this run cannot join or leave",
            f"give one number; or leave elastic on, with {RECOVERY_REQUIREMENTS}")  # fmt: skip
    return contextlib.nullcontext()


def estimate_layout(source: TaskSource, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Memory per worker of the task of `source` under `settings`: the fields of a `LayoutEstimate` of
    `unisono.plan.layout_estimate`.

    Raises:
        InvalidInput: the settings are invalid, or cannot be combined.
    """
    with start_fork_server(PRELOAD_LAYOUT) as server:
        estimate: Mapping[str, Any] = _call("unisono.plan.layout_estimate:estimate_mapping", source, settings, server)
        return estimate


def _call(target: str, source: TaskSource, settings: Mapping[str, Any], server: ForkServer) -> Any:
    """Call the function `target` in another process: it may build a model, and use a fake default process group."""
    return call_in_worker(target, (source, settings), server, threads=len(os.sched_getaffinity(0)))


def _run_as_worker(
    identity: WorkerIdentity,
    source: TaskSource,
    settings: Mapping[str, Any],
    started_at: float,
    json: Path | None,
    on_message: Messages,
) -> Result | None:
    """Train as one of the workers that another launcher started."""
    from unisono.run.worker import run_worker  # imports torch

    settings = expand_worker_range(settings)
    workers = settings.get("workers")
    if workers is not None and int(workers) != identity.size:
        raise InvalidInput(
            "workers", workers, f"{identity.launcher} started {identity.size} workers", "leave it out, or start as many"
        )
    settings = {**with_previous_settings(settings), "workers": identity.size}
    with contextlib.closing(StopRequest()) as stop:
        worker = WorkerContext(identity, lambda message: on_message(identity.rank, message), stop)
        result = run_worker(worker, RunSpec(source, settings, None, started_at))
    if result is None:
        return None
    if identity.rank == 0:
        return conclude(result, Path(result["run"]), json, on_message)
    _check_complete(result, STOP)
    return None


def conclude(
    result: Mapping[str, Any], path: Path, json: Path | None, on_message: Messages, number: int = STOP
) -> Result:
    """Write the `result` of worker 0 to the run's directory and to `json`.

    A failure to write to the run's directory is reported as a notice.

    Args:
        number: the number of the signal that asked to stop, if there was one.

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
