"""Merges a TOML file, options and ``--set``, of which the later ones win, into a task and its settings."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.cli.argument_words import whole_number
from unisono.cli.config_fields import Field, fields
from unisono.cli.coordinator_options import coordinator_options
from unisono.cli.train_options import TrainArguments
from unisono.errors import InvalidInput
from unisono.membership.endpoint import CoordinatorOptions
from unisono.notation import RENAMED_SETTINGS, current_names, nearest
from unisono.tasks import TASKS
from unisono.tasks.arguments import merged, nested
from unisono.tasks.source import NamedTask


@dataclass(frozen=True)
class TrainRequest:
    """What the command was asked to train.

    Args:
        source: the task.
        settings: the fields of `Config` that were given.
        json: the path for the result as JSON; None: it is not written.
        coordinator: where the run's coordinator is; None: no option says so.
        debug: the rank of the worker that has the terminal; None: no option names one.
    """

    source: NamedTask
    settings: Mapping[str, Any]
    json: Path | None
    coordinator: CoordinatorOptions | None = None
    debug: int | None = None


def build_request(arguments: TrainArguments) -> TrainRequest:
    """Merge the file, the options and every ``--set`` of `arguments`.

    Raises:
        InvalidInput: no task is given or the task is unknown, a file is unusable, or a ``--set`` is not KEY=VALUE.
    """
    known = fields()
    set_settings, set_arguments = read_sets(arguments.sets, known)
    file = arguments.config or _resumed_config(arguments, {**arguments.settings, **set_settings})
    name, settings, file_arguments = read_file(file, known) if file else (None, {}, {})
    task = arguments.task or name
    if task is None:
        raise InvalidInput(
            "task", "(nothing)", "no task is given", f"begin with one: {', '.join(TASKS)} or file.py:function"
        )
    chosen = {**settings, **arguments.settings, **set_settings}
    task_arguments = merged(merged(nested(file_arguments), nested(arguments.arguments)), nested(set_arguments))
    source = NamedTask(task, task_arguments, os.getcwd())
    source.place()
    return TrainRequest(
        source,
        {key: _plain(known[key], value) for key, value in chosen.items()},
        _json(arguments.json),
        coordinator_options(arguments.coordinator),
        whole_number("--debug", arguments.debug, 0) if arguments.debug is not None else None,
    )


def _resumed_config(arguments: TrainArguments, settings: Mapping[str, Any]) -> str | None:
    """The configuration file of the run to resume, if no task is named."""
    if arguments.task or not settings.get("resume") or not settings.get("run_dir"):
        return None
    file = Path(settings["run_dir"], "config.toml")
    return str(file) if file.is_file() else None


def read_file(path: str, known: Mapping[str, Field]) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """The task's name, fields of `Config`, and the task's arguments in a TOML file.

    Top-level keys are fields of `Config`; the table ``task`` has the task's ``name`` and its arguments.

    Raises:
        InvalidInput: the file cannot be read, is not TOML, or has an unknown key.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput("--config", path, f"cannot be read ({error.strerror})", "check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput("--config", path, f"not TOML ({error})", "correct the file") from None
    arguments = content.pop("task", {})
    if not isinstance(arguments, dict):
        raise InvalidInput("task", arguments, f"in {path} it is not a table", 'write [task], and name = "…" below it')
    name = arguments.pop("name", None)
    settings = current_names({key.replace("-", "_"): value for key, value in content.items()})
    for key, value in settings.items():
        if key not in known:
            raise InvalidInput(key, value, f"there is no such setting (in {path})", nearest(key, [*known, "task"]))
    return name, settings, arguments


def read_sets(sets: Sequence[str], known: Mapping[str, Field]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of `Config`, and the arguments of the task, in all ``KEY=VALUE``. A value in brackets is a TOML list.

    Raises:
        InvalidInput: a word is not ``KEY=VALUE``, or a list is not TOML.
    """
    settings: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for word in sets:
        key, equals, value = word.partition("=")
        if not (equals and key):
            raise InvalidInput("--set", word, "not KEY=VALUE", "write for instance --set lr=0.001")
        key = key.strip().replace("-", "_")
        if key in RENAMED_SETTINGS:
            raise InvalidInput("--set", word, "there is no such setting", f"write {RENAMED_SETTINGS[key]}={value}")
        (settings if key in known else arguments)[key] = _listed(word, value.strip())
    return settings, arguments


def _listed(word: str, value: str) -> Any:
    if not value.startswith("["):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(
            "--set", word, f"not a list ({error})", """write for instance --set 'text=["a", "b"]'"""
        ) from None


def _plain(field: Field, value: Any) -> Any:
    """None for the text ``none``, if the field may be None."""
    return None if field.optional and isinstance(value, str) and value.lower() == "none" else value


def _json(path: str | None) -> Path | None:
    if path is None:
        return None
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise InvalidInput("--json", path, f"there is no directory {file.parent}", "make it, or name another file")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InvalidInput("--json", path, "not a file that can be written", "name another file")
    return file
