"""Reads the variants of one run, and the cluster on which they are simulated, from the user's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.comm import Link
from unisono.config import Config
from unisono.errors import InvalidInput
from unisono.plan import units
from unisono.plan.compute_benchmark import share_seconds
from unisono.plan.compute_time import Compute
from unisono.plan.simulation import Cluster
from unisono.plan.variants import changes, label
from unisono.run.resolve import resolve_config
from unisono.tasks.task import Task, build_dataset

AUTO = "auto"
# The usable part of a link's rate: 1448 of the 1514 bytes of a frame are payload, and sums and gathers of a megabyte
# and more reach 0.86 to 0.94 of that on TCP (python -m benchmarks links).
_GOODPUT = 1448 / 1514 * 0.92


def variants(task: Task, settings: Mapping[str, Any], against: Sequence[str]) -> dict[str, Config]:
    """Every variant by its name; the first one is the run of the command itself.

    Raises:
        InvalidInput: a variant cannot be read or cannot be trained, or two variants are the same.
    """
    found: dict[str, Config] = {}
    for text in ["", *against]:
        changed = changes("--against", text) if text else {}
        config = resolve_config(task, fitted(task, {**settings, **changed}))
        if config.layout.workers > 1:
            raise InvalidInput(
                "layout",
                str(config.layout),
                "virtual workers are whole replicas",
                "omit it, and simulate the replicas",
            )
        if config in found.values():
            raise InvalidInput("--against", text, "the same as another variant", "omit one of them")
        found[label(config, changed)] = config
    return found


def fitted(task: Task, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `given`, with a global batch of at least one micro-batch per worker, unless `given` sets one."""
    asked = Config.of({**task.defaults, **given})
    config = resolve_config(task, {**given, "workers": asked.layout.workers})
    batch, micro = config.global_batch, config.micro_batch
    assert batch is not None  # it is settled
    assert micro is not None
    if asked.workers <= batch // micro or given.keys() & {"global_batch", "micro_batch"}:
        return dict(given)
    micro = max(1, min(micro, len(build_dataset(task.data)) // asked.workers))
    return {**given, "global_batch": micro * asked.workers, "micro_batch": micro}


def measured(task: Task, config: Config, compute: str) -> str:
    """`compute`, or if that is ``auto``, the measured time as text.

    Raises:
        InvalidInput: the task cannot be trained with this configuration.
    """
    return f"{1e3 * share_seconds(task, config):.4g}ms" if compute.strip() == AUTO else compute


def cluster(config: Config, link: str, latency: str, compute: str, share_samples: float) -> Cluster:
    """The cluster that the options describe.

    Raises:
        InvalidInput: an option cannot be read, or has neither one value nor one for each worker.
    """
    parsed = Compute.of("--compute", compute)
    parsed.check("--compute", compute, config.workers)
    return Cluster(_links(link, latency, config.workers), parsed, share_samples)


def share_samples(config: Config) -> float:
    """The number of samples of one worker in a step, if all workers compute equally many."""
    assert config.global_batch is not None  # it is settled
    return config.global_batch / config.workers


def _links(link: str, latency: str, workers: int) -> tuple[Link, ...]:
    rates = [units.bytes_per_second("--link", word) for word in link.split(",")]
    delays = [units.seconds("--latency", word) for word in latency.split(",")]
    for name, text, values in (("--link", link, rates), ("--latency", latency, delays)):
        if len(values) not in (1, workers):
            problem = f"{len(values)} values for {workers} worker{'s' * (workers != 1)}"
            raise InvalidInput(name, text, problem, "pass one for all, or one for each")
    count = max(len(rates), len(delays))
    return tuple(Link(_GOODPUT * rates[i % len(rates)], delays[i % len(delays)]) for i in range(count))
