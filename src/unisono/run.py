"""A run from a task and its settings to a result: who starts whom, what lies where, and what one worker sets up."""

from __future__ import annotations

import contextlib
import json as json_format
import logging
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from unisono.batchnorm import synchronize_batchnorm
from unisono.checkpoint import Loaded, Writer, fingerprint, load_newest
from unisono.comm import Communicator, connect
from unisono.compress import Exact
from unisono.config import Config
from unisono.data import Loader, MicroBatchPlan, assign, stream
from unisono.errors import CheckpointDamaged, CheckpointMismatch, InvalidInput
from unisono.evaluate import Evaluator, forward, samples_in
from unisono.launch import Identity, identify
from unisono.observe import Recorder
from unisono.optimizer import LearningRate, prefer_fused
from unisono.persist import Persistence
from unisono.replica import Replica, sparse_parameters, weights_of
from unisono.schedule import Constant
from unisono.settings import check_same_run, settle
from unisono.task import Batch, Task, build_dataset
from unisono.train import Outcome, Trainer
from unisono.world import choose_device, fair_threads

log = logging.getLogger("unisono")


@dataclass(frozen=True)
class Result:
    """What a run came to.

    `weights_sha256` hashes every parameter and buffer by sorted global name (name, dtype, shape, bytes);
    `samples_per_second` counts training only; `peak_rss_bytes` is the largest worker's; `run` is where it lies.
    """

    steps: int
    samples: int
    loss: float
    metrics: Mapping[str, float]
    weights_sha256: str
    wall_seconds: float
    startup_seconds: float
    samples_per_second: float
    bytes_sent_per_worker: int
    step_seconds_median: float
    peak_rss_bytes: int
    run: str


@dataclass(frozen=True)
class Place:
    """Where a run lies: ``config.toml``, ``events.jsonl``, ``summary.json``, ``logs/`` and ``checkpoints/``."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"


class TaskSource(Protocol):
    """Says where a task comes from; `load` gets it."""

    def load(self) -> Task: ...
