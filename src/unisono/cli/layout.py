"""``unisono layout TASK``: what each worker would hold and send under a layout, as a table; nothing is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.cli.request import request
from unisono.cli.task_help import task_options
from unisono.cli.train_options import given, parser
from unisono.errors import InvalidInput, UnisonoError

_DESCRIPTION = """\
Say what each worker would hold of TASK under --layout (parameters, gradients, optimizer state, activations) and what
it would send in a step, without starting any worker and without memory for the model. Takes the options of
unisono train, and refuses what that would refuse."""


def layout(words: list[str]) -> int:
    """Run the words after ``unisono layout``; 0 when everything is said.

    Raises:
        UnisonoError: what was written cannot work.
    """
    if "--help" in words or "-h" in words:
        return _help(words)
    asked = request(given(words))
    if asked.settings.get("resume"):
        raise InvalidInput("resume", True, "nothing is trained here", "leave it out")
    laid = _foretold(asked.source, asked.settings)
    _print(asked.source.name, laid)
    if asked.json:
        _write(asked.json, {"task": asked.source.name, **laid})
    return 0


def _foretold(source: Any, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    from rich.console import Console

    from unisono.run import start as run

    console = Console(stderr=True)
    with console.status("laying it out …") if console.is_terminal else console.capture():
        return run.estimate_layout(source, settings)


def _print(name: str, laid: Mapping[str, Any]) -> None:
    from rich.console import Console

    from unisono.plan import layout_table as laid_table

    console = Console(file=sys.stdout, highlight=False)
    console.print(laid_table.heading(name, laid), style="bold", markup=False)
    for each in laid_table.tables(laid, console.width):
        console.print()
        console.print(each)
    console.print()
    for line in laid_table.notes(laid):
        console.print(line, markup=False)


def _write(path: Path, laid: Mapping[str, Any]) -> None:
    from unisono.observe import write_summary

    try:
        write_summary(path, laid)
    except OSError as error:
        raise UnisonoError(f"the forecast was not written to {path}: {error.strerror}") from error


def _help(words: list[str]) -> int:
    asked = given([word for word in words if word not in ("--help", "-h")])
    made = parser(task_options(asked.task) if asked.task else "")
    made.usage, made.description = "unisono layout TASK --layout 'Layout(…)' --workers N [options]", _DESCRIPTION
    print(made.format_help(), end="")
    return 0
