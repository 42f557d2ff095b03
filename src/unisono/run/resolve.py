"""Resolves the `Config` of a run from the settings of the user and the defaults of the task and the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.compress import Exact
from unisono.config import LIBRARY_GLOBAL_BATCH, NONE, Config, first_difference
from unisono.data import check_enough, default_micro_batch
from unisono.errors import InvalidInput
from unisono.layout import RankMesh
from unisono.notation import show
from unisono.tasks.lr_schedules import factor_of
from unisono.tasks.task import Task


def resolve_config(task: Task, given: Mapping[str, Any]) -> Config:
    """The `Config` of a run. `given` (fields and values) overrides the task's defaults, which override the library's.

    Raises:
        InvalidInput: a setting is invalid (see `Config.of`), or the settings cannot be combined.
    """
    defaults, chosen = dict(task.defaults), {name for name, value in given.items() if value not in (None, NONE)}
    if "epochs" in chosen:
        defaults.pop("steps", None)
    if "steps" in chosen:
        defaults.pop("epochs", None)
    if "global_batch" in chosen:
        defaults.pop("micro_batch", None)
    config = Config.of({**defaults, **given})  # None overrides a default of the task: --clip none
    if config.global_batch is None:
        config = replace(config, global_batch=LIBRARY_GLOBAL_BATCH)
    if config.micro_batch is None:
        config = replace(config, micro_batch=default_micro_batch(config.global_batch or LIBRARY_GLOBAL_BATCH))
    if isinstance(config.compress, Exact) and not config.threads:
        config = replace(config, threads=1)  # the number of threads can change bits, so it must not follow the machine
    _check_workers(config)
    if config.steps is not None and (schedule := config.schedule or task.schedule):
        factor_of(schedule, 0, config.steps)
    if config.sync_batchnorm and isinstance(config.compress, Exact):
        raise InvalidInput(
            "sync_batchnorm", True, "its statistics depend on which micro-batches run at once, so the result depends "
            "on the number of workers, which Exact() rules out", "leave out sync_batchnorm or Exact()")  # fmt: skip
    if config.activation_checkpointing == "selective" and config.compile:
        raise InvalidInput("activation_checkpointing", config.activation_checkpointing,
                           "a compiled block has no single operations whose outputs could be stored",
                           "write blocks, or leave compile out")  # fmt: skip
    if config.layout.workers > 1:
        _check_sharded(config)
    elif config.precision == "bf16_parameters":
        raise InvalidInput(
            "precision", config.precision, f"with {show(config.layout)} each worker has all parameters, in fp32",
            "write bf16, or a layout as in --layout 'Layout(shard=2)'")  # fmt: skip
    return config


def _check_workers(config: Config) -> None:
    """Raise `InvalidInput` if some permitted number of workers could not train."""
    most = config.workers if config.max_workers is None else config.max_workers
    if config.workers > most:
        raise InvalidInput(
            "workers", config.workers, f"above max_workers = {most}", "start fewer, or give a larger max_workers"
        )
    if config.min_workers > most:
        raise InvalidInput(
            "min_workers",
            config.min_workers,
            f"there are never more than {most} workers",
            "give a larger max_workers, as in --workers 2:8",
        )
    assert config.global_batch is not None
    assert config.micro_batch is not None
    micro_batches = config.global_batch // config.micro_batch
    if config.max_workers is not None and micro_batches < most:
        raise InvalidInput(
            "max_workers", most, f"a step has {micro_batches} micro-batches, and every worker takes one at least",
            "use fewer, or a smaller micro_batch")  # fmt: skip
    if config.layout.workers == 1:
        check_enough(micro_batches, config.workers)


def _check_sharded(config: Config) -> None:
    """Raise `InvalidInput` if the settings cannot be combined with a layout of several workers per replica."""
    mesh = RankMesh(config.layout, config.workers)
    assert config.global_batch is not None
    assert config.micro_batch is not None
    micro_batches = config.global_batch // config.micro_batch
    mesh.check_micro_batches(micro_batches)
    if config.layout.pipeline > 1:
        from unisono.layout.pipeline import check  # imports more of torch than other runs need

        check(
            config.layout.schedule,
            config.layout.pipeline,
            config.layout.stages,
            micro_batches // mesh.data_parallel_size,
        )
    sync, layout = config.sync, show(config.layout)
    if config.balance == "on":
        raise InvalidInput(
            "balance", "on", f"with {layout}, workers compute a micro-batch together, or equally many in parallel",
            "leave out balance or the layout")  # fmt: skip
    if getattr(sync, "asynchronous", False) or getattr(sync, "staleness", 0) or getattr(sync, "backup_workers", 0):
        raise InvalidInput(
            "sync", show(sync), f"it assigns micro-batches to single workers, and with {layout} a replica has several",
            "write AllReduce(), LocalSGD(), DiLoCo(), Gossip() or ParameterServer(staleness=0)")  # fmt: skip
    if isinstance(config.compress, Exact):
        raise InvalidInput(
            "compress", show(config.compress), f"with {layout}, gradients are summed as floats within a replica, so "
            "the bits depend on the layout", "leave out Exact() or the layout")  # fmt: skip


def check_same_run(config: Config, before: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` if `config` differs from a checkpoint's in a field that must not change in a run."""
    now = config.mapping()
    if name := first_difference(now, before):
        raise InvalidInput(
            name, now.get(name), f"the run to resume was started with {before.get(name)}",
            "leave it out, or start a new run with another --run-dir")  # fmt: skip
    if isinstance(config.compress, Exact) and config.threads != before.get("threads", 0):
        raise InvalidInput(
            "threads", config.threads, f"the run to resume was started with {before.get('threads', 0)}, and in exact "
            "mode the number of threads can change bits", "leave it out")  # fmt: skip
