"""The traits of a task, a script, a dataset, a model and an optimizer: see `unisono.elastic.trait_check`."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.config import IDENTITY, Config
from unisono.data.content_sample import encode, sample_of
from unisono.elastic.agreement import shown
from unisono.elastic.model_state import weights_of
from unisono.elastic.trait_check import CODE, DATA, Traits
from unisono.observe.user_frames import is_user_code
from unisono.tasks.task import Evaluation, Task

# What of a config changes what is computed, and is not a matter of one host.
_SETTINGS = (*IDENTITY, "steps", "epochs", "sync", "layout", "lr", "clip", "schedule", "bad_step")
# How an optimizer computes, which may differ with the device; and what is no hyperparameter.
_LEFT_OUT = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_SHORT = 120
_MOST_FILES = 64


def of_task(task: Task) -> Traits:
    """Of the user's files that define a task, as far as its functions and its dataset tell them, with what these files
    import, and of the number of samples for evaluation."""
    evaluation = task.evaluate.data if isinstance(task.evaluate, Evaluation) else task.evaluate
    makers = [getattr(task, field.name) for field in fields(task) if callable(getattr(task, field.name))]
    return {**_code([*makers, type(evaluation)]), **_length("evaluation samples", evaluation)}


def of_script() -> Traits:
    """Of the user's script that runs in this process, if there is one."""
    return _code_in(_files([sys.modules["__main__"]]))


def of_data(dataset: Any) -> Traits:
    """Of a dataset's length, of some of its items, and of the user's file that defines it."""
    items = sample_of(dataset)
    content = {DATA: encode(items)} if items else {}
    return {**_code([type(dataset)]), **_length("samples", dataset), **content}


def of_model(model: nn.Module) -> Traits:
    """Of the names, shapes and dtypes of all parameters and buffers, and of the user's files that define modules."""
    told = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in sorted(weights_of(model).items())]
    numbers = sum(tensor.numel() for tensor in weights_of(model).values())
    text = f"{len(told)} tensors of {numbers} numbers, {_digest(chr(10).join(told))}"
    return {"model": text, **_code(type(module) for module in model.modules())}


def of_groups(optimizer: Optimizer) -> Traits:
    """Of an optimizer's class, and of the number of parameters in each of its groups."""
    counts = [len(group["params"]) for group in optimizer.param_groups]
    return {"optimizer": type(optimizer).__name__, "optimizer.groups": _short(str(counts))}


def of_optimizer(optimizer: Optimizer) -> Traits:
    """The same, and of the hyperparameters of all groups."""
    groups, found = optimizer.param_groups, dict(of_groups(optimizer))
    for key in dict.fromkeys(key for group in groups for key in group if key not in _LEFT_OUT):
        values = [shown(group.get(key)) for group in groups]
        found[f"optimizer.{key}"] = _short(values[0] if len(set(values)) == 1 else str(values))
    return found


def of_config(config: Config) -> Traits:
    """Of the settings that decide what is computed; nothing of a run that is resumed, which not all hosts know."""
    if config.resume:
        return {}
    told = config.mapping()
    return {name: _short(str(told[name])) for name in _SETTINGS}


def _code(makers: Iterable[Any]) -> dict[str, str]:
    """Of the source files of functions and classes, as far as the user wrote them."""
    return _code_in(_files(module for maker in makers for module in _modules(maker)))


def _code_in(files: Iterable[str]) -> dict[str, str]:
    by_name: dict[str, list[str]] = {}
    for file in files:
        if source := _source(file):
            by_name.setdefault(Path(file).name, []).append(source)
    found = {f"{CODE} of {name}": _digest(" ".join(sorted(sources))) for name, sources in sorted(by_name.items())}
    return found if len(found) <= _MOST_FILES else {CODE: _digest(str(found))}


def _files(modules: Iterable[ModuleType]) -> set[str]:
    """Of modules that the user wrote, and of those of the user's that they import."""
    found: set[str] = set()
    left = list(modules)
    while left:
        module = left.pop()
        file = getattr(module, "__file__", None)
        if file and file not in found and is_user_code(file):
            found.add(file)
            left += [imported for value in list(vars(module).values()) for imported in _defined_in(value)]
    return found


def _modules(maker: Any) -> list[ModuleType]:
    """Where a function or class is defined, or an object's class; what functions of functions are made of."""
    if isinstance(maker, functools.partial):
        return [module for part in (maker.func, *maker.args, *maker.keywords.values()) for module in _modules(part)]
    named = maker if inspect.isfunction(maker) or inspect.isclass(maker) or inspect.ismethod(maker) else type(maker)
    return _defined_in(inspect.unwrap(named))


def _defined_in(value: Any) -> list[ModuleType]:
    """A module itself; the one in which a function or class is defined."""
    if isinstance(value, ModuleType):
        return [value]
    named = inspect.isfunction(value) or inspect.isclass(value) or inspect.ismethod(value)
    module = sys.modules.get(value.__module__) if named else None
    return [module] if module else []


def _source(file: str) -> str:
    """The code in `file`, without blank lines, comments of whole lines and the ends of lines."""
    with suppress(OSError):
        lines = [line.rstrip() for line in Path(file).read_text("utf-8", errors="replace").splitlines()]
        return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
    return ""


def _length(name: str, dataset: Any) -> dict[str, str]:
    with suppress(TypeError):
        return {name: str(len(dataset))}
    return {}


def _short(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[: _SHORT // 2]}… {_digest(text)}"


def _digest(text: str) -> str:
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"
