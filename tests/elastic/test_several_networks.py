"""A worker is killed in a step or after it: a step that is void leaves no trace, one that was taken counts once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.replacements import environment

STEPS, HIT = 30, 7
SCRIPT = """
import os, pathlib, signal, sys
import torch
from torch import nn
from torch.nn import functional as F
import unisono
from tests.support.replacements import await_replacement
from unisono.checkpoint import fingerprint

here, where = pathlib.Path(sys.argv[1]), sys.argv[2]
place = os.environ.get("UNISONO_RANK", "0")
world = unisono.join(threads=1, device="cpu")
torch.manual_seed(0)
data = torch.randn(96, 4, generator=torch.Generator().manual_seed(3))
generator = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
step_g = torch.optim.Adam(generator.parameters(), lr=1e-2)
step_j = torch.optim.Adam(judge.parameters(), lr=1e-2)
generator, judge, step_g, step_j = world.bind(generator, judge, step_g, step_j, compress=unisono.Exact())
seen = []

def hit(now, step):
    if place == "1" and now == where and step >= HIT and not (here / "hit").exists():
        (here / "hit").touch()
        os.kill(os.getpid(), signal.SIGKILL)

for batches in world.steps(data, global_batch=12, micro_batch=3, steps=STEPS, seed=1):
    step_j.zero_grad()
    for real in batches:
        fake = generator(torch.randn(len(real), 2)).detach()
        (F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()).backward()
        hit("first pass", batches.step)
    first = step_j.step()
    hit("between", batches.step)
    step_g.zero_grad()
    for real in batches:
        F.softplus(-judge(generator(torch.randn(len(real), 2)))).mean().backward()
        hit("second pass", batches.step)
    second = step_g.step()
    seen.append((batches.step, first, second, world.size))
    if (here / "hit").exists() and batches.step == HIT + 2:
        await_replacement(world, 3)
if world.rank == 0:
    print("void", [each[:3] for each in seen if not (each[1] and each[2])])
    weights = {f"{i}/{k}": v for i, m in enumerate((generator, judge)) for k, v in m.state_dict().items()}
    print("weights", fingerprint(weights))
world.close()
""".replace("STEPS", str(STEPS)).replace("HIT", str(HIT))


def looped(path: Path, where: str, *how: str, script: str = SCRIPT) -> dict[str, str]:
    """What worker 0 printed, by its first words."""
    path.mkdir(exist_ok=True)
    (path / "loop.py").write_text(script)
    done = subprocess.run(
        [sys.executable, *how, "loop.py", str(path), where], cwd=path, capture_output=True, text=True, timeout=150,
        stdin=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("void", "weights")))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one worker prints that nothing happens to."""
    return looped(tmp_path_factory.mktemp("undisturbed"), "nowhere")


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("where", "void"),
    [("second pass", [(HIT, True, False)]), ("between", [(HIT, True, False)]), ("first pass", [(HIT, False, False)])],
)
def test_a_step_of_two_networks_that_a_worker_is_lost_in_is_taken_again(
    where: str, void: list, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """The others go back to before the step, also where the first of two optimizers has stepped already."""
    told = looped(tmp_path, where, "-m", "unisono", "launch", "--workers", "3", "--run-dir", "run")
    assert told == {"void": str(void), "weights": undisturbed["weights"]}


AFTER_STEP = """
import os, pathlib, signal, sys
import torch
from torch import nn
import unisono
from unisono.checkpoint import fingerprint

here, averages = pathlib.Path(sys.argv[1]), sys.argv[2] == "mean"
world = unisono.join(threads=1, device="cpu")
torch.manual_seed(0)
data = torch.randn(96, 4, generator=torch.Generator().manual_seed(3))
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
model, optimizer = world.bind(model, torch.optim.Adam(model.parameters(), lr=1e-2), compress=unisono.Exact())
taken = []
for batches in world.steps(data, global_batch=12, micro_batch=3, steps=STEPS, seed=1):
    optimizer.zero_grad()
    for x in batches:
        model(x).square().mean().backward()
    if optimizer.step():
        taken.append(batches.step)
    struck = os.environ.get("UNISONO_RANK") == "1" and batches.step >= HIT and not (here / "hit").exists()
    if struck and sys.argv[2] != "nowhere":
        (here / "hit").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if averages:
        world.mean(1.0)
if world.rank == 0:
    print("void", taken == list(range(STEPS)))
    print("weights", fingerprint(model.state_dict()))
world.close()
""".replace("STEPS", str(STEPS)).replace("HIT", str(HIT))


@pytest.mark.short(1)
@pytest.mark.parametrize("how", ["mean", "next step"])
def test_a_step_that_was_taken_counts_once_where_a_worker_is_lost_right_after_it(how: str, tmp_path: Path) -> None:
    """Whether the loss shows in a mean after the step or in the next step."""
    alone = looped(tmp_path / "alone", "nowhere", script=AFTER_STEP)
    launch = ("-m", "unisono", "launch", "--workers", "3", "--run-dir", "run")
    assert looped(tmp_path / "launched", how, *launch, script=AFTER_STEP) == alone
