"""Tasks of users: any batch, any collate function, any weight; and messages for invalid ones."""

from __future__ import annotations

import json
import math
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

from tests.support.processes import ChildFailed
from tests.support.training_runs import regression, source, start, train
from unisono import Cosine, Evaluation, Task
from unisono.comm import SingleWorker
from unisono.errors import InvalidInput, RunFailed
from unisono.launch import StopRequest, WorkerContext, WorkerIdentity
from unisono.run.resolve import resolve_config
from unisono.run.spec import PickledTask, RunSpec
from unisono.run.worker import run_worker
from unisono.tensors.batch import to_device
from unisono.trainer.evaluation import Evaluator

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
    run = f"{sys.argv[1]}/{workers}"
    config = unisono.Config(workers=workers, steps=4, global_batch=24, micro_batch=2, run_dir=run)
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


@pytest.mark.long
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
    unisono.train(task, unisono.Config(clip=None, evaluate_every=0, workers=1, run_dir=run), quiet=quiet)
    print("end of", run, file=sys.stderr)
"""


@pytest.mark.long
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


@pytest.mark.long
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
    order = RunSpec(PickledTask.of(replace(regression(norm=False), **change)), {"steps": 1}, tmp_path, time.time())
    with pytest.raises(InvalidInput, match=words):
        run_worker(WorkerContext(WorkerIdentity(), lambda message: None, StopRequest()), order)


def two(model: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.Adam(model.parameters())


LINEAR, ADAM = two(nn.Linear(8, 1))
STEP_LR = torch.optim.lr_scheduler.StepLR(ADAM, 1)
LBFGS = torch.optim.LBFGS
AT_ONCE: dict[str, tuple[dict[str, Any], str]] = {
    "a module": (
        {"model": LINEAR},
        "model = Linear: already built, and each worker builds its own; write model=lambda",
    ),
    "a model's arguments": ({"model": nn.Linear}, r"model = Linear: it is called as model\(\), .* 'in_features'"),
    "an optimizer": ({"optimizer": ADAM}, "optimizer = Adam: already built, .*; write optimizer=lambda parameters: "),
    "a scheduler for an optimizer": ({"optimizer": STEP_LR}, "optimizer = StepLR: it cannot be called"),
    "a closure": ({"optimizer": LBFGS}, "optimizer = LBFGS: its step runs the model several times"),
    "a closure, bound": ({"optimizer": partial(LBFGS, lr=0.1)}, "optimizer = LBFGS: its step runs the model several"),
    "a scheduler": (
        {"schedule": STEP_LR},
        r"schedule = StepLR: .*; write schedule=Cosine\(\), or schedule=lambda step,",
    ),
    "a scheduler's class": ({"schedule": torch.optim.lr_scheduler.StepLR}, "schedule = StepLR: a class"),
    "a schedule's class": ({"schedule": Cosine}, "schedule = Cosine: a class"),
    "a schedule of the step": (
        {"schedule": lambda step: 1.0},
        r"schedule = <lambda>: it is called as schedule\(step, s",
    ),
    "a loss's class": (
        {"loss": nn.CrossEntropyLoss},
        r"loss = CrossEntropyLoss: a class: .*; write loss=lambda output",
    ),
    "torch's loss": (
        {"loss": nn.MSELoss()},
        r"loss = MSELoss: it is called with \(output, batch\), .* inputs and targets",
    ),
    "a function of torch's": (
        {"loss": nn.functional.mse_loss},
        r"loss = mse_loss: it is called with \(output, batch\)",
    ),
    "a loss of the output": ({"loss": lambda output: 1.0}, r"loss = <lambda>: it is called as loss\(output, batch\)"),
    "a number": ({"weight": 3}, "weight = int: it cannot be called"),
    "inputs": ({"inputs": lambda: 1}, r"inputs = <lambda>: it is called as inputs\(batch\)"),
    "data's arguments": ({"data": lambda path: path}, r"data = <lambda>: it is called as data\(\), .* 'path'"),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_is_no_function_of_the_right_form_is_refused_where_the_task_is_made(name) -> None:
    change, words = AT_ONCE[name]
    with pytest.raises(InvalidInput, match=words):
        replace(regression(norm=False), **change)


def test_torchs_loss_is_a_loss_where_the_batch_is_one_tensor(tmp_path) -> None:
    """As in an autoencoder; a batch with targets is refused in words as soon as there is one."""
    whole = {"loss": nn.MSELoss(), "inputs": lambda batch: batch if torch.is_tensor(batch) else batch[0]}
    encoder = replace(
        regression(norm=False), model=lambda: nn.Linear(8, 8), data=torch.ones(64, 8), evaluate=None, **whole
    )
    worker = WorkerContext(WorkerIdentity(), lambda message: None, StopRequest())
    assert run_worker(worker, RunSpec(PickledTask.of(encoder), {"steps": 1}, tmp_path / "1", time.time()))
    task = replace(regression(norm=False), **whole)
    with pytest.raises(InvalidInput, match=r"loss = MSELoss: it is called with \(output, batch\)"):
        run_worker(worker, RunSpec(PickledTask.of(task), {"steps": 1}, tmp_path / "2", time.time()))


@pytest.mark.parametrize(
    ("given_", "words"),
    [({"metrics": {"loss": lambda output, batch: 1.0}}, "metrics = loss: .* under this name; give it another name"),
     ({"metrics": {"f1": list}}, "f1 = list: a class"),
     ({"metrics": {"f1": lambda output: 1.0}}, r"f1 = <lambda>: it is called as f1\(output, batch\)"),
     ({"batch": 0}, "batch = 0: below 1")],
)  # fmt: skip
def test_an_evaluation_is_checked_where_it_is_made(given_, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        Evaluation([], **given_)


@pytest.mark.parametrize(("factor", "said"), [(math.nan, "nan"), (-1.0, "-1.0"), (None, "None"), ("x", "x")])
def test_a_schedule_that_returns_no_factor_is_named_with_the_step(factor, said, tmp_path) -> None:
    """Its first factor before any worker is started, the others by the workers."""
    task = replace(regression(norm=False), schedule=lambda step, steps: factor)
    with pytest.raises(InvalidInput, match=rf"schedule\(0, 4\) = {said}: not a factor"):
        resolve_config(task, {"steps": 4})
    task = replace(task, schedule=lambda step, steps: factor if step else 1.0)
    order = RunSpec(PickledTask.of(task), {"steps": 4}, tmp_path, time.time())
    with pytest.raises(RunFailed, match=rf"worker 0 after 1 step: schedule\(1, 4\) = {said}: not a factor"):
        run_worker(WorkerContext(WorkerIdentity(), lambda message: None, StopRequest()), order)


def test_what_needs_a_closure_is_refused_whatever_made_it(tmp_path) -> None:
    task = replace(regression(norm=False), optimizer=lambda parameters: LBFGS(parameters))
    with pytest.raises(InvalidInput, match="optimizer = LBFGS: its step runs the model several times"):
        run_worker(
            WorkerContext(WorkerIdentity(), lambda message: None, StopRequest()),
            RunSpec(PickledTask.of(task), {}, tmp_path, time.time()),
        )


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
    measured = Evaluator(task, SingleWorker(), lambda model, batch: model(task.inputs(batch)), move, 0, 1)(
        nn.Identity()
    )
    assert measured == {"loss": 3.0}


def test_evaluation_leaves_every_layer_in_the_mode_it_was_in() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8).eval(), nn.Dropout(), nn.Linear(8, 1))
    task = regression()
    Evaluator(task, SingleWorker(), lambda model, batch: model(batch[0]), lambda batch: batch, 0, 1)(model)
    assert [module.training for module in model] == [False, True, True]
    assert model.training
