"""What workers must have in common: differences are named, and allowed ones raise no alarm."""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unisono import Config, Evaluation, Task
from unisono.elastic.trait_check import check
from unisono.errors import TaskMismatch
from unisono.trainer.traits import of_config, of_data, of_groups, of_model, of_optimizer, of_task

FILE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

class Net(nn.Linear):
    pass

def loss(output, batch):
    return output.mean()  # the mean

def task():
    return unisono.Task(model=lambda: Net(3, 1), data=TensorDataset(torch.zeros(8, 3)), loss=loss)
"""


def differs(mine: Any, theirs: Any) -> str:
    """The first thing that does; empty where nothing does."""
    try:
        check(mine, theirs, "this worker's", "the run")
    except TaskMismatch as error:
        return error.field
    return ""


def module(directory: Path, text: str, name: str = "own") -> ModuleType:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(f"{name}_{directory.name}", directory / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("old", "new", "alarm"),
    [
        ("output.mean()", "output.sum()", True),
        ("Net(3, 1)", "Net(3, 2)", True),
        ("class Net(nn.Linear):", "class Net(nn.Bilinear):", True),
        ("\n\n", "\n\n\n# a comment\n", False),
        ("\n", "\r\n", False),
        ("pass", "pass   ", False),
    ],
)
def test_code_that_differs_is_named_by_its_file(old: str, new: str, alarm: bool, tmp_path: Path) -> None:
    here, there = module(tmp_path / "here", FILE), module(tmp_path / "there", FILE.replace(old, new))
    assert differs(of_task(here.task()), of_task(there.task())) == ("code of own.py" if alarm else "")
    if "Bilinear" not in new:
        assert differs(of_model(here.Net(3, 1)), of_model(there.Net(3, 1))) == ("code of own.py" if alarm else "")


def test_code_is_found_behind_partial_functions_and_wrappers(tmp_path: Path) -> None:
    here, there = (module(tmp_path / name, FILE.replace("mean", how)) for name, how in (("a", "mean"), ("b", "sum")))

    def task(own: ModuleType) -> Task:
        return Task(model=nn.Flatten, data=[1], loss=functools.partial(functools.partial(own.loss)))

    assert differs(of_task(task(here)), of_task(task(there))) == "code of own.py"


@pytest.mark.parametrize("line", ["import {helper}", "from {helper} import half", "from {helper} import half as mean"])
@pytest.mark.parametrize("inner", [False, True])
def test_code_that_a_task_imports_is_compared(line: str, inner: bool, tmp_path: Path, monkeypatch) -> None:
    """Also by a module that the task's own file imports; what neither imports makes no difference."""
    found = []
    for name, how in (("here", "/ 2"), ("there", "* 2")):
        directory, helper = tmp_path / name, f"helper_{name}"
        monkeypatch.syspath_prepend(str(directory))
        directory.mkdir()
        for file, text in ((helper, f"def half(x):\n    return x {how}"), (f"unused_{name}", f"x = 1 {how}")):
            (directory / f"{file}.py").write_text(text)
        if inner:
            (directory / f"between_{name}.py").write_text(line.format(helper=helper))
        own = line.format(helper=helper) if not inner else f"import between_{name}"
        told = of_task(module(directory, f"{own}\n{FILE}").task())
        found.append({trait.replace(name, "x"): text for trait, text in told.items()})
        assert "code of helper_x.py" in found[-1]
        assert "code of unused_x.py" not in found[-1]
    assert found[0]["code of helper_x.py"] != found[1]["code of helper_x.py"]


def test_the_number_of_samples_is_compared() -> None:
    def task(samples: int) -> Task:
        data = TensorDataset(torch.zeros(samples, 3))
        return Task(model=nn.Flatten, data=[1], loss=lambda output, batch: output.mean(), evaluate=Evaluation(data))

    assert differs(of_data(range(8)), of_data(range(8))) == ""
    assert differs(of_data(range(8)), of_data(range(9))) == "samples"
    assert differs(of_task(task(5)), of_task(task(6))) == "evaluation samples"


def test_a_difference_is_said_with_both_values() -> None:
    with pytest.raises(TaskMismatch) as raised:
        check({"samples": "96", "lr": "0.1"}, {"samples": "48", "lr": "0.2"}, "this worker's", "the run")
    assert str(raised.value) == (
        "samples = 96: that is this worker's, and the run has 48 (they differ in lr as well); give every host the same "
        "task, data and settings."
    )


def test_what_code_makes_is_named_before_the_code() -> None:
    assert differs({"code of own.py": "a", "samples": "1"}, {"code of own.py": "b", "samples": "2"}) == "samples"


def test_data_is_compared_sample_by_sample() -> None:
    here = of_data([float(i) for i in range(20)])
    assert "data" in here
    assert differs(here, {name: text for name, text in here.items() if name != "data"}) == ""
    with pytest.raises(
        TaskMismatch, match="data = sample 15: that is this worker's, and the run has another one under this"
    ):
        check(of_data([float(i) for i in range(15)] + [99.0] * 5), here, "this worker's", "the run")


def net(width: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width)).to(dtype)


def test_models_are_compared_by_names_shapes_and_dtypes_and_not_by_weights() -> None:
    assert differs(of_model(net()), of_model(net())) == ""
    for other in (net(5), net(dtype=torch.float64), nn.Sequential(nn.Linear(3, 4)), nn.ModuleDict({"a": net()})):
        assert differs(of_model(net()), of_model(other)) == "model"


def optimizer(kind: Any = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = kind(net().parameters(), **{"lr": 0.1, **options})
    return found


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (optimizer(), ""),
        (optimizer(foreach=True), ""),
        (optimizer(fused=True), ""),
        (optimizer(lr=torch.tensor(0.1, dtype=torch.float64)), ""),
        (optimizer(lr=0.2), "optimizer.lr"),
        (optimizer(momentum=0.9), "optimizer.momentum"),
        (optimizer(weight_decay=0.01), "optimizer.weight_decay"),
        (optimizer(torch.optim.Adagrad), "optimizer"),
        (torch.optim.SGD(list(net().parameters())[:2], lr=0.1), "optimizer.groups"),
        (torch.optim.SGD([{"params": [p]} for p in net().parameters()], lr=0.1), "optimizer.groups"),
    ],
)
def test_hyperparameters_are_compared_and_how_they_are_computed_is_not(other: Any, field: str) -> None:
    assert differs(of_optimizer(other), of_optimizer(optimizer())) == field


def test_groups_are_the_same_after_a_schedule() -> None:
    assert differs(of_groups(optimizer(lr=0.2)), of_groups(optimizer())) == ""
    assert differs(of_groups(optimizer(torch.optim.Adagrad)), of_groups(optimizer())) == "optimizer"
    assert differs(of_groups(torch.optim.SGD(nn.Linear(2, 2).parameters())), of_groups(optimizer())) == (
        "optimizer.groups"
    )


def test_a_hyperparameter_that_another_version_of_torch_does_not_have_is_no_difference() -> None:
    newer = optimizer()
    for group in newer.param_groups:
        group["new"] = 3
    assert differs(of_optimizer(newer), of_optimizer(optimizer())) == ""
    assert differs(of_optimizer(optimizer()), of_optimizer(newer)) == ""


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"lr": 0.5}, "lr"), ({"sync": "LocalSGD()"}, "sync"), ({"steps": 7}, "steps"), ({"clip": 1.0}, "clip"),
     ({"threads": 3}, ""), ({"run_dir": "there"}, ""), ({"load": "Threads()"}, ""), ({"device": "cpu"}, "")],
)  # fmt: skip
def test_settings_that_change_what_is_computed_are_compared(settings: dict[str, Any], field: str) -> None:
    assert differs(of_config(Config.of(settings)), of_config(Config())) == field


def test_settings_of_a_run_that_is_resumed_are_not_compared() -> None:
    assert not of_config(replace(Config(), resume=True, run_dir="there"))


def test_all_is_short(tmp_path: Path) -> None:
    found = {
        **of_model(nn.Sequential(*(nn.Linear(2, 2) for _ in range(300)))),
        **of_optimizer(torch.optim.SGD([{"params": [p], "lr": i} for i, p in enumerate(net().parameters())], lr=0.1)),
        **of_config(Config()),
        **of_data(range(10**6)),
        **{f"optimizer.x{i}": "1" for i in range(20)},
    }
    assert len(found) <= 256 - 3 * 64  # besides files
    assert all(len(name) <= 256 and len(text) <= 4096 for name, text in found.items())
