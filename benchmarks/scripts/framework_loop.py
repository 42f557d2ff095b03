"""Training by Lightning's Trainer and by Hugging Face's, each with DDP and with the strategy or class of ours.

Started by torchrun for all ways. Models, optimizer, batch sizes and the report are those of `ddp_loop.py`. Samples are
in memory, and the framework divides them among the workers. Progress bars, logs, checkpoints and validation are off.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent))
import ddp_loop

WAYS = ("lightning-ddp", "lightning-unisono", "trainer-ddp", "trainer-unisono")
Batch = tuple[Tensor, Tensor]


class Samples(Dataset[Batch]):
    """`length` samples, of which a few are in memory and used in turn; many at once by ``__getitems__``."""

    def __init__(self, model: str, length: int) -> None:
        self.inputs, self.targets = ddp_loop.batch(model, 4096)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> Batch:
        at = torch.as_tensor(indices) % len(self.inputs)
        return self.inputs[at], self.targets[at]


class WithLoss(nn.Module):
    """Computes the loss of `model`, and keeps that of each step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.losses = model, list[Tensor]()

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        loss = ddp_loop.loss_of(self.model(inputs), targets)
        self.losses.append(loss.detach())
        return {"loss": loss}


def begun() -> float:
    """The time when training begins, on one compute thread."""
    torch.set_num_threads(1)
    return time.monotonic()


def lightning(asked: argparse.Namespace, model: WithLoss, samples: Samples) -> list[float]:
    """Seconds at the beginning and at the end of each step, with Lightning's Trainer."""
    import lightning as L

    marks: list[float] = []

    class Trained(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, _: int) -> dict[str, Tensor]:
            loss: dict[str, Tensor] = self.model(*batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return ddp_loop.fused(self.parameters(), asked.optimizer)

    class Clock(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            marks.append(begun())

        def on_train_batch_end(self, *_: Any) -> None:
            marks.append(time.monotonic())

    strategy: Any = "ddp"
    if asked.way == "lightning-unisono":
        from unisono.frameworks.lightning import UnisonoStrategy

        strategy = UnisonoStrategy()
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy, callbacks=[Clock()],
        max_steps=asked.warmup + asked.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False)  # fmt: skip
    trainer.fit(Trained(), DataLoader(samples, asked.batch, collate_fn=lambda batch: batch))
    return marks


def trainer(asked: argparse.Namespace, model: WithLoss, samples: Samples) -> list[float]:
    """The same with Hugging Face's Trainer."""
    from transformers import TrainerCallback, TrainingArguments

    if asked.way == "trainer-unisono":
        from unisono.frameworks.transformers import Trainer
    else:
        from transformers import Trainer

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks.append(begun())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.monotonic())

    arguments = TrainingArguments(
        output_dir="trainer", max_steps=asked.warmup + asked.steps, per_device_train_batch_size=asked.batch,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_strategy="no", save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,  # its default costs DDP time, and is needed by models with unused parameters
    )  # fmt: skip
    optimizer = ddp_loop.fused(model.parameters(), asked.optimizer)
    Trainer(
        model, arguments, train_dataset=samples, data_collator=lambda batch: {"inputs": batch[0], "targets": batch[1]},
        optimizers=(optimizer, None), callbacks=[Clock()]).train()  # fmt: skip
    return marks


def main() -> None:
    asked = ddp_loop.arguments(__doc__, WAYS)
    torch.manual_seed(0)
    model = WithLoss(ddp_loop.build(asked.model))
    samples = Samples(asked.model, (asked.warmup + asked.steps) * asked.batch * int(os.environ["WORLD_SIZE"]))
    train = lightning if asked.way.startswith("lightning") else trainer
    marks = train(asked, model, samples)
    if os.environ["RANK"] == "0" and asked.report:
        ddp_loop.write_report(asked, marks, model.losses, model)
    if torch.distributed.is_initialized():
        ddp_loop.leave_ddp()


if __name__ == "__main__":
    main()
