"""``unisono layout TASK``: estimates memory and communication of each worker under a layout."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.cli.merged_options import build_request
from unisono.cli.task_help import task_options
from unisono.cli.train_options import build_parser, parse_arguments
from unisono.errors import InvalidInput, UnisonoError

_DESCRIPTION = """\
Estimate what each worker would store of TASK under --layout (parameters, gradients, optimizer state, activations) and
what it would send in a step. No worker is started, and no memory for the model is needed. Takes the options of
unisono train, and refuses what it would refuse."""


def layout(words: list[str]) -> int:
    """Run ``unisono layout`` with the arguments `words`; 0 when the table is printed.

    Raises:
        UnisonoError: the arguments are invalid, or the JSON file cannot be written.
    """
    if "--help" in words or "-h" in words:
        return _help(words)
    request = build_request(parse_arguments(words))
    if request.settings.get("resume"):
        raise InvalidInput("resume", True, "this command does not train", "leave it out")
    estimate = _estimate(request.source, request.settings)
    _print(request.source.name, estimate)
    if request.json:
        _write(request.json, {"task": request.source.name, **estimate})
    return 0


def _estimate(source: Any, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    from rich.console import Console

    from unisono.run import start as run

    console = Console(stderr=True)
    with console.status("estimating …") if console.is_terminal else console.capture():
        return run.estimate_layout(source, settings)


def _print(name: str, estimate: Mapping[str, Any]) -> None:
    from rich.console import Console

    from unisono.plan import layout_table

    console = Console(file=sys.stdout, highlight=False)
    console.print(layout_table.heading(name, estimate), style="bold", markup=False)
    for table in layout_table.tables(estimate, console.width):
        console.print()
        console.print(table)
    console.print()
    for line in layout_table.notes(estimate):
        console.print(line, markup=False)


def _write(path: Path, estimate: Mapping[str, Any]) -> None:
    from unisono.observe import write_summary

    try:
        write_summary(path, estimate)
    except OSError as error:
        raise UnisonoError(f"the estimate was not written to {path}: {error.strerror}") from error


def _help(words: list[str]) -> int:
    arguments = parse_arguments([word for word in words if word not in ("--help", "-h")])
    parser = build_parser(task_options(arguments.task) if arguments.task else "")
    parser.usage, parser.description = "unisono layout TASK --layout 'Layout(…)' --workers N [options]", _DESCRIPTION
    print(parser.format_help(), end="")
    return 0
