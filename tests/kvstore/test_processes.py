"""The same laws on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kvstore.reference import Reference, sgd, two_bit
from tests.kvstore.stores import SHAPE, gradients, normal, pulled, with_store
from tests.support import processes
from tests.support.communicators import connected
from unisono.kvstore import KVStore

STEPS = 4


def training(kv: KVStore) -> list[np.ndarray]:
    """Exact sums, compressed ones and an optimizer, each on a value that is divided and one that is not."""
    kv.init(["large", "small"], [normal(0), np.zeros(2, np.float32)])
    found = []
    for step in range(STEPS):
        kv.push(["large", "small"], [gradients(kv.rank, step)[0], np.ones(2)])
        found.append(pulled(kv, "large"))
    kv.set_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.75})
    for step in range(STEPS):
        kv.push(["large", "small"], [gradients(kv.rank, step)[0], np.ones(2)])
        found.append(pulled(kv, "large"))
    return found


def expected(size: int) -> list[np.ndarray]:
    plain = Reference(normal(0))
    found = []
    for step in range(STEPS):
        plain.push([gradients(worker, step) for worker in range(size)])
        found.append(plain.value.copy())
    trained = Reference(plain.value, sgd(0.1, 0.9), two_bit(0.75))
    for step in range(STEPS):
        trained.push([gradients(worker, step) for worker in range(size)])
        found.append(trained.value.copy())
    return found


@pytest.mark.parametrize(("kind", "size"), [("gloo", 2), ("shared_memory", 3)])
def test_a_synchronous_store(kind, size, tmp_path) -> None:
    arguments = ("dist_sync", training, (), {"bigarray_bound": 10})
    found = processes.run(size, connected, kind, f"file://{tmp_path}/meeting", 60.0, with_store, *arguments)
    for mine in found:
        np.testing.assert_allclose(mine, expected(size), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(mine, found[0])


def add(key: object, received, stored) -> None:
    stored += received


def counting(kv: KVStore) -> np.ndarray:
    kv.set_updater(add)
    kv.init("w", np.zeros(SHAPE))
    for step in range(50):
        kv.push("w", np.ones(SHAPE))
        assert (pulled(kv, "w") >= step + 1).all()
    kv.barrier()
    return pulled(kv, "w")


def test_an_asynchronous_store(tmp_path) -> None:
    arguments = ("dist_async", counting, (), {"bigarray_bound": 10})
    for found in processes.run(2, connected, "gloo", f"file://{tmp_path}/meeting", 60.0, with_store, *arguments):
        assert (found == 100).all()


SCRIPT = """
import json
import numpy as np
from unisono import kvstore

kv = kvstore.create("dist_sync")
kv.init("w", np.zeros(3))
kv.push("w", np.full(3, kv.rank + 1.0))
out = np.zeros(3)
kv.pull("w", out=out)
if kv.rank == 0:
    print(json.dumps([kv.type, kv.num_workers, out.tolist()]))
kv.close()
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_script_joins_the_run_by_itself(workers, tmp_path: Path) -> None:
    """Under `unisono launch`, and without any launcher."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "unisono", "launch", "--workers", str(workers)] if workers else []
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    size = workers or 1
    assert json.loads(done.stdout.splitlines()[0]) == ["dist_sync", size, [size * (size + 1) / 2] * 3]
