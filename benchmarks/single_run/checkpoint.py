"""Training time lost to one checkpoint: ours against a synchronous ``torch.save`` and DCP's ``async_save``.

One process with one compute thread trains a GPT of 42 million parameters with AdamW: 0.5 GB of parameters and optimizer
state. The cost of a checkpoint is the excess of the following steps over the median step right before it. It is summed
until the background work has ended and three steps more, so that all interference of writing is counted.
``no checkpoint`` is the same computation without a checkpoint: the noise. Every way takes one checkpoint before the
clock starts; between two measurements the disk becomes idle.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Claim, Spread, Verdict
from unisono.checkpoint import Writer, fingerprint, fingerprint_of, verified

AFTER_STEPS = 3
WIDTH, DEPTH, VOCABULARY, BATCH, LENGTH = 512, 12, 8192, 1, 96


class Training:
    """The model, its optimizer, and one step after the other."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        body = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        embed, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.model = nn.Sequential(embed, body, head)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))

    def compute(self) -> None:
        """Forward and backward."""
        logits = self.model(self.tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()

    def apply(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer state under plain names."""
        names = {p: name for name, p in self.model.named_parameters()}
        state = {
            f"optimizer/{names[p]}/{key}": value
            for p, values in self.optimizer.state.items()
            for key, value in values.items()
        }
        return {f"model/{name}": p.detach() for p, name in names.items()} | state


class Without:
    """No checkpoint at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """After a step: take the checkpoint, or begin to."""

    def before_change(self) -> None:
        """Right before the optimizer changes the tensors."""

    def after_step(self) -> None:
        """After every step: whatever is to be looked after."""

    def complete(self) -> bool:
        """Whether no background work is left."""
        return True

    def wait(self) -> None:
        """Until it is complete."""


class Unisono(Without):
    """This library: copied and written in the background."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.writer = Writer(folder, rank=0, size=1, keep=1, on_event=lambda event: None)
        self.committed = True

    def begin(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        self.writer.stage(step, tensors, {"step": step})
        self.committed = False

    def before_change(self) -> None:
        self.writer.staged()

    def after_step(self) -> None:
        state = self.writer.state
        if not self.committed and state.written == state.step:
            self.writer.commit(state.step)
            self.committed = True

    def complete(self) -> bool:
        return self.committed and not self.writer.busy

    def wait(self) -> None:
        self.writer.finish()
        self.after_step()
        self.writer.finish()


class TorchSave(Without):
    """``torch.save``: training stands still meanwhile."""

    def begin(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        torch.save(dict(tensors), self.folder / f"{step}.pt")


class AsyncSave(Without):
    """``torch.distributed.checkpoint.async_save`` with its default: a thread, after a blocking copy."""

    future: Any = None

    def begin(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        from torch.distributed.checkpoint import async_save

        self.future = async_save({"state": dict(tensors)}, checkpoint_id=self.folder / str(step), **self.options())

    def options(self) -> dict[str, Any]:
        return {}

    def complete(self) -> bool:
        return bool(self.future is None or self.future.done())

    def wait(self) -> None:
        self.future.result()


class AsyncStaging(AsyncSave):
    """The same with its copy in the background too."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(folder)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self.staging: Any = None

    def begin(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        super().begin(step, tensors)
        self.staging, self.future = self.future.staging_completion, self.future.upload_completion

    def options(self) -> dict[str, Any]:
        return {"async_stager": self.stager}

    def before_change(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None


def lost_seconds(training: Training, way: Without, before: int) -> float:
    """Seconds that one checkpoint costs training: what the steps from it on take longer than the median of the
    `before` steps right before it, summed until the background work has ended and a few steps more.

    Then everything comes to rest, off the clock.
    """
    for path in way.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()
    usual = statistics.median(timed(training, way) for _ in range(before))
    lost, after = timed(training, way, checkpoint=True) - usual, 0
    while after < AFTER_STEPS:
        after += way.complete()
        lost += timed(training, way) - usual
    way.wait()
    return lost


def timed(training: Training, way: Without, checkpoint: bool = False) -> float:
    """Seconds of one step, with a checkpoint begun after it if so asked, which counts."""
    begin = time.perf_counter()
    training.compute()
    way.before_change()
    training.apply()
    if checkpoint:
        way.begin(0, training.tensors())
    way.after_step()
    return time.perf_counter() - begin


def check(training: Training, folder: Path) -> float:
    """Write one checkpoint with ours, read it, and compare every bit; gives its gigabytes."""
    way, tensors = Unisono(folder), training.tensors()
    way.begin(1, tensors)
    way.wait()
    if fingerprint_of(verified(folder / "step-00000001"), prefix="") != fingerprint(tensors):
        raise SystemExit("what was read is not what was written")
    way.writer.close()
    return sum(x.nbytes for x in tensors.values()) / 1e9


def join_alone() -> None:
    """A gloo group of this process only, which DCP needs."""
    warnings.filterwarnings("ignore")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=7)
    parser.add_argument(
        "--steps", type=int, default=9, help="before each checkpoint, from which the usual one is known (9)"
    )
    parser.add_argument("--folder", type=Path, help="on the disk that is meant (the system's temporary one)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    join_alone()
    training = Training()
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=asked.folder) as root:
        return measure(training, Path(root), asked)


def measure(training: Training, root: Path, asked: Any) -> int:
    ways: dict[str, Without] = {}
    for name, kind in {
        "no checkpoint": Without,
        "unisono": Unisono,
        "torch.save": TorchSave,
        "DCP async_save": AsyncSave,
        "DCP async_save, async staging": AsyncStaging,
    }.items():
        folder = root / name
        folder.mkdir()
        ways[name] = kind(folder)
    timed(training, ways["no checkpoint"])
    (root / "check").mkdir()
    gigabytes = check(training, root / "check")
    for way in ways.values():
        lost_seconds(training, way, 1)
    lost = harness.interleave(
        {name: lambda way=way: lost_seconds(training, way, asked.steps) for name, way in ways.items()},
        asked.repeats,
    )
    dist.destroy_process_group()
    return report(lost, gigabytes, asked)


def report(lost: Mapping[str, Sequence[float]], gigabytes: float, asked: Any) -> int:
    """The claims; and, beside them, the time lost in every way."""
    print(f"{gigabytes:.3f} GB; seconds of training lost to one checkpoint:")
    for way, losses in lost.items():
        print(f"  {way:32}{Spread.of(losses)}")
    text = "training time lost to a checkpoint"
    verdicts = [
        Verdict(Claim(text, target, at_least=False), peer, "s", lost["unisono"], lost[peer])
        for peer, target in (("torch.save", 0.1), ("DCP async_save", 0.5))
    ]
    return harness.conclude(
        "checkpoint",
        verdicts,
        asked.json,
        lost_seconds=dict(lost),
        gigabytes=gigabytes,
    )


if __name__ == "__main__":
    raise SystemExit(main())
