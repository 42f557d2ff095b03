"""What the training loop does when its workers change, seen from one of them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unisono import Task
from unisono.bad_steps import Judge
from unisono.checkpoint import fingerprint
from unisono.comm import Alone
from unisono.comm.process_groups import Wires
from unisono.elastic.presence import Unchanging
from unisono.errors import PeerLost
from unisono.layout import Whole
from unisono.observe import Nothing
from unisono.run.resolve import settle
from unisono.trainer.build import Feed, bind, build
from unisono.trainer.checkpointing import Persistence

MICRO_BATCHES = 4


class LostAt(Unchanging):
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
    config = settle(task, {"steps": 1, "global_batch": 8, "micro_batch": 2, "load": "Inline()"})
    here, comm = torch.device("cpu"), Alone(torch.device("cpu"))
    with contextlib.ExitStack() as stack:
        feed = Feed(task, config, 0, 1, stack)
        held, optimizer = build(task, config, here, comm)
        persistence = Persistence(
            None, held.local, optimizer, comm.lane("checkpoint"), 0, {}, judge=Judge(config.bad_step)
        )
        trainer = bind(
            task, config, feed, held, optimizer, Wires.whole(comm), persistence=persistence, record=Nothing(),
            device=here, presence=LostAt(call))  # fmt: skip
        before = fingerprint(Whole(held.model))
        with pytest.raises(PeerLost):
            trainer.run(0)
        trainer.let_go()
    assert (len(computed), trainer.done) == (min(call - 1, MICRO_BATCHES), 0)
    assert fingerprint(Whole(held.model)) == before
