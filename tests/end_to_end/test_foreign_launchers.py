"""`unisono train` and a custom loop under torchrun, mpirun and Slurm: the same weights as under our launcher."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import slurm_cluster
from tests.support.leftovers import processes, within
from unisono.checkpoint import checkpoints

EXAMPLES = Path(__file__).parents[2] / "examples"
UNISONO = [sys.executable, "-m", "unisono"]
BLOBS = [*UNISONO, "train", f"{EXAMPLES / 'custom_task.py'}:blobs"]
TRAIN = [*BLOBS, "--steps", "5", "--checkpoint-every", "2", "--compress", "Exact()"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", "--"]
MPIRUN = ["mpirun", "-np", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def printed(command: list[str], at: Path, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=at, env=environ, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def weights(run: Path) -> str:
    digest: str = json.loads((run / "summary.json").read_text())["weights_sha256"]
    return digest


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What our launcher comes to: the weights of `TRAIN`, and the last line of the custom loop."""
    at = tmp_path_factory.mktemp("ours")
    printed([*TRAIN, "--workers", "2", "--run-dir", "run"], at)
    lines = printed([*UNISONO, "launch", "--workers", "2", str(EXAMPLES / "custom_loop.py")], at)
    return weights(at / "run"), lines.splitlines()[-1]


@contextmanager
def launcher(name: str, at: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The words that start two workers, and the environment for them."""
    needed = {"torchrun": (), "mpirun": ("mpirun",), "srun": slurm_cluster.PROGRAMS}[name]
    if missing := [program for program in needed if shutil.which(program) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")
    if name != "srun":
        yield {"torchrun": TORCHRUN, "mpirun": MPIRUN}[name], dict(os.environ)
        return
    if os.geteuid() != 0:
        pytest.skip("the toy cluster's daemons want to be root")
    with slurm_cluster.cluster(at) as environ:
        yield ["srun", "-N1", "-n2", "--kill-on-bad-exit=1"], environ


@pytest.mark.long
@pytest.mark.parametrize("name", ["torchrun", "mpirun", "srun"])
def test_under_launchers_of_others_the_weights_are_the_same(name: str, ours: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    with launcher(name, tmp_path / "cluster") as (start, environ):
        printed([*start, *TRAIN, "--run-dir", "run"], tmp_path, environ)
        loop = printed([*start, sys.executable, str(EXAMPLES / "custom_loop.py")], tmp_path, environ)
    assert weights(tmp_path / "run") == ours[0]
    assert loop.splitlines()[-1] == ours[1]
    written = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in written if event["event"] == "checkpoint"] == [2, 4, 5]


@pytest.mark.long
def test_workers_of_another_launcher_that_are_asked_to_end_do_not_count_as_done(tmp_path: Path) -> None:
    """torchrun itself is spared: it would ask its workers by the same signal."""
    run, words = tmp_path / "run", ["--steps", "1000000", "--checkpoint-every", "0", "--workers", "2"]
    line = [*TORCHRUN, *BLOBS, *words, "--run-dir", str(run)]
    with subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert within(90, lambda: '"event": "step"' in text(run / "events.jsonl"))
            asked = processes(str(run)).keys() - {process.pid}
            assert len(asked) == 2
            for pid in asked:
                os.kill(pid, signal.SIGTERM)
            assert process.stderr is not None
            said = process.stderr.read()
        finally:
            for pid in processes(str(run)):
                os.kill(pid, signal.SIGKILL)
    summary = json.loads(text(run / "summary.json"))
    assert not summary["complete"]
    assert f"interrupted by SIGTERM: {summary['ending']}\n" in said
    assert set(re.findall(r"exitcode *: (\d+)", said)) == {"143"}
    assert [step for step, _ in checkpoints(run / "checkpoints")] == [summary["steps"]]
    assert process.returncode == 1  # which is torchrun's for any failure


TWICE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

x = torch.linspace(-1, 1, 64)[:, None]
task = unisono.Task(
    model=lambda: nn.Linear(1, 1),
    data=TensorDataset(x, 2 * x),
    loss=lambda output, batch: (output - batch[1]).square().mean(),
)
for steps in (3, 6):
    result = unisono.train(task, unisono.Config(steps=steps, global_batch=16, micro_batch=4, compress=unisono.Exact()))
    if result is not None:
        print(result.steps, result.weights_sha256)
"""


@pytest.mark.long
def test_a_script_may_train_twice_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    alone = printed([sys.executable, str(script)], tmp_path).splitlines()
    assert [line.split()[0] for line in alone] == ["3", "6"]
    assert printed([*TORCHRUN, sys.executable, str(script)], tmp_path).splitlines() == alone


DDP = """
import os
from datetime import timedelta
from pathlib import Path
import torch
from torch import distributed as dist, nn

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
assert dist.get_world_size() == int(os.environ["LOCAL_WORLD_SIZE"]) == 2
assert dist.get_rank() == int(os.environ["LOCAL_RANK"])
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
random = torch.Generator().manual_seed(dist.get_rank())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=random)).square().mean().backward()
    optimizer.step()
where = [line.split()[1:4] for kind in ("tcp", "tcp6") for line in Path("/proc/net", kind).open()]
port = f"{int(os.environ['MASTER_PORT']):04X}"
listens = {at.split(":")[0] for at, _, state in where if at.endswith(f":{port}") and state == "0A"}
dist.barrier()
if dist.get_rank() == 0:
    print("listens on", listens, flush=True)
    print([p.flatten().tolist() for p in model.parameters()])
dist.destroy_process_group()
"""


def test_a_script_of_torch_distributed_runs_as_under_torchrun(tmp_path: Path) -> None:
    """And what it meets in can be reached from this host alone."""
    (tmp_path / "ddp.py").write_text(DDP)
    theirs = printed([*TORCHRUN, sys.executable, "ddp.py"], tmp_path).splitlines()
    ours = printed([*UNISONO, "launch", "--workers", "2", "ddp.py"], tmp_path).splitlines()
    assert ours[-1] == theirs[-1]
    assert ours[0] == "listens on {'0100007F'}"


LEAVING = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(9):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        END
"""


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit(0)", "; worker 1 had exited before: user code called sys.exit(0) on leaving.py:10 <module>\n"),
        ("raise ValueError('bad')", "\n\nworker 1 failed: ValueError: bad\n"),
    ],
)
def test_the_cause_of_an_error_of_torch_distributed_is_named(end: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING.replace("END", end))
    line = [*UNISONO, "launch", "--workers", "2", "leaving.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr.endswith(said)) == (1, True), done.stderr
