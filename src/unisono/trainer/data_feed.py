"""The data of one worker: the plan of micro-batches, this worker's share of them, and their loader."""

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
    """The plan of micro-batches, and the loader of worker `rank` of `size`; loaders are closed with `stack`.

    Args:
        notice: see `Loader`.

    Raises:
        InvalidInput: as `MicroBatchPlan`, `assign` and `RankMesh`.
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
        self.places = RankMesh(config.layout, size)
        self.places.check_micro_batches(self.plan.micro_batches)
        ranges = assign(self.plan.micro_batches, [1.0] * self.places.data_parallel_size)
        self.mine = ranges[self.places.data_parallel_rank(rank)]  # of the first steps
        speakers = {self.places.data_parallel_rank(rank): rank for rank in reversed(range(size))}
        who = [speakers[lane] for lane in range(len(ranges))]
        self.shares = MicroBatchAllocation(ranges, self.places.data_parallel_rank(rank), who, most_ahead(config.load))
        epochs = config.epochs or 1.0
        self.steps = config.steps or self.plan.steps_in(epochs)
        self.left_out = "" if config.steps else self.plan.left_out(epochs)  # in words

    def sample(self) -> Sample:
        """The dataset's first two samples, or a micro-batch where it is measured; no random stream moves."""
        count = self.config.micro_batch if self.config.layout.pipeline > 1 else 2
        assert count is not None
        with torch.random.fork_rng(devices=[]):
            first = [self.dataset[i] for i in range(min(count, len(self.dataset)))]
        task = self.task
        return Sample((task.collate or default_collate)(first), task.inputs, task.loss, task.weight)

    def micro_batch(self) -> Batch:
        """As many of the dataset's first samples as a micro-batch has; no random stream moves."""
        with torch.random.fork_rng(devices=[]):
            many = getattr(self.dataset, "__getitems__", None)
            first = list(range(self.plan.micro_batch))
            samples = many(first) if many else [self.dataset[i] for i in first]
        return (self.task.collate or default_collate)(samples)

    def loader(self, first_step: int) -> Loader:
        """Loads this worker's micro-batches from `first_step` on."""
        loader = Loader(
            self.dataset, self.plan, self.shares.mine, self.task.collate, self.config.load, self.config.seed,
            range(first_step, self.steps), self._notice)  # fmt: skip
        self._stack.callback(loader.close)
        return loader
