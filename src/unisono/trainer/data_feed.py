"""Provides the data of one worker: the plan of micro-batches, its share of them, and their loader."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch
from torch.utils.data import default_collate

from unisono.config import Config
from unisono.data import Loader, MicroBatchAllocation, MicroBatchPlan, assign, most_ahead
from unisono.layout import RankMesh, Sample
from unisono.tasks.task import Task, build_dataset
from unisono.tensors.batch import Batch

LOG = logging.getLogger("unisono")


class DataFeed:
    """The plan of micro-batches, and the loader of worker `rank` of `size`.

    Args:
        stack: closes the loaders.
        notice: see `Loader`.

    Attributes:
        plan: which samples the micro-batches have.
        mesh: the positions of all ranks in the layout.
        mine: this worker's micro-batches in the first steps.
        shares: the allocation of micro-batches to workers.
        steps: the number of steps of the run.
        left_out: the part of the data that the steps leave out, in words; empty if the user set `steps`.

    Raises:
        InvalidInput: as `MicroBatchPlan`, `assign` and `RankMesh` raise it.
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        rank: int,
        size: int,
        stack: contextlib.ExitStack,
        notice: Callable[[str], None] = LOG.warning,
    ) -> None:
        self.task, self.config, self._stack, self._notice = task, config, stack, notice
        self.dataset = build_dataset(task.data)
        assert config.global_batch is not None
        self.plan = MicroBatchPlan(len(self.dataset), config.global_batch, config.micro_batch, config.seed)
        self.mesh = RankMesh(config.layout, size)
        self.mesh.check_micro_batches(self.plan.micro_batches)
        ranges = assign(self.plan.micro_batches, [1.0] * self.mesh.data_parallel_size)
        self.mine = ranges[self.mesh.data_parallel_rank(rank)]
        first_ranks = {self.mesh.data_parallel_rank(rank): rank for rank in reversed(range(size))}
        workers = [first_ranks[index] for index in range(len(ranges))]
        self.shares = MicroBatchAllocation(ranges, self.mesh.data_parallel_rank(rank), workers, most_ahead(config.load))
        epochs = config.epochs or 1.0
        self.steps = config.steps or self.plan.steps_in(epochs)
        self.left_out = "" if config.steps else self.plan.left_out(epochs)

    def sample(self) -> Sample:
        """The first two samples, or a micro-batch where a pipeline measures it. Random states stay unchanged."""
        count = self.config.micro_batch if self.config.layout.pipeline > 1 else 2
        assert count is not None
        with torch.random.fork_rng(devices=[]):
            first = [self.dataset[i] for i in range(min(count, len(self.dataset)))]
        task = self.task
        return Sample((task.collate or default_collate)(first), task.inputs, task.loss, task.weight)

    def micro_batch(self) -> Batch:
        """The dataset's first samples, as one micro-batch. Random states stay unchanged."""
        with torch.random.fork_rng(devices=[]):
            get_items = getattr(self.dataset, "__getitems__", None)
            first = list(range(self.plan.micro_batch))
            samples = get_items(first) if get_items else [self.dataset[i] for i in first]
        return (self.task.collate or default_collate)(samples)

    def loader(self, first_step: int) -> Loader:
        """A loader of this worker's micro-batches from `first_step` on."""
        loader = Loader(
            self.dataset, self.plan, self.shares.mine, self.task.collate, self.config.load, self.config.seed,
            range(first_step, self.steps), self._notice)  # fmt: skip
        self._stack.callback(loader.close)
        return loader
