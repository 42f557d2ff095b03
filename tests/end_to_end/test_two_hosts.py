"""Runs on two hosts, started by torchrun or by hand: the same bits as on one, and no hang when a host is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import training_runs
from tests.support.leftovers import session, within
from tests.support.two_hosts import ADDRESSES, Hosts, two_hosts
from unisono.tasks.source import NamedTask

pytestmark = pytest.mark.root
EXAMPLES = Path(__file__).parents[2] / "examples"
BLOBS = f"{EXAMPLES / 'custom_task.py'}:blobs"
UNISONO = (sys.executable, "-m", "unisono")
DEADLINE_SECONDS = 4.0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as made:
        yield made


def torchrun(hosts: Hosts, *script: str | Path, workers: int = 2) -> str:
    """What host 0 prints when `script` runs on `workers` workers of each host."""
    options = ["--nnodes", "2", "--nproc-per-node", str(workers), "--master-addr", ADDRESSES[0], "--no-python"]
    start = [sys.executable, "-m", "torch.distributed.run", *options, "--master-port", "29501"]
    both = [hosts.start(k, [*start, "--node-rank", str(k), "--", *script]) for k in (0, 1)]
    printed = [process.communicate(timeout=90)[0] for process in both]
    errors = [(home / "stderr").read_text() for home in hosts.homes]
    assert [process.returncode for process in both] == [0, 0], errors
    return printed[0]


@pytest.mark.long
def test_training_on_two_hosts_gives_the_weights_of_one_process_also_after_a_resume(
    hosts: Hosts, tmp_path: Path
) -> None:
    """The run lies on the first host only, and goes on with half as many workers."""
    train = [*UNISONO, "train", BLOBS]
    options = ["--compress", "Exact()", "--schedule", "Constant()", "--checkpoint-every", "2"]
    settings = {"compress": "Exact()", "schedule": "Constant()", "steps": 8}
    alone = training_runs.train(1, NamedTask(BLOBS, {}, str(tmp_path)), tmp_path / "alone", **settings)
    torchrun(hosts, *train, *options, "--steps", "5", "--run-dir", "run")
    torchrun(hosts, *train, "--run-dir", "run", "--resume", "--steps", "8", workers=1)
    assert list(hosts.homes[1].iterdir()) == [hosts.homes[1] / "stderr"]
    events = [json.loads(line) for line in (hosts.homes[0] / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [2, 4, 5, 6, 8]
    assert [event["first_step"] for event in events if event["event"] == "start"] == [0, 5]
    summary = json.loads((hosts.homes[0] / "run" / "summary.json").read_text())
    assert summary["weights_sha256"] == alone["weights_sha256"]


def test_a_custom_loop_on_two_hosts_gives_the_weights_of_one_process(hosts: Hosts) -> None:
    script = (sys.executable, EXAMPLES / "custom_loop.py")
    alone = subprocess.run(script, check=True, capture_output=True, text=True, timeout=60).stdout
    assert torchrun(hosts, *script, workers=1).splitlines()[-1] == alone.splitlines()[-1]


LOOP = """
import sys
import unisono
import torch

world = unisono.join(timeout_seconds=float(sys.argv[1]))
while True:
    print(world.mean(1.0), flush=True)
"""


@pytest.mark.short(1)
@pytest.mark.parametrize("way", ["killed", "unplugged"])
def test_a_host_that_is_lost_ends_the_other_within_the_deadline(way: str, hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    meeting = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29502", "WORLD_SIZE": "2"}
    meeting |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, script, str(DEADLINE_SECONDS)]
    first, second = (hosts.start(k, command, RANK=str(k), **meeting) for k in (0, 1))
    for process in (first, second):
        assert process.stdout is not None
        assert process.stdout.readline() == "1.0\n", [(home / "stderr").read_text() for home in hosts.homes]
    if way == "killed":
        for pid in session(second.pid):
            os.kill(pid, signal.SIGKILL)
    else:
        hosts.unplug()
    lost = time.monotonic()
    first.communicate(timeout=60)
    seconds = time.monotonic() - lost
    assert first.returncode == 1
    assert "unisono.errors.PeerLost: " in (hosts.homes[0] / "stderr").read_text()
    if way == "killed":
        assert seconds < DEADLINE_SECONDS
    else:
        assert DEADLINE_SECONDS < seconds < DEADLINE_SECONDS + 5
        assert within(DEADLINE_SECONDS, lambda: second.poll() is not None)
