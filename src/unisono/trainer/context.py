"""What a trainer is built from, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from unisono.bad_steps import AnomalyDetector, Stop
from unisono.comm.process_groups import ProcessGroups
from unisono.config import Config
from unisono.elastic.session import Session, StaticSession
from unisono.elastic.state_recovery import Recovery, ReplicatedRecovery
from unisono.elastic.training_state import TrainingState
from unisono.observe import ActivityTracker, NullTracker, Recorder
from unisono.tasks.task import Task
from unisono.trainer.checkpointing import Checkpointer
from unisono.trainer.data_feed import DataFeed


@dataclass(frozen=True)
class RunContext:
    """One worker's part of a run in the current view.

    Args:
        state: model, optimizer and the steps that are in them.
        session: the membership of this worker. All workers stop, or leave the view, after the same step.
        recovery: keeps what other workers need after a loss.
        tracker: records what this worker does.
    """

    task: Task
    config: Config
    feed: DataFeed
    state: TrainingState
    groups: ProcessGroups
    checkpointer: Checkpointer
    record: Recorder
    device: torch.device
    session: Session = field(default_factory=StaticSession)
    recovery: Recovery = field(default_factory=lambda: ReplicatedRecovery(AnomalyDetector(Stop())))
    tracker: ActivityTracker = field(default_factory=NullTracker)
