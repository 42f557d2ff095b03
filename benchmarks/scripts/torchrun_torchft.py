"""The task of `sample_counting_model.py`, trained by peers that survive failures: torchrun and torchft.

Started by torchrun with ``--max-restarts``: DDP on gloo. After a failure all workers restart from the last checkpoint,
which rank 0 writes every few steps. Each attempt has its own key prefix in torchrun's store, because the keys of the
attempt before still exist.

Started alone (``torchft``): a lighthouse and three replicas of one worker each; a killed one is restarted at once.
Gradients are averaged by `Manager.allreduce` of one flat tensor. The replicas that take part in a step share its
micro-batches, so that none is left out.

All have the model, the order of samples, the optimizer and the micro-batches of ``unisono train``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.data import MicroBatchPlan, assign

sys.path.insert(0, str(Path(__file__).parent))
from sample_counting_model import GLOBAL_BATCH, MICRO_BATCH, SAMPLES, Tallied, loss, marks, optimizer, samples

PLAN = MicroBatchPlan(SAMPLES, GLOBAL_BATCH, MICRO_BATCH)
PAUSE_SECONDS = 0.02  # between two looks at the replicas of torchft


def build(asked: argparse.Namespace, marked: bool) -> tuple[Tallied, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Tallied(asked.folder, asked.layers)
    return model, optimizer(model.parameters(), asked.folder, marked=marked)


def batches(rows: Tensor, step: int, rank: int, size: int) -> Iterator[tuple[list[Tensor], bool]]:
    """One worker's micro-batches of a step, and whether it is the last."""
    mine = assign(PLAN.micro_batches, [1.0] * size)[rank]
    for m in mine:
        yield [rows[PLAN.indices(step, m)]], m == mine[-1]


def with_torchrun(asked: argparse.Namespace) -> None:
    """For ever."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    served = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    store = dist.PrefixStore(f"attempt/{os.environ['TORCHELASTIC_RESTART_COUNT']}", served)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model, steps = build(asked, marked=True)
    kept, first = asked.folder / "checkpoint.pt", 0
    if kept.exists():
        found = torch.load(kept)
        model.load_state_dict(found["model"])
        steps.load_state_dict(found["optimizer"])
        first = found["step"]
    called, rows = DistributedDataParallel(model), samples().tensors[0]
    for step in count(first):
        steps.zero_grad()
        each = PLAN.micro_batches // size
        for batch, last in batches(rows, step, rank, size):
            with contextlib.nullcontext() if last else called.no_sync():
                (loss(called(batch[0]), batch) / each).backward()
        steps.step()
        if rank == 0 and (step + 1) % asked.checkpoint_every == 0:
            state = {"model": model.state_dict(), "optimizer": steps.state_dict(), "step": step + 1}
            torch.save(state, kept.with_suffix(".part"))
            kept.with_suffix(".part").rename(kept)


def with_torchft(asked: argparse.Namespace) -> None:
    """One replica, for ever."""
    from torchft import Manager, ProcessGroupGloo

    model, steps = build(asked, marked=False)
    parameters, (tally,) = list(model.parameters()), [p for p in model.parameters() if p.shape == (SAMPLES,)]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        steps.load_state_dict(state["optimizer"])

    store, long = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), timedelta(seconds=20)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=long), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": steps.state_dict()}, use_async_quorum=False,
        timeout=long, quorum_timeout=long, connect_timeout=long, rank=0, world_size=1, store_addr="127.0.0.1",
        store_port=store.port, hostname="127.0.0.1", lighthouse_addr=asked.lighthouse,
        replica_id=f"replica{asked.replica}", init_sync=False)  # fmt: skip
    rows = samples().tensors[0]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    steps.step()  # a step of zeros allocates optimizer state, as replicas have it that may send theirs
    while True:
        steps.zero_grad(set_to_none=False)
        manager.start_quorum()
        rank, size = manager.participating_rank(), manager.num_participants()
        if rank is not None:
            each = PLAN.micro_batches / size
            for batch, _ in batches(rows, manager.current_step(), rank, size):
                (loss(model(batch[0]), batch) / each).backward()
        flat = nn.utils.parameters_to_vector([p.grad for p in parameters])
        manager.allreduce(flat).wait()
        if manager.should_commit():
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
                parameter.grad.copy_(part.view_as(parameter))
            steps.step()
            marks(asked.folder).step(tally, size)


def torchft(asked: argparse.Namespace) -> None:
    """Runs the lighthouse and restarts replicas, until SIGTERM."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=asked.timeout_ms, quorum_tick_ms=10,
        heartbeat_timeout_ms=asked.timeout_ms)  # fmt: skip
    command = [sys.executable, *sys.argv, f"--lighthouse={lighthouse.address()}"]
    start = lambda replica: subprocess.Popen([*command, f"--replica={replica}"])
    replicas = [start(replica) for replica in range(asked.workers)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        while True:
            for i, replica in enumerate(replicas):
                if replica.poll() is not None:
                    replicas[i] = start(i)
            time.sleep(PAUSE_SECONDS)
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        os._exit(0)  # the lighthouse never ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("torchrun", "torchft"))
    parser.add_argument("--folder", type=Path, required=True, help="where processes write what they do")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--timeout-ms", type=int, default=1000, help="of torchft's heartbeats and joins")
    parser.add_argument("--torchft", default="", metavar="DIR", help="where torchft is installed")
    parser.add_argument("--lighthouse", help="where that is, for a replica")
    parser.add_argument("--replica", type=int, help="which one this process is")
    asked = parser.parse_args()
    sys.path.append(asked.torchft)
    if asked.way == "torchrun":
        with_torchrun(asked)
    elif asked.replica is None:
        torchft(asked)
    else:
        with_torchft(asked)


if __name__ == "__main__":
    main()
