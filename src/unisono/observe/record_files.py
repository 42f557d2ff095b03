"""The two files of a run that are read later: ``config.toml`` (by ``--config``) and ``summary.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from unisono.observe.event_log import plain
from unisono.system import atomic_files as atomic

CONFIG, SUMMARY = "config.toml", "summary.json"
_OF_ONE_RUN = ("run_dir", "resume")  # settings without a meaning for another run


def write_config(directory: Path, settings: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> None:
    """Write ``config.toml``: fields of `Config`, then the task's name and arguments in the table ``task``.

    Args:
        directory: the run directory.
        settings: the settings, as `Config.mapping` returns them.
        name: the task, as on the command line.
        arguments: the task's arguments; None is left out, since TOML cannot represent it.

    Raises:
        OSError: the file cannot be written.
    """
    kept = {key: value for key, value in settings.items() if key not in _OF_ONE_RUN}
    text = tomli_w.dumps(_toml({**kept, "task": {**arguments, "name": name}}))
    replace(directory / CONFIG, text)


def write_summary(path: Path, result: Mapping[str, Any]) -> None:
    """Write a run's result as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    replace(path, json.dumps(plain(result), indent=2, ensure_ascii=False) + "\n")


def replace(path: Path, text: str) -> None:
    """Write `text` to a private file, which replaces `path` when it is complete.

    Raises:
        OSError: the file cannot be written; `path` is unchanged then.
    """
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe
        path.write_text(text, encoding="utf-8")
        return
    atomic.write(path, text.encode())


def _toml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _toml(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_toml(inner) for inner in value]
    return value if isinstance(value, str | bool | int | float) else str(value)
