"""The training loop of one worker while the view changes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unisono import AllReduce, Evaluation, ParameterServer, Task
from unisono.bad_steps import AnomalyDetector
from unisono.checkpoint import fingerprint
from unisono.comm import SingleWorker
from unisono.comm.process_groups import ProcessGroups
from unisono.elastic.session import StaticSession
from unisono.elastic.training_state import TrainingState
from unisono.errors import PeerLost
from unisono.layout import WholeTensors
from unisono.observe import NullRecorder
from unisono.run.resolve import resolve_config
from unisono.sync import Synchronizer
from unisono.trainer.build import build_trainer
from unisono.trainer.build_model import build_model
from unisono.trainer.checkpoint_restorer import CheckpointScope
from unisono.trainer.checkpointing import Checkpointer
from unisono.trainer.context import RunContext
from unisono.trainer.data_feed import DataFeed

MICRO_BATCHES = 4


class LostAt(StaticSession):
    """The others go on without this worker from its `call`-th look."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self._left = call

    def check(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise PeerLost([], "step", "the others go on")


@pytest.mark.parametrize("call", range(1, MICRO_BATCHES + 2))
def test_a_worker_that_is_left_behind_computes_no_more_and_takes_no_step(call: int) -> None:
    """The last look is right before the step is taken."""
    computed, x = [], torch.randn(8, 2, generator=torch.Generator().manual_seed(0))

    def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        computed.append(len(batch[0]))
        return (output - batch[0]).square().mean()

    task = Task(model=lambda: nn.Linear(2, 2), data=TensorDataset(x), loss=loss)
    config = resolve_config(task, {"steps": 1, "global_batch": 8, "micro_batch": 2, "load": "Inline()"})
    here, comm = torch.device("cpu"), SingleWorker(torch.device("cpu"))
    with contextlib.ExitStack() as stack:
        feed = DataFeed(task, config, 0, 1, stack)
        held, optimizer = build_model(task, config, here, comm)
        persistence = Checkpointer(
            CheckpointScope(held.local, optimizer, comm.channel("checkpoint"), {}, AnomalyDetector(config.bad_step))
        )
        trainer = build_trainer(
            RunContext(
                task,
                config,
                feed,
                TrainingState(held, optimizer),
                ProcessGroups.replicated(comm),
                persistence,
                NullRecorder(),
                here,
                LostAt(call),
            )
        )
        before = fingerprint(WholeTensors(held.model))
        with pytest.raises(PeerLost):
            trainer.run()
        trainer.unbind()
    assert (len(computed), trainer.done) == (min(call - 1, MICRO_BATCHES), 0)
    assert fingerprint(WholeTensors(held.model)) == before


class LostIn(SingleWorker):
    """A worker is lost while the lane of that number is opened."""

    def __init__(self, lane: int) -> None:
        super().__init__()
        self.left = lane

    def channel(self, name: str) -> SingleWorker:
        self.left -= 1
        if self.left == 0:
            raise PeerLost([1], "connect", "it was killed")
        return self


def hooks(model: nn.Module) -> int:
    """How many there are on the model, its modules and parameters."""
    of_modules = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("sync", [AllReduce(), ParameterServer()], ids=lambda s: type(s).__name__)
def test_a_worker_that_is_lost_while_the_model_is_bound_leaves_no_hooks_on_it(sync: Synchronizer) -> None:
    """Or else the next view would have the gradients of the model taken twice, once for a view that never was."""
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        data=TensorDataset(x),
        loss=lambda output, batch: output.square().mean(),
        evaluate=Evaluation(TensorDataset(x), {}),
    )
    config = resolve_config(task, {"steps": 1, "global_batch": 8, "micro_batch": 2, "load": "Inline()", "sync": sync})
    here, lost = torch.device("cpu"), 0
    with contextlib.ExitStack() as stack:
        feed = DataFeed(task, config, 0, 1, stack)
        held, optimizer = build_model(task, config, here, SingleWorker(here))
        before, state = hooks(held.model), TrainingState(held, optimizer, local_steps=True)
        state.allow_roll_back()
        while True:
            comm = LostIn(lost + 1)
            persistence = Checkpointer(
                CheckpointScope(held.local, optimizer, SingleWorker(here), {}, AnomalyDetector(config.bad_step))
            )
            try:
                trainer = build_trainer(
                    RunContext(
                        task, config, feed, state, ProcessGroups.replicated(comm), persistence, NullRecorder(), here
                    )
                )
            except PeerLost:
                lost += 1
                assert hooks(held.model) == before, f"lane {lost}"
            else:
                break
        assert lost >= 3
        assert hooks(held.model) > before
        trainer.unbind()
        assert hooks(held.model) == before
