"""From words and a TOML file to a `NamedTask` and settings: the file first, then options, then ``--set``."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.cli.argument_words import whole
from unisono.cli.config_fields import Field, fields
from unisono.cli.coordinator_options import calling
from unisono.cli.train_options import Given
from unisono.errors import InvalidInput
from unisono.membership.endpoint import CoordinatorOptions
from unisono.notation import RENAMED_SETTINGS, current_names, nearest
from unisono.tasks import TASKS
from unisono.tasks.arguments import merged, nested
from unisono.tasks.source import NamedTask


@dataclass(frozen=True)
class Request:
    """What is to be trained and how, as the user wrote it.

    Args:
        source: the task.
        settings: the Config fields that were given.
        json: where the result is written.
        calling: where the coordinator is, if that is said.
        debug: the worker that has the terminal for ``breakpoint()``, if that is said.
    """

    source: NamedTask
    settings: Mapping[str, Any]
    json: Path | None
    calling: CoordinatorOptions | None = None
    debug: int | None = None


def request(given: Given) -> Request:
    """Merge the file, the options and every ``--set``.

    Raises:
        InvalidInput: no task or an unknown one, an unusable file, or a ``--set`` that is not KEY=VALUE.
    """
    known = fields()
    set_settings, set_arguments = read_sets(given.sets, known)
    file = given.config or _earlier(given, {**given.settings, **set_settings})
    name, settings, arguments = read_file(file, known) if file else (None, {}, {})
    task = given.task or name
    if task is None:
        raise InvalidInput(
            "task", "(nothing)", "no task is given", f"begin with one: {', '.join(TASKS)} or file.py:function"
        )
    chosen = {**settings, **given.settings, **set_settings}
    theirs = merged(merged(nested(arguments), nested(given.arguments)), nested(set_arguments))
    source = NamedTask(task, theirs, os.getcwd())
    source.place()
    return Request(
        source,
        {key: _plain(known[key], value) for key, value in chosen.items()},
        _json(given.json),
        calling(given.calling),
        whole("--debug", given.debug, 0) if given.debug is not None else None,
    )


def _earlier(given: Given, settings: Mapping[str, Any]) -> str | None:
    """The file of the run that is resumed, where no task is named: it knows what was trained."""
    if given.task or not settings.get("resume") or not settings.get("run_dir"):
        return None
    file = Path(settings["run_dir"], "config.toml")
    return str(file) if file.is_file() else None


def read_file(path: str, known: Mapping[str, Field]) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """The task's name, Config fields and the task's arguments in a TOML file.

    Top-level keys are Config fields; the table ``task`` holds the task's arguments and its name, ``name``.

    Raises:
        InvalidInput: the file cannot be read, is not TOML, or has an unknown key.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput("--config", path, f"cannot be read ({error.strerror})", "check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput("--config", path, f"not TOML ({error})", "correct it there") from None
    arguments = content.pop("task", {})
    if not isinstance(arguments, dict):
        raise InvalidInput("task", arguments, f"in {path} it is not a table", '[task] with name = "…" below it')
    name = arguments.pop("name", None)
    settings = current_names({key.replace("-", "_"): value for key, value in content.items()})
    for key, value in settings.items():
        if key not in known:
            raise InvalidInput(key, value, f"{path} has a field that is not known", nearest(key, [*known, "task"]))
    return name, settings, arguments


def read_sets(sets: Sequence[str], known: Mapping[str, Field]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config fields and task arguments of every ``KEY=VALUE``; a value in brackets is a TOML list.

    Raises:
        InvalidInput: one has no equals sign.
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
    """``none`` is how a field that may be None is written in text."""
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
