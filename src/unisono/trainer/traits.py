"""Computes the traits of a task, script, dataset, model or optimizer: see `unisono.elastic.trait_check`."""

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

# Settings that change what is computed, and do not depend on one host.
_SETTINGS = (*IDENTITY, "steps", "epochs", "sync", "layout", "lr", "clip", "schedule", "bad_step")
# Keys that are no hyperparameters, or that choose an implementation, which may differ between devices.
_IGNORED_KEYS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_MAX_LENGTH = 120
_MAX_FILES = 64


def of_task(task: Task) -> Traits:
    """Traits of the user's files that define a task and of those that they import, and the evaluation sample count.

    The files are those of the task's functions and dataset.
    """
    evaluation = task.evaluate.data if isinstance(task.evaluate, Evaluation) else task.evaluate
    definitions = [getattr(task, field.name) for field in fields(task) if callable(getattr(task, field.name))]
    return {**_code([*definitions, type(evaluation)]), **_length("evaluation samples", evaluation)}


def of_script() -> Traits:
    """Traits of the user's script that runs in this process, if there is one."""
    return _code_in(_files([sys.modules["__main__"]]))


def of_data(dataset: Any) -> Traits:
    """Traits of a dataset: its length, some of its items, and the user's file that defines it."""
    items = sample_of(dataset)
    content = {DATA: encode(items)} if items else {}
    return {**_code([type(dataset)]), **_length("samples", dataset), **content}


def of_model(model: nn.Module) -> Traits:
    """Traits of a model: names, shapes and dtypes of parameters and buffers, and the user's files that define it."""
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in sorted(weights_of(model).items())]
    numbers = sum(tensor.numel() for tensor in weights_of(model).values())
    text = f"{len(lines)} tensors of {numbers} numbers, {_digest(chr(10).join(lines))}"
    return {"model": text, **_code(type(module) for module in model.modules())}


def of_groups(optimizer: Optimizer) -> Traits:
    """Traits of an optimizer: its class, and the number of parameters in each of its groups."""
    counts = [len(group["params"]) for group in optimizer.param_groups]
    return {"optimizer": type(optimizer).__name__, "optimizer.groups": _short(str(counts))}


def of_optimizer(optimizer: Optimizer) -> Traits:
    """Those of `of_groups`, and the hyperparameters of all groups."""
    groups, traits = optimizer.param_groups, dict(of_groups(optimizer))
    for key in dict.fromkeys(key for group in groups for key in group if key not in _IGNORED_KEYS):
        values = [shown(group.get(key)) for group in groups]
        traits[f"optimizer.{key}"] = _short(values[0] if len(set(values)) == 1 else str(values))
    return traits


def of_config(config: Config) -> Traits:
    """Traits of the settings that decide what is computed; none for a resumed run, which not all hosts know."""
    if config.resume:
        return {}
    settings = config.mapping()
    return {name: _short(str(settings[name])) for name in _SETTINGS}


def _code(definitions: Iterable[Any]) -> dict[str, str]:
    """Traits of the user's source files that define these functions and classes."""
    return _code_in(_files(module for definition in definitions for module in _modules(definition)))


def _code_in(files: Iterable[str]) -> dict[str, str]:
    by_name: dict[str, list[str]] = {}
    for file in files:
        if source := _source(file):
            by_name.setdefault(Path(file).name, []).append(source)
    traits = {f"{CODE} of {name}": _digest(" ".join(sorted(sources))) for name, sources in sorted(by_name.items())}
    return traits if len(traits) <= _MAX_FILES else {CODE: _digest(str(traits))}


def _files(modules: Iterable[ModuleType]) -> set[str]:
    """The files of the user's modules among these, and of the user's modules that they import."""
    files: set[str] = set()
    pending = list(modules)
    while pending:
        module = pending.pop()
        file = getattr(module, "__file__", None)
        if file and file not in files and is_user_code(file):
            files.add(file)
            pending += [imported for value in list(vars(module).values()) for imported in _defined_in(value)]
    return files


def _modules(value: Any) -> list[ModuleType]:
    """The module that defines a function or class, or an object's class; for a partial, those of its parts."""
    if isinstance(value, functools.partial):
        return [module for part in (value.func, *value.args, *value.keywords.values()) for module in _modules(part)]
    named = value if inspect.isfunction(value) or inspect.isclass(value) or inspect.ismethod(value) else type(value)
    return _defined_in(inspect.unwrap(named))


def _defined_in(value: Any) -> list[ModuleType]:
    """A module itself, or the module that defines a function or class; empty for other values."""
    if isinstance(value, ModuleType):
        return [value]
    named = inspect.isfunction(value) or inspect.isclass(value) or inspect.ismethod(value)
    module = sys.modules.get(value.__module__) if named else None
    return [module] if module else []


def _source(file: str) -> str:
    """The code in `file`, without blank lines, lines with only a comment, and trailing whitespace."""
    with suppress(OSError):
        lines = [line.rstrip() for line in Path(file).read_text("utf-8", errors="replace").splitlines()]
        return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
    return ""


def _length(name: str, dataset: Any) -> dict[str, str]:
    with suppress(TypeError):
        return {name: str(len(dataset))}
    return {}


def _short(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH // 2]}… {_digest(text)}"


def _digest(text: str) -> str:
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"
