"""Trains by Accelerate and by transformers' Trainer, in several ways: ``python accelerate_script.py FILE``.

Worker 0 writes what each way came to into the JSON file. Under a launcher, workers exchange gradients by Unisono. A
process that is alone computes what all of them should come to.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from unisono.frameworks.accelerate import Accelerator
from unisono.frameworks.transformers import Trainer

SHARE, BATCHES = 6, 8


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))


def samples(workers: int) -> DataLoader:
    """Batches of every worker; alone, those of both workers in one batch."""
    random = torch.Generator().manual_seed(3)
    count = 2 * SHARE * BATCHES
    data = TensorDataset(torch.randn(count, 5, generator=random), torch.randn(count, 1, generator=random))
    return DataLoader(data, batch_size=2 * SHARE // workers)


def told(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def accelerated(passes: int = 1, clip: float = 0.0, stop: int = BATCHES, load: str = "", **named: Any) -> Any:
    """The accelerator, model and optimizer after some steps; it goes on from the state in the directory `load`."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=passes, **named)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, samples(accelerator.num_processes))
    first = 0
    if load:
        accelerator.load_state(load)
        first = BATCHES // 2
    for step, (x, y) in enumerate(loader):
        if not first <= step < stop:
            continue
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return accelerator, model, optimizer


def final(**named: Any) -> list[float]:
    accelerator, model, _ = accelerated(**named)
    if named.get("sync"):
        model.world.synchronize()
    return told(accelerator.unwrap_model(model))


def resumed() -> list[float]:
    """Half of the steps in one accelerator, the others in the next, which reads what the first has saved."""
    accelerator, _, _ = accelerated(stop=BATCHES // 2)
    with tempfile.TemporaryDirectory() as directory:
        (shared,) = accelerator.gather_for_metrics([directory], use_gather_object=True)[:1]
        accelerator.save_state(shared)
        accelerator.wait_for_everyone()
        result = final(load=shared)
        accelerator.wait_for_everyone()
    return result


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": tokens, "labels": tokens}


def trained(directory: str, workers: int, passes: int = 1, resume: bool = False, **named: Any) -> list[float]:
    """A tiny GPT-2 by the Trainer."""
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 50}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    arguments = TrainingArguments(
        directory, per_device_train_batch_size=8 // workers, gradient_accumulation_steps=passes, max_steps=4,
        learning_rate=1e-2, lr_scheduler_type="linear", use_cpu=True, report_to=[], disable_tqdm=True, save_steps=2,
        logging_strategy="no", eval_strategy="no")  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens(), **named)
    if named:
        assert trainer.evaluate()["eval_loss"] > 0  # before training, which prepares the model once
    trainer.train(resume_from_checkpoint=resume and f"{directory}/checkpoint-2")
    return told(trainer.accelerator.unwrap_model(trainer.model))


def main(file: str) -> None:
    fp16 = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    found: dict[str, Any] = {
        "mean": final(),
        "clipped": final(clip=0.5),
        "accumulated": final(passes=2),
        "bf16": final(mixed_precision="bf16"),
        "resumed": resumed(),
    }
    accelerator, model, _ = accelerated(stop=1)
    workers = accelerator.num_processes
    found["workers"] = workers
    shared = str(Path(file).parent / "trainer")  # worker 0 writes, all read
    found["trainer"] = trained(shared, workers)
    found["trainer resumed"] = trained(shared, workers, resume=True)
    found["trainer accumulated"] = trained(shared, workers, passes=2)
    if workers > 1:
        found["kind"] = type(model).__name__
        found["keys"] = list(accelerator.get_state_dict(model))
        found["exact"] = final(compress="Exact()")
        found["compressor"] = repr(accelerated(stop=0, compress="Exact()")[1]._compress)
        found["fp16"] = final(kwargs_handlers=[fp16])
        found["LocalSGD"] = final(sync="LocalSGD(every=1)")
        found["ParameterServer"] = final(sync="ParameterServer()")
        found["trainer LocalSGD"] = trained(shared, workers, sync="LocalSGD(every=2)")
    if accelerator.is_main_process:
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
