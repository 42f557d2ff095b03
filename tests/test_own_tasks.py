"""Tasks as users write them: any batch, any collate, any weight; and what a task cannot be, said in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from transformers import BatchEncoding

from tests.processes import ChildFailed
from tests.training import regression, source, start, train
from unisono import Evaluation, Task
from unisono.batch import to_device
from unisono.comm import Alone
from unisono.errors import InvalidInput
from unisono.evaluate import Evaluator
from unisono.launch import Identity, StopRequest, Worker
from unisono.order import Carried, Order
from unisono.work import work

# A script without a main guard: everything in it is carried to the workers by value.
SCRIPT = """
import json, sys
import torch
from torch import nn
import unisono

random = torch.Generator().manual_seed(0)
sentences = [torch.randint(1, 9, (2 + i % 5,), generator=random) for i in range(24)]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
    def forward(self, tokens, mask):
        return {"scores": self.head(self.embed(tokens) * mask[..., None])}

def collate(samples):
    tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"tokens": tokens, "mask": tokens > 0}

def loss(output, batch):
    scores = output["scores"].flatten(0, 1)
    return nn.functional.cross_entropy(scores, batch["tokens"].flatten(), ignore_index=0)

task = unisono.Task(
    model=Model, data=sentences, loss=loss, collate=collate,
    inputs=lambda batch: (batch["tokens"], batch["mask"]), weight=lambda batch: batch["mask"].sum(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.5), evaluate=lambda: sentences[:7],
)
found = []
for workers in (1, 2):
    config = unisono.Config(workers=workers, steps=4, global_batch=24, micro_batch=2, run=f"{sys.argv[1]}/{workers}")
    result = unisono.train(task, config)
    found.append([result.loss, result.metrics["loss"], result.samples])

from unisono.data import seed_compute, stream
seed_compute(stream(0, 0, 0, "init"))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.5)
batch = collate(sentences)
for _ in range(4):
    optimizer.zero_grad()
    last = loss(model(batch["tokens"], batch["mask"]), batch)
    last.backward()
    optimizer.step()
held = collate(sentences[:7])
found.append([float(last.detach()), float(loss(model(held["tokens"], held["mask"]), held).detach()), 96])
print(json.dumps(found))
"""


def test_dict_batches_tuple_inputs_and_token_weights_from_a_script_without_a_main_guard(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert ran.returncode == 0, ran.stderr
    *workers, plain = json.loads(ran.stdout.splitlines()[-1])
    for found in workers:
        assert found == pytest.approx(plain, abs=1e-5)


WRITTEN = """
import sys
import torch
import unisono

data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
task = unisono.Task(
    model=lambda: torch.nn.Linear(3, 1), data=data, evaluate=data, name="line",
    loss=lambda output, batch: torch.nn.functional.mse_loss(output, batch[1]),
    defaults={"clip": 1.0, "evaluate_every": 4, "workers": 2, "steps": 8},
)
for quiet in (False, True):
    run = f"{sys.argv[1]}/{quiet}"
    unisono.train(task, unisono.Config(clip=None, evaluate_every=0, workers=1, run=run), quiet=quiet)
    print("end of", run, file=sys.stderr)
"""


def test_train_counts_what_is_written_and_shows_progress_unless_it_is_to_be_quiet(tmp_path) -> None:
    """Each written field equals the library's default and differs from the task's."""
    script = tmp_path / "script.py"
    script.write_text(WRITTEN)
    ran = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert ran.returncode == 0, ran.stderr
    for quiet in (False, True):
        written = tomllib.loads((tmp_path / str(quiet) / "config.toml").read_text())
        expected = {"clip": "none", "evaluate_every": 0, "workers": 1, "steps": 8}
        assert {name: written[name] for name in expected} == expected
    shown, _, rest = ran.stderr.partition(f"end of {tmp_path}/False\n")
    assert f"run {tmp_path}/False\n" in shown
    assert "step 8/8  loss " in shown
    assert rest == f"end of {tmp_path}/True\n"
    assert ran.stdout == ""


def test_a_compiled_model_computes_the_same_on_any_number_of_workers(tmp_path) -> None:
    task = source("regression", optimizer="sgd")  # Adam would enlarge the rounding of gradients that are zero
    for size in (1, 2):  # what one worker has compiled, torch finds again for two
        eager = train(size, task, tmp_path / f"eager-{size}", steps=4)
        compiled = train(size, task, tmp_path / f"compiled-{size}", steps=4, compile=True)
        assert compiled["loss"] == pytest.approx(eager["loss"], abs=1e-5)
        assert compiled["metrics"] == pytest.approx(eager["metrics"], abs=1e-5)


# --- what a task cannot be


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def foreign_parameter(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(7))], 0.1)


def frozen() -> nn.Module:
    return nn.Linear(8, 1).requires_grad_(False)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "vector": ({"loss": lambda output, batch: (output - batch[1])[:, 0]}, r"loss = Tensor\[4\]: not a single number"),
    "number": ({"loss": lambda output, batch: 3.0}, "loss = float: not a single number"),
    "detached": ({"loss": lambda output, batch: output.detach().mean()}, "loss = .*: it does not depend on the model"),
    "weight": ({"weight": lambda batch: -1}, "weight = -1.0: a batch cannot count that much"),
    "endless": ({"data": Endless}, "data = Endless: not a map-style dataset"),
    "no data": ({"data": TensorDataset(torch.zeros(0, 8))}, "data = 0: the dataset has no samples"),
    "no evaluation data": ({"evaluate": Evaluation([])}, "evaluate = 0: the evaluation data has no samples"),
    "optimizer": ({"optimizer": foreign_parameter}, r"optimizer = \(7,\): .* not one of the model's"),
    "frozen": ({"model": frozen}, "model = Linear: no parameter requires a gradient"),
    "lazy": ({"model": lambda: nn.LazyLinear(1)}, "model = weight: a lazy parameter"),
    "no module": ({"model": lambda: 3}, "model = int: not a torch module"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_task_that_cannot_be_trained_is_named_with_its_cure(name, tmp_path) -> None:
    change, words = BAD[name]
    order = Order(Carried.of(replace(regression(norm=False), **change)), {"steps": 1}, tmp_path, time.time())
    with pytest.raises(InvalidInput, match=words):
        work(Worker(Identity(), lambda message: None, StopRequest()), order)


def test_synchronized_batchnorm_wants_as_many_micro_batches_on_every_worker(tmp_path) -> None:
    with pytest.raises(ChildFailed, match="sync_batchnorm = True: 2 workers cannot compute the 3 micro-batches"):
        start(2, source("regression"), tmp_path, {"sync_batchnorm": True, "global_batch": 24, "micro_batch": 8})


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


BATCHES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "dict": lambda x, y: {"x": x, "y": y},
    "user": lambda x, y: UserDict(x=x, y=y),
    "encoding": lambda x, y: BatchEncoding({"x": x, "y": y}),
    "named": Point,
}


@pytest.mark.parametrize("kind", BATCHES)
def test_an_evaluation_counts_samples_whatever_its_batches_are(kind: str) -> None:
    """The last batch has fewer samples than the others."""
    data = [(torch.tensor([float(i)]), torch.tensor([0.0])) for i in range(7)]

    def part(batch: Any, name: str) -> torch.Tensor:
        return getattr(batch, name) if isinstance(batch, Point) else batch[name]

    task = Task(
        model=nn.Identity, data=data, inputs=lambda batch: part(batch, "x"),
        collate=lambda samples: BATCHES[kind](*map(torch.stack, zip(*samples))),
        loss=lambda output, batch: (output - part(batch, "y")).mean(), evaluate=Evaluation(data, batch=4),
    )  # fmt: skip
    move = partial(to_device, device=torch.device("cpu"))
    measured = Evaluator(task, Alone(), lambda model, batch: model(task.inputs(batch)), move, 0, 1)(nn.Identity())
    assert measured == {"loss": 3.0}


def test_evaluation_leaves_every_layer_in_the_mode_it_was_in() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8).eval(), nn.Dropout(), nn.Linear(8, 1))
    task = regression()
    Evaluator(task, Alone(), lambda model, batch: model(batch[0]), lambda batch: batch, 0, 1)(model)
    assert [module.training for module in model] == [False, True, True]
    assert model.training
