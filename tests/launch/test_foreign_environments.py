"""Other launchers, for real: `identify` reads the environment variables that they set."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import slurm_cluster

TELL = [sys.executable, str(Path(slurm_cluster.__file__).with_name("print_identity.py"))]


def told(command: Sequence[str], environ: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What each worker reported, by rank; all must have the same rendezvous."""
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    workers = sorted(map(json.loads, done.stdout.splitlines()), key=lambda worker: worker["rank"])
    assert [worker["rank"] for worker in workers] == list(range(len(workers)))
    assert {worker["size"] for worker in workers} == {len(workers)}
    assert len({worker["rendezvous"] for worker in workers}) == 1
    return workers


def local(workers: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(worker["local_rank"], worker["local_size"]) for worker in workers]


def need(*programs: str) -> None:
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def test_torchrun() -> None:
    options = ["--standalone", "--nproc-per-node=2", "--no-python"]
    workers = told([sys.executable, "-m", "torch.distributed.run", *options, *TELL])
    assert local(workers) == [(0, 2), (1, 2)]
    assert workers[0]["launcher"] == "torchrun"
    assert workers[0]["rendezvous"].endswith("?attempt=0&served=1")


def test_open_mpi() -> None:
    need("mpirun")
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    workers = told(["mpirun", "-np", "3", *options, *TELL])
    assert local(workers) == [(0, 3), (1, 3), (2, 3)]
    assert workers[0]["launcher"] == "openmpi"
    assert workers[0]["rendezvous"].startswith("tcp://127.0.0.1:")


def test_slurm(tmp_path: Path) -> None:
    need(*slurm_cluster.PROGRAMS)
    if os.geteuid() != 0:
        pytest.skip("the toy cluster's daemons want to be root")
    with slurm_cluster.cluster(tmp_path) as environ:
        two_nodes = told(["srun", "-N2", "-n3", *TELL], environ)
        assert local(two_nodes) == [(0, 2), (1, 2), (0, 1)]
        assert two_nodes[0]["rendezvous"].startswith("tcp://n1:")
        one_node = told(["srun", "-N1", "-n2", *TELL], environ)
        assert local(one_node) == [(0, 2), (1, 2)]
        assert one_node[0]["rendezvous"].startswith("tcp://127.0.0.1:")
        assert {worker["launcher"] for worker in two_nodes + one_node} == {"slurm"}
        batch = tmp_path / "batch.sh"
        output = tmp_path / "batch.out"
        batch.write_text(f"#!/bin/sh\n{' '.join(TELL)} >{output}\n")
        subprocess.run(["sbatch", "-W", "-n2", "-o", "/dev/null", str(batch)], env=environ, timeout=60, check=True)
        assert json.loads(output.read_text())["launcher"] == "none"
