"""A custom loop continues when a worker is killed, freezes, joins or leaves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.leftovers import within
from tests.support.observers import NoObserver
from unisono.elastic.extra_state import ExtraState, from_tensors, to_tensors
from unisono.elastic.loop_group import in_order
from unisono.errors import InvalidInput, RunFailed
from unisono.launch.failure import Failure
from unisono.launch.restart_policy import IndependentExit, JoinedLauncher, RestartFailed

STEPS, HIT = 400, 7
SCRIPT = """
import json, os, pathlib, signal, sys, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import unisono
from unisono.checkpoint import fingerprint

here, act, struck, sync = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], eval(f"unisono.{sys.argv[4]}")
place = os.environ.get("UNISONO_RANK", "0")
comes_back = act in ("SIGKILL", "SIGSTOP")
again = (here / "hit").exists()
world = unisono.join(threads=1, device="cpu")
if again:
    assert place == struck and world.rank > 0
torch.manual_seed(0 if not again else 5)  # who comes later takes over the weights of the others
random = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(96, 5, generator=random), torch.randn(96, 1, generator=random))
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = world.bind(model, optimizer, sync=sync, compress=unisono.Exact(), clip=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.98)
world.register_state("scheduler", scheduler)
saved, last = (sys.argv[5], int(sys.argv[6])) if len(sys.argv) > 5 else ("", STEPS)
if saved:
    world.load(saved)
seen = []

def hit():
    if place == struck and not (here / "hit").exists():
        (here / "hit").write_text(str(os.getpid()))
        os.kill(os.getpid(), getattr(signal, act))

for batches in world.steps(data, global_batch=12, micro_batch=3, steps=last, seed=1):
    optimizer.zero_grad()
    (here / f"back-{place}").touch() if batches.step > HIT else None
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        if batches.step >= HIT and act.startswith("SIG"):
            hit()
    taken = optimizer.step()
    scheduler.step()
    seen.append([batches.step, taken, world.size])
    if saved and taken and batches.step % 10 == 4:
        world.save(saved)
    mean = world.mean(1.0) if "asynchronous" not in sys.argv[4] else 1.0  # there each takes as many steps as it can
    if comes_back and batches.step > HIT and not (here / f"back-{struck}").exists():
        time.sleep(0.05)  # steps go on until the one that was hit is back
        if act == "SIGSTOP" and batches.step == HIT + 8 and world.rank == 0:
            os.kill(int((here / "hit").read_text()), signal.SIGCONT)

told = {"seen": seen, "weights": fingerprint(model.state_dict()), "lr": scheduler.get_last_lr()[0], "mean": mean}
(here / f"told-{place}.json").write_text(json.dumps(told))
if world.rank == 0:
    print("weights", told["weights"])
world.close()
""".replace("STEPS", str(STEPS)).replace("HIT", str(HIT))


def looped(
    path: Path, act: str, struck: str, *how: str, sync: str = "AllReduce()", saved: tuple[str, ...] = ()
) -> tuple[dict[str, dict[str, Any]], subprocess.CompletedProcess[str]]:
    """What each worker told, by its place, and what the command printed."""
    path.mkdir(exist_ok=True)
    script = path / "loop.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *how, str(script), str(path), act, struck, sync, *saved]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=path, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL, env=environment
    )
    assert done.returncode == 0, done.stderr
    return {p.stem[5:]: json.loads(p.read_text()) for p in path.glob("told-*.json")}, done


LAUNCH = ("-m", "unisono", "launch", "--workers", "3", "--run-dir", "run")


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one worker tells that nothing happens to."""
    told, _ = looped(tmp_path_factory.mktemp("peace"), "none", "")
    return told["0"]


@pytest.mark.short(1)
@pytest.mark.parametrize(("act", "struck"), [("SIGKILL", "0"), ("SIGSTOP", "1")])
def test_weights_are_those_of_a_run_in_peace(tmp_path: Path, peace, act: str, struck: str) -> None:
    """One of three is hit in the middle of a step, and is there again, or another in its place, before the end."""
    told, done = looped(tmp_path, act, struck, *LAUNCH)
    assert told.keys() == {"0", "1", "2"}
    for each in told.values():
        assert (each["weights"], each["lr"], each["mean"]) == (peace["weights"], peace["lr"], 1.0)
    for place in told.keys() - {struck}:  # has taken every step once, and been given the one in hand again
        seen = told[place]["seen"]
        assert [step for step, taken, _ in seen if taken] == list(range(STEPS))
        assert HIT in [step for step, taken, _ in seen if not taken]
        assert {2, 3} <= {size for _, _, size in seen}
    late = [step for step, taken, _ in told[struck]["seen"] if taken and step > HIT]
    assert late == list(range(late[0], STEPS))
    assert HIT < late[0] < STEPS - 1
    assert done.stdout.count("weights") == 1  # whoever is worker 0 at the end is shown
    assert (
        "worker 0 was killed by SIGKILL (out of memory?): 2 workers continue, a replacement is started" in done.stderr
    ) == (act == "SIGKILL")


@pytest.mark.long
def test_a_loop_that_goes_on_from_a_checkpoint_takes_no_step_twice(tmp_path: Path, peace) -> None:
    """On another number of workers, one of which is killed: those that are left do not begin anew."""
    before, _ = looped(tmp_path, "none", "", saved=("saved", "5"))
    assert [step for step, _, _ in before["0"]["seen"]] == list(range(5))
    told, _ = looped(tmp_path, "SIGKILL", "1", *LAUNCH, saved=("saved", str(STEPS)))
    for place in ("0", "2"):
        assert told[place]["weights"] == peace["weights"]
        assert [step for step, taken, _ in told[place]["seen"] if taken] == list(range(5, STEPS))
        assert HIT in [step for step, taken, _ in told[place]["seen"] if not taken]


LEAVING = """
import sys
import torch
import unisono

who, at_step = sys.argv[1].split(), int(sys.argv[2])
world = unisono.join(threads=1, device="cpu")
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = world.bind(model, optimizer)
place = str(world.rank)
for batches in world.steps(torch.randn(96, 5), global_batch=12, micro_batch=3, steps=200):
    optimizer.zero_grad()
    for x in batches:
        model(x).square().mean().backward()
    optimizer.step()
    if place in who and batches.step == at_step:
        sys.exit(0)
sys.exit(0)
"""
INSIDE = "user code called sys.exit(0) on leaving.py:18 <module>"


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("who", "options", "said"),
    [
        ("0 1", [], ""),
        ("", ["--no-elastic"], ""),
        ("1", [], f"worker 1: {INSIDE}, inside its loop over world.steps, which the others continued\n"),
        ("1", ["--no-elastic"], f"its process is gone; worker 1 had exited before: {INSIDE}\n"),
    ],
    ids=["all", "at the end", "one", "one that is needed"],
)
def test_a_script_that_leaves_a_loop_that_others_go_on_with_has_failed(
    who: str, options: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    command = [sys.executable, "-m", "unisono", "launch", "--workers", "2", *options, "leaving.py", who, "20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr.endswith(said)) == (bool(said), True), done.stderr


ELSEWHERE = """
import os
import sys
import torch
import unisono

torch.manual_seed(0)
world = unisono.join(threads=1, device="cpu")
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = world.bind(model, optimizer)
together = 0
for batches in world.steps(torch.randn(96, 5), global_batch=12, micro_batch=3, steps=1_000_000):
    optimizer.zero_grad()
    for x in batches:
        model(x).square().mean().backward()
    optimizer.step()
    together += world.size == 2
    if together == 20 and (sys.argv[1] == "both" or "JOINED" in os.environ):
        sys.exit(0)
"""


@pytest.mark.long
@pytest.mark.parametrize("who", ["one", "both"])
def test_the_only_worker_of_a_host_that_leaves_a_loop_has_failed_if_others_go_on(who: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ELSEWHERE)
    unisono = [sys.executable, "-m", "unisono"]
    given = {"cwd": tmp_path, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    launch = [*unisono, "launch", "--workers", "1:2", "--run-dir", "run", "own.py", who]
    with subprocess.Popen(launch, **given, text=True, start_new_session=True) as first:
        assert within(60, lambda: list(tmp_path.glob("run/coordinator/contact.json")))
        join = [*unisono, "join", "--run-dir", "run"]
        joined = subprocess.run(join, **given, text=True, timeout=120, env={**os.environ, "JOINED": "yes"})
        if who == "one":
            assert joined.returncode == 1, joined.stderr
            assert joined.stderr.endswith("inside its loop over world.steps, which the others continued\n")
            first.terminate()
        else:
            assert joined.returncode == 0, joined.stderr
        _, err = first.communicate(timeout=60)
        assert first.returncode == (143 if who == "one" else 0), err


@pytest.mark.long
def test_a_worker_that_is_asked_to_leave_does(tmp_path: Path, peace) -> None:
    told, done = looped(tmp_path, "SIGTERM", "2", *LAUNCH)
    assert told.keys() == {"0", "1"}
    assert {each["weights"] for each in told.values()} == {peace["weights"]}
    assert "worker 2 has left: 2 workers continue" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("sync", ["LocalSGD(every=5)", "DiLoCo(every=5)", "Gossip(synchronize_every=5)"])
def test_replicas_that_walk_take_the_round_again(tmp_path: Path, peace, sync: str) -> None:
    """One of three is killed on its way from one meeting to the next: its steps are gone, so all others go back."""
    told, done = looped(tmp_path, "SIGKILL", "1", *LAUNCH, sync=sync)
    assert told.keys() == {"0", "1", "2"}
    assert len({each["weights"] for each in told.values()}) == 1
    assert {each["lr"] for each in told.values()} == {peace["lr"]}
    for place in ("0", "2"):
        steps = [step for step, _, _ in told[place]["seen"]]
        back = [at for at in range(1, len(steps)) if steps[at] != steps[at - 1] + 1]
        assert [steps[at] for at in back] == [5], steps
        assert HIT <= steps[back[0] - 1] < 10
        assert steps[-1] == STEPS - 1
    assert (
        "worker 1 was killed by SIGKILL (out of memory?): 2 workers continue, a replacement is started" in done.stderr
    )


@pytest.mark.long
def test_who_is_dealt_its_work_takes_again_what_was_dealt_out_since_all_met(tmp_path: Path, peace) -> None:
    """Workers wait for each other only to synchronize, at every fifth step."""
    told, _ = looped(tmp_path, "SIGKILL", "1", *LAUNCH, sync="Gossip(asynchronous=True,synchronize_every=5)")
    assert told.keys() == {"0", "1", "2"}
    assert len({each["weights"] for each in told.values()}) == 1
    assert max(step for each in told.values() for step, _, _ in each["seen"]) == STEPS - 1
    for place in ("0", "2"):
        steps = [step for step, _, _ in told[place]["seen"]]
        (back,) = (at for at in range(1, len(steps)) if steps[at] < steps[at - 1])
        assert 0 < 5 * (steps[back - 1] // 5) <= steps[back] <= steps[back - 1], steps


@pytest.mark.long
def test_a_walker_that_is_asked_to_leave_leaves_its_share(tmp_path: Path, peace) -> None:
    told, done = looped(tmp_path, "SIGTERM", "2", *LAUNCH, sync="LocalSGD(every=5)")
    assert told.keys() == {"0", "1"}
    for each in told.values():
        assert (each["weights"], each["lr"]) == (told["0"]["weights"], peace["lr"])
        assert [step for step, taken, _ in each["seen"] if taken] == list(range(STEPS))
        assert {size for step, _, size in each["seen"] if step < 10} == {3}  # until the meeting
    assert "worker 2 has left: 2 workers continue" in done.stderr


class Thing:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"state": self.state}

    def load_state_dict(self, state: Any, /) -> None:
        self.state = state["state"]


def scheduled(kind: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)
    return optimizer, kind(optimizer)


SCHEDULERS = [
    lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3], 0.5),
    lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_kept_scheduler_goes_on_elsewhere_as_it_would_have_here(kind: Any) -> None:
    (here, mine), (there, theirs) = scheduled(kind), scheduled(kind)
    kept, other = ExtraState(here), ExtraState(there)
    kept.add("scheduler", mine)
    other.add("scheduler", theirs)
    for optimizer in (here, there):
        optimizer.step()
    for _ in range(2):
        mine.step()
    other.load_state_dict(kept.state_dict())
    for _ in range(4):
        assert here.param_groups[0]["lr"] == there.param_groups[0]["lr"]
        mine.step()
        theirs.step()


def test_what_is_kept_goes_back() -> None:
    optimizer, scheduler = scheduled(SCHEDULERS[2])
    kept, thing = ExtraState(optimizer), Thing([1.5, {"a": (True, None), 7: "x"}, torch.ones(2, dtype=torch.bfloat16)])
    kept.add("scheduler", scheduler)
    kept.add("thing", thing)
    before = kept.state_dict()
    optimizer.step()
    scheduler.step()
    thing.state[0] = 9.0
    thing.state[2] += 1
    kept.load_state_dict(before)
    assert thing.state[:2] == [1.5, {"a": (True, None), 7: "x"}]
    assert torch.equal(thing.state[2], torch.ones(2, dtype=torch.bfloat16))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize(
    "value", [None, float("inf"), -0.0, 1 << 80, "ü", [], {}, [[]], {"a": [{}]}, ((),), {1, "a"}, b"\x00"]
)
def test_what_is_written_is_read(value: Any) -> None:
    assert from_tensors("x", to_tensors("x", value)) == value


def test_what_cannot_be_kept_is_named() -> None:
    optimizer, scheduler = scheduled(SCHEDULERS[2])
    kept = ExtraState(optimizer)
    with pytest.raises(InvalidInput, match=r"thing\['state'\]\[1\] = object: it cannot be sent"):
        kept.add("thing", Thing([1, object()]))
    with pytest.raises(InvalidInput, match="losses = list: it has no state_dict"):
        kept.add("losses", [])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="name = a/b: a name must not contain '/'"):
        kept.add("a/b", scheduler)
    with pytest.raises(InvalidInput, match=r"name = \(nothing\): a name must not be empty"):
        kept.add("", scheduler)
    kept.add("scheduler", scheduler)
    with pytest.raises(InvalidInput, match="name = scheduler: an object is already registered under it"):
        kept.add("scheduler", scheduler)
    with pytest.raises(InvalidInput, match="register_state = nothing: other workers have scheduler"):
        ExtraState(optimizer).load_state_dict(kept.state_dict())


def test_who_was_there_first_keeps_its_number() -> None:
    assert in_order(["2", "0", "1"]) == ["0", "1", "2"]
    assert in_order(["2", "1", "0.2", "host-1:0"]) == ["1", "2", "0.2", "host-1:0"]
    assert in_order(["2", "host-1:0", "0.2", "10"]) == ["2", "10", "host-1:0", "0.2"]


def policy() -> IndependentExit:
    found = IndependentExit(RestartFailed(3, NoObserver()), range(3))
    for place in range(3):
        found.next_name(place)
        found.on_message({"kind": "loop", "place": place})
    return found


def test_who_dies_before_all_have_come_to_the_loop_ends_the_run() -> None:
    """What they do together before, from meeting each other to the same first weights, takes all of them."""
    found, what = IndependentExit(RestartFailed(3, NoObserver()), range(3)), Failure(1, 0.0, "killed by SIGKILL")
    found.on_message({"kind": "loop", "place": 0})
    assert found.worker_failed(replace(what, rank=0), 2, 1.0).restart_in_seconds == 0
    cause = found.worker_failed(what, 2, 1.0).failure
    assert cause is not None
    assert cause.error().args[0] == (
        "worker 1 failed: killed by SIGKILL, before its loop over world.steps began: a lost worker is replaced only "
        "inside the loop"
    )
    assert found.worker_failed(replace(what, rank=2), 2, 1.0).restart_in_seconds == 0  # the last of them


def test_who_dies_in_the_loop_is_replaced_and_after_it_is_not() -> None:
    found, what = policy(), Failure(1, 0.0, "killed by SIGKILL")
    assert found.worker_failed(what, 2, 1.0).restart_in_seconds == 0
    found.on_message({"kind": "over", "place": 0})
    cause = found.worker_failed(what, 2, 1.0).failure
    assert cause is not None
    assert (
        cause.reason == "killed by SIGKILL, after the loop over world.steps had ended: no worker is replaced any more"
    )


def test_all_whose_loop_is_over_are_waited_for_and_nobody_else() -> None:
    found = policy()
    assert not found.is_complete([True, None, None])  # a script without a loop
    for place in (0, 2):
        found.on_message({"kind": "over", "place": place})
    assert not found.is_complete([True, None, None])
    assert found.is_complete([True, None, True])
    found.on_message({"kind": "over", "place": 1})
    assert not found.is_complete([True, None, True])


def test_who_left_is_told_and_who_came_to_the_end_is_not() -> None:
    found = policy()
    assert found.worker_returned(1, None, 2).notice == "worker 1 has left: 2 workers continue"
    assert found.worker_returned(0, True, 1).notice == ""
    assert found.incomplete_reason([None, None, None]).startswith("every worker was asked to leave")


@pytest.mark.parametrize(
    ("others_continue", "over", "fails"), [(True, False, True), (False, False, False), (True, True, False)],
    ids=["others go on", "that was the end for all", "the loop is over"],
)  # fmt: skip
def test_all_of_a_launcher_who_end_inside_the_loop_have_failed_where_others_go_on(others_continue, over, fails) -> None:
    class Elsewhere(NoObserver):
        def others_continue(self, without: Set[str]) -> bool:
            assert without == {"host:0", "host:1"}
            return others_continue

    found = IndependentExit(JoinedLauncher(2, Elsewhere(), "host:"))
    for place in range(2):
        found.next_name(place)
        found.on_message({"kind": "loop", "place": place})
        found.on_message({"kind": "ended", "place": place, "text": "its script finished"})
    if over:
        found.on_message({"kind": "over", "place": 0})
    words = r"worker host:0: its script finished, inside its loop .* the others continued"
    with pytest.raises(RunFailed, match=words) if fails else contextlib.nullcontext():
        assert found.incomplete_reason([True, True]) == ""
