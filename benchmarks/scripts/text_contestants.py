"""The task ``text`` trained by peers: DDP with hooks, torch's post-local SGD, torchft.

Model, initial weights, order of samples, optimizer, schedule, clipping and evaluation are imported from Unisono: they
are those of ``unisono train text`` with the same seed. Started once per worker with torchrun's variables; stops at the
target or after the last step. Rank 0 writes what `benchmarks.netlab.run_trace` reads. The clock stops during
evaluations.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.data import MicroBatchPlan, assign, seed_compute, stream
from unisono.tasks.builtin.gpt import GPT
from unisono.tasks.builtin.text import text
from unisono.tasks.task import Task, build_dataset
from unisono.trainer.optimizer import LearningRate, prefer_fused

SEED = 0
CLIP = 1.0
WAYS = ("alone", "ddp", "ddp-bf16", "ddp-fp16", "post-local-sgd", "torchft-local-sgd", "torchft-diloco")
TORCHFT = "torchft is not there: pip install --target DIR --no-deps torchft==0.2.0; pip install --target DIR " \
    "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http; then --torchft DIR"  # fmt: skip


@dataclass
class Way:
    """What the loop works with.

    Args:
        called: what forward goes through.
        update: one step of the optimizer, and whatever belongs to it.
    """

    called: nn.Module
    update: Callable[[], object]
    inside: contextlib.AbstractContextManager[object] = field(default_factory=contextlib.nullcontext)


def cast_hook(dtype: torch.dtype) -> Callable[..., torch.futures.Future[Tensor]]:
    """All-reduce of the bucket in half precision (torch's own for bf16 asks for NCCL): halved bytes, sum over ranks
    in the short type, back to fp32."""

    def hook(state, bucket):  # DDP refuses annotations that are text
        whole = bucket.buffer()
        short = whole.div(dist.get_world_size()).to(dtype)
        future = dist.all_reduce(short, async_op=True).get_future()
        return future.then(lambda done: whole.copy_(done.value()[0]))

    return hook


def distribute(asked: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> Way:
    """The lines that a user of each would write."""
    if asked.way == "alone":
        return Way(model, optimizer.step)
    if asked.way == "post-local-sgd":
        return post_local_sgd(asked, model, optimizer)
    if asked.way.startswith("torchft"):
        return with_torchft(asked, model, optimizer)
    ddp = DistributedDataParallel(model)
    if asked.way != "ddp":
        ddp.register_comm_hook(None, cast_hook({"bf16": torch.bfloat16, "fp16": torch.float16}[asked.way[4:]]))
    return Way(ddp, optimizer.step)


def post_local_sgd(asked: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> Way:
    """torch's: all-reduce in the first steps, then weights averaged every `asked.every` steps."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    first = max(asked.start, asked.every) - 1  # the averager acts after step first + 1, and so on every so many
    ddp = DistributedDataParallel(model)
    state = PostLocalSGDState(None, None, asked.start, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=asked.every, warmup_steps=first)
    return Way(ddp, PostLocalSGDOptimizer(optimizer, averager).step)


def with_torchft(asked: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> Way:
    """torchft's LocalSGD or DiLoCo, one replica group per worker; rank 0's host is the lighthouse."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    rank, size, long = dist.get_rank(), dist.get_world_size(), timedelta(seconds=600)
    address = asked.address.format(rank=rank, host=rank + 1)
    if rank == 0:
        with_torchft.lighthouse = LighthouseServer(  # type: ignore[attr-defined]  # kept as long as the process
            bind=f"{asked.address.format(rank=0, host=1)}:29511",
            min_replicas=size,
            join_timeout_ms=60_000,
            quorum_tick_ms=10,
        )
    dist.barrier()
    store = dist.TCPStore(address, 29512, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=long), min_replica_size=size, load_state_dict=lambda state: None,
        state_dict=lambda: {}, use_async_quorum=False, timeout=long, quorum_timeout=long, connect_timeout=long,
        rank=0, world_size=1, store_addr=address, store_port=store.port, hostname=address,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:29511", replica_id=f"worker{rank}",
        init_sync=False)  # fmt: skip
    with_torchft.held = store, manager  # type: ignore[attr-defined]
    if asked.way == "torchft-local-sgd":
        return Way(model, optimizer.step, LocalSGD(manager, model, optimizer, asked.every))
    outer = torch.optim.SGD(model.parameters(), lr=asked.outer_lr, momentum=0.9, nesterov=True)
    return Way(model, optimizer.step, DiLoCo(manager, [model], optimizer, outer, asked.every))


class Batches:
    """The micro-batches that ``unisono train text`` would give this worker."""

    def __init__(self, task: Task, rank: int, size: int, global_batch: int, micro_batch: int) -> None:
        self.data, self.task = build_dataset(task.data), task
        self.plan = MicroBatchPlan(len(self.data), global_batch, micro_batch, SEED)
        self.mine = assign(self.plan.micro_batches, [1.0] * size)[rank]

    def of(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        for m in self.mine:
            assert self.task.collate is not None
            yield self.task.collate(self.data.__getitems__(self.plan.indices(step, m).tolist()))


def evaluate(task: Task, model: nn.Module, rank: int, size: int) -> float:
    """Bits per byte on all held-out windows, batch by batch."""
    given = task.evaluate
    held_out, sums = build_dataset(given.data), torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.inference_mode():
        for start in range(rank * given.batch, len(held_out), size * given.batch):
            indices = list(range(start, min(start + given.batch, len(held_out))))
            batch = task.collate(held_out.__getitems__(indices))
            bits = given.metrics["bits_per_byte"](model(batch[0]), batch)
            sums += torch.tensor([float(bits.double().sum()), len(bits)], dtype=torch.float64)
    model.train()
    if size > 1:
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def train(asked: argparse.Namespace, rank: int, size: int) -> dict[str, list[tuple[int, float, float]]]:
    """The loop: marks (step, clock, loss of this worker) and evaluations (step, clock, bits per byte)."""
    task = text(model=GPT(layers=asked.layers, width=asked.width, context=asked.context))
    batches = Batches(task, rank, size, asked.global_batch, asked.micro_batch)
    seed_compute(stream(SEED, 0, 0, "init"))
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    prefer_fused(optimizer, sparse=False)
    rates = LearningRate(optimizer, None)
    way = distribute(asked, model, optimizer)
    marks, evaluations, clock = [], [], 0.0
    if size > 1:
        dist.barrier()
    if rank == 0:
        asked.report.touch()  # who watches knows that training begins
    with way.inside:
        for step in range(min(asked.steps, asked.stop_after or asked.steps)):
            began = time.monotonic()
            assert task.schedule is not None
            rates.set(task.schedule(step, asked.steps))
            optimizer.zero_grad()
            mine, total = list(batches.of(step)), 0.0
            for i, batch in enumerate(mine):
                last = i + 1 == len(mine)
                quiet = not last and isinstance(way.called, DistributedDataParallel)
                with way.called.no_sync() if quiet else contextlib.nullcontext():
                    loss = task.loss(way.called(batch[0]), batch) / len(mine)
                    loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            way.update()
            clock += time.monotonic() - began
            marks.append((step + 1, clock, total))
            if asked.evaluate_every and (step + 1) % asked.evaluate_every == 0:
                bits = evaluate(task, model, rank, size)
                evaluations.append((step + 1, clock, bits))
                if bits <= asked.target:
                    break
    return {"marks": marks, "evaluations": evaluations}


def main() -> None:
    asked = arguments()
    if asked.way.startswith("torchft"):
        sys.path.append(asked.torchft)
        try:
            import torchft  # noqa: F401
        except ImportError as error:
            raise SystemExit(f"{TORCHFT} ({error})") from error
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank = dist.get_rank() if size > 1 else 0
    found = train(asked, rank, size)
    if rank == 0:
        asked.report.write_text(json.dumps(found))
    if size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's destructor hangs in one run in a few, torchft's threads never end


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    for name, value in {"layers": 5, "width": 128, "context": 128, "global-batch": 32, "micro-batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=300, help="of the whole run, which the schedule follows")
    parser.add_argument("--stop-after", type=int, help="steps, though the schedule is that of the whole run")
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.0, help="bits per byte at which to stop")
    parser.add_argument("--every", type=int, default=32, help="steps between exchanges of weights")
    parser.add_argument("--start", type=int, default=0, help="steps of all-reduce before post-local SGD is local")
    parser.add_argument("--outer-lr", type=float, default=0.7, help="of DiLoCo's outer Nesterov momentum")
    parser.add_argument("--torchft", default="", metavar="DIR", help="where torchft is installed")
    parser.add_argument("--address", default="10.84.0.{host}", help="of worker {rank} = {host} - 1")
    parser.add_argument("--report", type=Path, default=Path("report.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
