"""Trains small models by Lightning, one for each feature. As a script, Lightning itself or a launcher starts it:

lightning_cells.py DIRECTORY NAME WORKERS FEATURE...    writes what they come to as DIRECTORY/NAME-RANK.json
lightning_cells.py DIRECTORY plain 1 FEATURE...         also without the strategies; the others are then NAME one
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from unisono.errors import InvalidInput
from unisono.frameworks.lightning import UnisonoFabricStrategy, UnisonoStrategy

SAMPLES, BATCH = 48, 12
STEPS = SAMPLES // BATCH  # of an epoch
Result = dict[str, list[float] | str]


def data() -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(SAMPLES, 5, generator=random), torch.randn(SAMPLES, 1, generator=random))


def share(rank: int, size: int) -> DataLoader:
    """This worker's part of every batch."""
    sampler = DistributedSampler(data(), num_replicas=size, rank=rank, shuffle=False)
    return DataLoader(data(), batch_size=BATCH // size, sampler=sampler)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def weights(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().float().cpu().reshape(-1) for p in model.parameters()]).tolist()


def momentum(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def searching(model: nn.Module) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def train_dataloader(self) -> DataLoader:
        return share(self.trainer.global_rank, self.trainer.world_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("held out", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = momentum(self)
        schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Plain(Net):
    """Without a schedule, which `Net` has."""

    def configure_optimizers(self) -> Any:
        return momentum(self)


class Partial(Plain):
    """Every other step leaves a layer out, and one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never = nn.Linear(5, 1), nn.Linear(5, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        output = self(batch[0]) + (self.sometimes(batch[0]) if index % 2 else 0.0)
        return F.mse_loss(output, batch[1])


class Thaw(BaseFinetuning):
    """The first layer is trained from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.layers[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.layers[0], optimizer, lr=0.1)


class Finetuned(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Searching(Net):
    """The optimizer calls the closure again, and chooses the length of its step by the loss."""

    def configure_optimizers(self) -> Any:
        return searching(self)


class Found(Net):
    lr = 0.01

    def configure_optimizers(self) -> Any:
        return momentum(self, self.lr)


class Adversaries(Net):
    """Two networks in turns, by manual optimization; `toggle` freezes the other one, `halves` accumulates."""

    def __init__(self, toggle: bool = False, halves: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle, self.halves = toggle, halves
        self.judge = nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        for turn, optimizer in enumerate((first, second)):
            for half, part in enumerate(x.chunk(2) if self.halves else [x]):
                with optimizer.toggle_model(sync_grad=not self.halves or half == 1) if self.toggle else nullcontext():
                    made = self(part) if turn == 0 else self(part).detach()
                    loss = self.judge(made).square().mean() * (1 if turn == 0 else -1) / (1 + self.halves)
                    self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            if turn == 0:
                second.zero_grad()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [momentum(self.layers), torch.optim.Adam(self.judge.parameters(), lr=1e-2)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]


class Cells:
    """The features, each trained once.

    Args:
        directory: of the checkpoints.
        ours: whether by Unisono's strategies; else by plain Lightning in one process.
    """

    def __init__(self, directory: Path, workers: int, *, ours: bool) -> None:
        self.directory, self.workers, self.ours = directory, workers, ours

    def strategy(self, kind: Callable[..., Any], **given: str) -> Any:
        return kind(**given) if self.ours else "auto"

    def checkpoint(self, name: str) -> Path:
        return self.directory / f"{name}-{self.workers}-{'ours' if self.ours else 'plain'}.ckpt"

    def trainer(self, strategy: Any = None, **options: Any) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu", devices=self.workers, strategy=strategy or self.strategy(UnisonoStrategy),
            default_root_dir=self.directory,
            logger=False, enable_progress_bar=False, enable_model_summary=False,
            **{"max_epochs": 2, "enable_checkpointing": False, **options})  # fmt: skip

    def fit(self, model: L.LightningModule, resumed: Path | None = None, **options: Any) -> L.Trainer:
        trainer = self.trainer(**options)
        trainer.fit(model, ckpt_path=resumed)
        return trainer

    def weights(self, model: L.LightningModule, **options: Any) -> Result:
        self.fit(model, **options)
        return {"weights": weights(model)}

    # ---- the Trainer

    def automatic(self) -> Result:
        model = Net()
        trainer = self.fit(model, gradient_clip_val=0.5)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        (tested,) = trainer.test(model, verbose=False)
        predicted = torch.cat(trainer.predict(model)).flatten().sum()
        total = trainer.strategy.reduce(predicted, reduce_op="sum") if self.workers > 1 else predicted
        rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else 0.0
        return {
            "weights": weights(model), "metrics": [metrics["loss"], metrics["held out"]],
            "tested": [tested["held out"]], "predicted": [float(total)], "rate": [rate],
        }  # fmt: skip

    def accumulated(self) -> Result:
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
        return self.weights(Net(), **options)

    def manual(self) -> Result:
        return self.weights(Adversaries())

    def toggled(self) -> Result:
        return self.weights(Adversaries(toggle=True))

    def halves(self) -> Result:
        return self.weights(Adversaries(toggle=True, halves=True))

    def unused(self) -> Result:
        return self.weights(Partial())

    def thawed(self) -> Result:
        return self.weights(Finetuned(), callbacks=[Thaw()])

    def line_search(self) -> Result:
        return self.weights(Searching(), precision="64-true")

    def averaged(self) -> Result:
        return self.weights(Plain(), max_epochs=3, callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1)])

    def scheduled_accumulation(self) -> Result:
        return self.weights(Plain(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])

    def found_rate(self) -> Result:
        finder = LearningRateFinder(num_training_steps=4)
        return self.weights(Found(), callbacks=[finder], enable_checkpointing=True)

    def compiled(self) -> Result:
        model = Partial()  # which logs nothing
        self.trainer().fit(torch.compile(model, backend="eager"))
        return {"weights": weights(model)}

    def scaled(self) -> Result:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return self.weights(Plain(), plugins=[MixedPrecision("16-mixed", "cpu", scaler)])

    def bf16(self) -> Result:
        return self.weights(Net(), precision="bf16-mixed")

    def float64(self) -> Result:
        return self.weights(Net(), precision="64-true")

    def stopped(self) -> Result:
        stop = EarlyStopping("held out", min_delta=0.05, patience=1)
        trainer = self.fit(Net(), max_epochs=12, callbacks=[stop])
        return {"epochs": [float(trainer.current_epoch)]}

    def named(self) -> Result:
        return self.weights(Net(), strategy="unisono" if self.ours else "auto")

    def resumed(self) -> Result:
        """The first epoch ends in a checkpoint, from which another Trainer continues."""
        self.fit(Net(), max_epochs=1).save_checkpoint(self.checkpoint("resumed"))
        return self.weights(Net(), resumed=self.checkpoint("resumed"))

    def resumed_from_plain(self) -> Result:
        """As `resumed`, from the checkpoint of plain Lightning in one process."""
        return self.weights(Net(), resumed=self.directory / "resumed-1-plain.ckpt")

    # ---- other synchronizers, and compressors

    def local(self, sync: str) -> Result:
        """As `resumed`."""
        path = self.checkpoint(sync.split("(")[0])
        self.fit(Plain(), max_epochs=1, strategy=UnisonoStrategy(sync=sync)).save_checkpoint(path)
        return self.weights(Plain(), strategy=UnisonoStrategy(sync=sync), resumed=path)

    def compressed(self, compress: str) -> Result:
        return self.weights(Plain(), strategy=UnisonoStrategy(compress=compress))

    def spawned(self, method: str) -> Result:
        return self.weights(Net(), strategy=UnisonoStrategy(start_method=method))

    def killed(self) -> Result:
        """Worker 1 is killed in the second epoch."""

        class Victim(Net):
            def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
                if self.trainer.global_step == STEPS + 1 and self.trainer.global_rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().training_step(batch, index)

        saved = ModelCheckpoint(self.directory, "killed")
        return self.weights(Victim(), enable_checkpointing=True, callbacks=[saved])

    def refused(self) -> Result:
        try:
            self.fit(Adversaries(), strategy=UnisonoStrategy(sync="LocalSGD(every=2)"))
        except InvalidInput as error:
            return {"error": str(error)}
        return {}

    # ---- Fabric

    def fabric(self, sync: str = "AllReduce()") -> L.Fabric:
        strategy = self.strategy(UnisonoFabricStrategy, sync=sync)
        fabric = L.Fabric(accelerator="cpu", devices=self.workers, strategy=strategy)
        fabric.launch()
        return fabric

    def batches(self, fabric: L.Fabric, epochs: int = 2) -> Iterator[list[torch.Tensor]]:
        loader = fabric.setup_dataloaders(share(fabric.global_rank, fabric.world_size), use_distributed_sampler=False)
        for _ in range(epochs):
            yield from loader

    def fabric_steps(self) -> Result:
        """A gradient is accumulated over two batches, and clipped."""
        fabric, module = self.fabric(), layers()
        model, optimizer = fabric.setup(module, momentum(module))
        for step, (x, y) in enumerate(self.batches(fabric)):
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                fabric.backward(F.mse_loss(model(x), y) / 2)
            if step % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        mean = fabric.all_reduce(F.mse_loss(model(x), y).detach())
        return {"weights": weights(module), "loss": [float(mean)]}

    def fabric_line_search(self) -> Result:
        fabric, module = self.fabric(), layers().double()
        model, optimizer = fabric.setup(module, searching(module))
        for x, y in self.batches(fabric):

            def closure(x: torch.Tensor = x.double(), y: torch.Tensor = y.double()) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                fabric.backward(loss)
                return loss

            optimizer.step(closure)
        return {"weights": weights(module)}

    def fabric_compiled(self) -> Result:
        fabric, module = self.fabric(), layers()
        model, optimizer = fabric.setup(torch.compile(module, backend="eager"), momentum(module))
        for x, y in self.batches(fabric):
            optimizer.zero_grad()
            fabric.backward(F.mse_loss(model(x), y))
            optimizer.step()
        return {"weights": weights(module)}

    def fabric_adversaries(self) -> Result:
        fabric, made, judge = self.fabric(), layers(), nn.Linear(1, 1)
        first, one = fabric.setup(made, momentum(made, 0.02))
        second, other = fabric.setup(judge, momentum(judge, 0.02))
        for x, _ in self.batches(fabric):
            for turn, optimizer in enumerate((one, other)):
                one.zero_grad()
                other.zero_grad()
                output = first(x) if turn == 0 else first(x).detach()
                fabric.backward(second(output).square().mean() * (1 if turn == 0 else -1))
                optimizer.step()
        return {"weights": weights(made) + weights(judge)}

    def fabric_resumed(self, sync: str = "AllReduce()") -> Result:
        """As `resumed`."""
        path, found = self.checkpoint(f"fabric-{sync}"), list[float]()
        for epoch in range(2):
            fabric, module = self.fabric(sync), layers()
            model, optimizer = fabric.setup(module, momentum(module))
            state = {"model": model, "optimizer": optimizer, "epoch": epoch}
            if epoch:
                assert fabric.load(path, state) == {}
                assert state["epoch"] == 0
            for x, y in self.batches(fabric, 1):
                optimizer.zero_grad()
                fabric.backward(F.mse_loss(model(x), y))
                optimizer.step()
            fabric.save(path, state)
            found = weights(module)
        return {"weights": found}


FEATURES = (
    "automatic", "accumulated", "scheduled_accumulation", "manual", "toggled", "halves", "unused", "thawed",
    "line_search", "averaged", "found_rate", "compiled", "bf16", "float64", "scaled", "stopped", "named", "resumed",
    "resumed_from_plain", "fabric_steps", "fabric_adversaries", "fabric_line_search", "fabric_compiled",
    "fabric_resumed",
)  # fmt: skip


def main() -> None:
    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    directory, name, workers, *features = sys.argv[1:]
    if name == "plain":
        train(Cells(Path(directory), 1, ours=False), name, features)
    train(Cells(Path(directory), int(workers), ours=True), "one" if name == "plain" else name, features)


def train(cells: Cells, name: str, features: list[str]) -> None:
    found = {}
    for each in features:
        feature, _, value = each.partition(":")
        found[each] = getattr(cells, feature)(*[value] if value else [])
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (cells.directory / f"{name}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
