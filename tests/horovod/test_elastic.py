"""State goes back to its last commit, samples are divided among the workers, and a lost worker is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono.horovod as hvd
from tests.horovod.workers import initialized, over
from tests.support.processes import start
from unisono.errors import InvalidInput, PeerLost

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
import unisono.horovod as hvd

hvd.init()
directory, killed_at, killed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(1000), shuffle=False)


@hvd.elastic.run
def train(state):
    while state.step < 30:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        state.sampler.record_batch(state.step, 2)
        if state.step == killed_at and hvd.rank() == killed and not (directory / "killed").exists():
            (directory / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        if state.step % 3 == 0:
            state.sizes = [*state.sizes, hvd.size()]
            state.commit()
    return state


state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[], sampler=sampler)
state.register_reset_callbacks([lambda: (directory / f"reset to {hvd.size()}").touch()])
train(state)
same = hvd.allgather(model.weight.detach())
print(json.dumps([state.step, state.sizes, len(same), bool((same == same[0]).all()), state.sampler.processed_num]))
"""


def values_go_back_to_the_last_commit() -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + hvd.rank(), momentum=0.9)
    state = hvd.elastic.TorchState(model, optimizer, epoch=10 + hvd.rank(), seen=[hvd.rank()])
    first = model.weight.detach().clone()
    state.epoch = 7
    state.seen.append(3)
    nn.init.zeros_(model.weight)
    state.restore()
    assert (state.epoch, state.seen) == (10 + hvd.rank(), [hvd.rank()])
    assert torch.equal(model.weight, first)
    state.sync()
    assert (state.epoch, state.seen, optimizer.param_groups[0]["lr"]) == (10, [0], 0.1)
    assert torch.equal(hvd.broadcast(model.weight.detach(), 0), model.weight)
    state.epoch = 11
    state.commit()
    state.epoch = 12
    state.restore()
    assert state.epoch == 11
    kind = InvalidInput if hvd.rank() == 0 else hvd.HorovodInternalError
    with pytest.raises(kind, match=r"object\['work'\] = function: it cannot be sent"):
        hvd.elastic.ObjectState(work=values_go_back_to_the_last_commit).sync()


def the_group_does_not_change_without_a_coordinator() -> int:
    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState, more: int) -> int:
        state.commit()
        return hvd.size() + more + state.value

    return train(hvd.elastic.ObjectState(value=100 + hvd.rank()), 10)


def samples_are_divided() -> list[list[int]]:
    sampler = hvd.elastic.ElasticSampler(range(11), seed=5)
    whole = list(sampler)
    state = hvd.elastic.TorchState(sampler=sampler)
    sampler.record_batch(0, 2)
    state.commit()
    assert list(sampler) == whole  # until the group changes, or the epoch ends
    state.sync()
    left = list(sampler)
    assert len(left) == len(sampler)
    sampler.set_epoch(1)
    return [whole, left, list(sampler)]


def all_laws() -> list[list[int]]:
    values_go_back_to_the_last_commit()
    return samples_are_divided()


@pytest.mark.parametrize("size", [1, 3])
def test_laws(size: int, tmp_path: Path) -> None:
    results = over(size, tmp_path, all_laws)
    whole, left, second = (interleaved(parts) for parts in zip(*results))
    assert set(whole) == set(second) == set(range(11))
    assert set(left) == set(whole[2 * size : 11])
    assert whole != second


def interleaved(parts: tuple[list[int], ...]) -> list[int]:
    """The samples of all workers, in the order of the epoch."""
    return [sample for samples in zip(*parts) for sample in samples]


def test_a_static_group(tmp_path: Path) -> None:
    assert over(2, tmp_path, the_group_does_not_change_without_a_coordinator) == [112, 112]


def lose_one() -> None:
    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        hvd.barrier()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.step = 5
        hvd.allreduce(torch.ones(1))

    state = hvd.elastic.ObjectState(step=0)
    with pytest.raises(PeerLost):
        train(state)
    assert state.step == 0


def test_the_loss_of_a_worker_of_a_static_group_is_an_error(tmp_path: Path) -> None:
    with start(2, initialized, f"file://{tmp_path}", "auto", lose_one) as workers:
        workers.results(lost={1})


def launched(directory: Path, killed_at: int, killed: int) -> str:
    script = directory / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "unisono", "launch", "--workers", "3", "--run-dir", str(directory / "run")]
    arguments = [str(script), str(directory), str(killed_at), str(killed)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_lost_worker_is_replaced(killed: int, tmp_path: Path) -> None:
    steps, sizes, size, same, processed = json.loads(launched(tmp_path, 10, killed))
    assert (steps, same) == (30, True)
    assert len(sizes) == 10
    assert sizes[:3] == [3, 3, 3]
    assert set(sizes) <= {2, 3}
    assert size in (2, 3)
    assert processed == 2 * 3 * sum(sizes)
    assert (tmp_path / f"reset to {sizes[3]}").exists()
