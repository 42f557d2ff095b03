"""With local steps, workers are killed, leave and join, and each sample still counts as often as without faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.support.command_runs import TASK, events, last_step, running_training, stderr_of
from tests.support.leftovers import session, within
from tests.support.tally import Tally
from unisono.chaos.virtual_cluster import VirtualNetwork, VirtualRun
from unisono.checkpoint import checkpoints
from unisono.comm import Link, Lost, outcomes
from unisono.elastic.snapshot import Snapshot
from unisono.elastic.state_transfer import Progress, named_state
from unisono.elastic.transfer import LocalTensors, differing, mean_of, state_digest
from unisono.launch import WorkerContext, WorkerIdentity
from unisono.membership import Policy, View
from unisono.observe import ThreadTracker
from unisono.run.resolve import resolve_config
from unisono.run.spec import PickledTask, Result, RunSpec
from unisono.run.worker import WorkerRun
from unisono.tasks.task import Task, with_data

SAMPLES, BATCH, STEPS, EPOCHS = 48, 24, 48, 24
PERIODIC = ["LocalSGD(every=4)", "LocalSGD(every=5,start=7)", "DiLoCo(every=6,outer=Average())",
            "BlockMomentum(every=3,momentum=0)"]  # fmt: skip
OTHERS = ["DiLoCo(every=6)", "DiLoCo(every=4,fragments=2,delay=1)", "Gossip(synchronize_every=4)",
          "Gossip(OnePeerExponential(),synchronize_every=4)"]  # fmt: skip
DEALT = ["Gossip(asynchronous=True,synchronize_every=4)", "Gossip(Complete(),asynchronous=True,synchronize_every=6)"]


def tally() -> Task:
    """Sample i is learned from c times when ``seen[i]`` is c."""
    return Task(
        model=lambda: Tally(SAMPLES),
        data=TensorDataset(torch.arange(SAMPLES)), loss=lambda output, batch: -output.mean(),
        inputs=lambda batch: batch[0],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=float(BATCH)))  # fmt: skip


def net(optimizer: Callable[..., Any] = torch.optim.SGD) -> Task:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, 3, generator=random), torch.randn(SAMPLES, 1, generator=random)
    return Task(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), data=TensorDataset(x, y),
        inputs=lambda batch: batch[0], loss=lambda output, batch: (output - batch[1]).square().mean(),
        optimizer=lambda parameters: optimizer(parameters, lr=0.05))  # fmt: skip


class NobodyStops:
    requested = leaving = False

    def listen(self) -> NobodyStops:
        return self


@dataclass
class Story:
    """What became of a run of three, and of those who came later."""

    results: list[Any]
    views: Sequence[View]
    lives: dict[int, WorkerRun] = field(default_factory=dict)

    @property
    def done(self) -> list[Result]:
        for each in self.results:
            if isinstance(each, BaseException) and not isinstance(each, Lost):
                raise each
        return [each for each in self.results if isinstance(each, Result)]

    @property
    def weights(self) -> str:
        """All that came to the end have the same, and have taken all steps."""
        (one,) = {each.weights_sha256 for each in self.done}
        assert {(each.steps, each.samples) for each in self.done} == {(STEPS, STEPS * BATCH)}
        return one


Faults = Callable[[VirtualRun], None]


def story(
    task: Task, sync: str, path: Path, faults: Faults = lambda run: None, *, minimum: int = 1, **more: Any
) -> Story:
    """A run of up to three, with those that `faults` begins."""
    settings = {"workers": 3, "steps": STEPS, "global_batch": BATCH, "micro_batch": 4, "load": "Inline()", "seed": 1,
                "threads": 1, "sync": sync, **more}  # fmt: skip
    whole, found = with_data(task), Story([], ())
    config = resolve_config(whole, settings)
    path.mkdir(exist_ok=True)
    order = RunSpec(PickledTask("test", b""), settings, path, time.time())
    run = VirtualRun(
        Policy(min_workers=minimum, expected_workers=3, max_workers=3), 6, Link(), VirtualNetwork(), seed=5
    )

    def live(process: Any) -> Result | None:
        stop: Any = NobodyStops()
        worker = WorkerContext(
            WorkerIdentity(process.number, 3, process.number, 3, "", "x"), lambda stderr_of: None, stop, process.name
        )
        life = found.lives[process.number] = WorkerRun(
            worker, order, whole, config, torch.device("cpu"), ThreadTracker()
        )
        return life.run(process)

    for number in range(3):
        run.begin(number)
    faults(run)
    found.results, found.views = run.run(live), run.formed
    return found


def killed(*when: float, after: float = 0.3) -> Faults:
    """At each moment a further one of the first is, and another begins a bit later."""

    def plan(run: VirtualRun) -> None:
        for number, at in enumerate(when):
            run.scheduler.at(at, lambda number=number: run.kill(number))  # type: ignore[misc]
            run.scheduler.at(at + after, lambda number=number: run.begin(3 + number))  # type: ignore[misc]

    return plan


def counted(found: Story) -> Tensor:
    """How often each sample was learned from, by the weights that all came to."""
    number = next(number for number, result in enumerate(found.results) if isinstance(result, Result))
    return found.lives[number].state.model.seen.detach()  # type: ignore[return-value]


@pytest.mark.parametrize("sync", PERIODIC)
@pytest.mark.parametrize("micro_batch", [4, 6])  # of the latter 3 workers compute 2, 1 and 1
def test_whoever_is_lost_each_sample_counts_once_in_each_epoch(sync: str, micro_batch: int, tmp_path: Path) -> None:
    found = story(tally(), sync, tmp_path, killed(1.1, 2.3), micro_batch=micro_batch)
    assert len(found.views) >= 3
    assert found.weights
    torch.testing.assert_close(counted(found), torch.full((SAMPLES,), float(EPOCHS)), rtol=1e-5, atol=0.0)


@pytest.mark.short(3)
@pytest.mark.parametrize("sync", [PERIODIC[0], *OTHERS, *DEALT])
def test_what_happens_alike_has_the_same_bits(sync: str, tmp_path: Path) -> None:
    adam = net(torch.optim.AdamW)
    first, again = (story(adam, sync, tmp_path / name, killed(0.9, 2.1)) for name in "ab")
    assert len(first.views) >= 3
    assert first.views == again.views
    assert first.weights == again.weights


@pytest.mark.parametrize("sync", [PERIODIC[0], "DiLoCo(every=6)"])
def test_who_is_replaced_before_the_round_is_taken_again_changes_no_bit(sync: str, tmp_path: Path) -> None:
    """Where optimizers remember nothing, else what the lost one remembered is gone."""
    whole = story(net(), sync, tmp_path / "whole")
    found = story(net(), sync, tmp_path / "again", killed(1.5), minimum=3)
    assert [len(view.members) for view in found.views] == [3, 3]
    assert 0 < found.views[1].start.step < STEPS
    assert found.weights == whole.weights


def test_after_a_checkpoint_replicas_are_alike_to_the_last_number(tmp_path: Path) -> None:
    """So nothing that a lost one remembered is gone, if the round that it was lost in began with one."""
    settings = {"checkpoint_every": 8, "minimum": 3}
    whole = story(net(torch.optim.AdamW), "LocalSGD(every=8)", tmp_path / "whole", **settings)
    found = story(net(torch.optim.AdamW), "LocalSGD(every=8)", tmp_path / "again", killed(1.9), **settings)
    assert [len(view.members) for view in found.views] == [3, 3]
    assert 0 < found.views[1].start.step < STEPS
    assert found.weights == whole.weights


@pytest.mark.parametrize("sync", ["LocalSGD(every=4)", "Gossip(synchronize_every=4)", DEALT[0]])
def test_who_leaves_does_so_where_all_meet_and_leaves_its_share(sync: str, tmp_path: Path) -> None:
    def leave(run: VirtualRun) -> None:
        def asked() -> None:
            run.processes[1].leave_requested = True
            run.processes[1].do(run.processes[1].agent.request_leave())

        run.scheduler.at(1.0, asked)

    found = story(tally(), sync, tmp_path, leave)
    assert found.results[1] is None
    assert len(found.views) == 2
    assert set(found.views[1].members) == {"0", "2"}
    assert found.views[1].start.step % 4 == 0 < found.views[1].start.step
    assert found.weights
    torch.testing.assert_close(counted(found), torch.full((SAMPLES,), float(EPOCHS)), rtol=1e-5, atol=0.0)


def test_who_is_left_alone_goes_on_with_the_outer_optimizer(tmp_path: Path) -> None:
    def all_but_one(run: VirtualRun) -> None:
        for number in range(2):
            run.scheduler.at(0.8, lambda number=number: run.kill(number))  # type: ignore[misc]
        run.scheduler.at(1.2, lambda: run.begin(3))

    found = story(net(), "DiLoCo(every=3)", tmp_path, all_but_one)
    assert [len(view.members) for view in found.views] == [3, 1, 2]
    assert found.views[2].start.step % 3 == 0
    assert found.weights
    shared = found.lives[3].state.progress
    assert shared is not None
    assert any(name.startswith("velocity/") for name in shared.shared)
    assert int(shared.shared["taken"]) == STEPS  # whoever came later is in the same rhythm


@pytest.mark.long
def test_real_workers_too_are_killed_replaced_and_asked_to_leave(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TASK)
    run = tmp_path / "run"

    def follows(number: int, *members: str) -> bool:
        def is_there() -> bool:
            return any(v["number"] >= number and set(v["members"]) == set(members) for v in events(run, "view"))

        return within(60, is_there)

    line = ("--workers", "3", "--sync", "DiLoCo(every=5)", "--steps", "1000000", "--checkpoint-every", "0")
    with running_training(tmp_path, "run", *line) as process:
        pids = {name: pid for pid, name in session(process.pid).items()}
        os.kill(pids["unisono worker 1"], signal.SIGKILL)
        assert follows(2, "0", "1.2", "2")
        os.kill(pids["unisono worker 0"], signal.SIGTERM)
        assert follows(3, "1.2", "2")
        done = last_step(run)
        assert within(30, lambda: last_step(run) >= done + 10)
        os.kill(process.pid, signal.SIGINT)
        words = stderr_of(process)
    assert process.returncode == 130, words
    begun = [view["step"] for view in events(run, "view")]
    assert begun == sorted(begun)
    assert all(step % 5 == 0 for step in begun)
    ((step, _),) = checkpoints(run / "checkpoints")
    assert step == last_step(run)


def test_a_milestone_gives_everything_back_and_takes_no_more_memory_the_next_time() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def now() -> tuple[str, Progress | None]:
        return state_digest(*named_state(model, optimizer, Progress())), milestone.progress

    milestone = Snapshot()
    assert milestone.restore(model, optimizer) is None
    milestone.take(model, optimizer, Progress(3))
    first = now()
    train()
    assert now() != first
    assert milestone.restore(model, optimizer) == Progress(3)  # where the optimizer had no state yet
    assert now() == first
    train()
    milestone.take(model, optimizer, Progress(4))
    lie, second = {x.data_ptr() for x in milestone._tensors.values()}, now()
    train()
    milestone.restore(model, optimizer)
    assert now() == second
    assert not lie & {x.data_ptr() for x in named_state(model, optimizer, Progress())[0].values()}
    train()
    milestone.take(model, optimizer, Progress(5))
    assert {x.data_ptr() for x in milestone._tensors.values()} == lie


def test_the_mean_is_of_those_who_have_something() -> None:
    def body(comm: Any) -> dict[str, Tensor]:
        mine = {"w": torch.full((2, 2), float(comm.rank)), "n": torch.tensor(10 + comm.rank)}
        return mean_of(comm, mine if comm.rank in (1, 3) else {}, LocalTensors(mine).shards, [1, 3])

    for found in outcomes(4, body):
        assert not isinstance(found, BaseException)
        torch.testing.assert_close(found, {"w": torch.full((2, 2), 2.0), "n": torch.tensor(11)}, rtol=0.0, atol=0.0)


def test_differing_is_what_one_has_otherwise() -> None:
    assert differing([{"a": "1", "b": "2"}]) == []
    assert differing([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1"}]) == ["b"]


@pytest.mark.parametrize(
    ("sync", "may"),
    [*((sync, True) for sync in PERIODIC + OTHERS + DEALT), ("ParameterServer()", False)],
)
def test_who_may_come_and_go(sync: str, may: bool) -> None:
    config = resolve_config(with_data(net()), {"sync": sync, "workers": 2, "global_batch": 8})
    assert config.recovers_from_loss is may
