"""``unisono train TASK``: starts a run, shows its progress and its result."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from unisono.cli.argument_words import error_output
from unisono.cli.merged_options import TrainRequest, build_request
from unisono.cli.task_help import task_options
from unisono.cli.train_options import build_parser, parse_arguments
from unisono.errors import Diverged, InvalidInput, UnisonoError
from unisono.launch import current_identity
from unisono.launch.stop_request import Interrupted
from unisono.observe.display import Display, summary
from unisono.observe.formatting import resume_command


def train(words: list[str]) -> int:
    """Run ``unisono train`` with the arguments `words`.

    Returns 0 when all steps are done, or 128 plus the number of the signal that has interrupted the run.

    Raises:
        UnisonoError: the arguments are invalid, or the run failed.
    """
    if "--help" in words or "-h" in words:
        return _help(words)
    request = build_request(parse_arguments(words))
    if current_identity().rank > 0:  # under another launcher, where worker 0 prints for all
        try:
            start_run(request, _quiet)
        except Interrupted as interrupted:
            return interrupted.exit_code
        return 0
    with Display(request.source.name, sys.stderr) as display:
        try:
            result = start_run(request, display.handle)
        except Interrupted as interrupted:
            return _stopped(interrupted, display)
        except (InvalidInput, Diverged):
            raise
        except UnisonoError as error:
            return _stopped(error, display)
    if result is not None:
        summary(request.source.name, result, sys.stdout)
    return 0


def start_run(request: TrainRequest, on_message: Callable[[int, Mapping[str, Any]], None]) -> Mapping[str, Any] | None:
    """Run what `request` asks for, and return the fields of the `Result`.

    Returns None in a worker other than 0 of another launcher, and if all workers of this host have left the run.
    """
    from unisono.run import start as run

    result = run.start(
        request.source,
        request.settings,
        json=request.json,
        on_message=on_message,
        coordinator=request.coordinator,
        debug=request.debug,
    )
    return None if result is None else dataclasses.asdict(result)


def _stopped(error: UnisonoError, display: Display) -> int:
    """Print why the run has stopped, and how to resume it."""
    display.close()
    message, code = error_output(error)
    print(message, file=sys.stderr)
    if display.run is not None:
        print(f"the run directory is {display.run}; resume with  {resume_command(display.run)}", file=sys.stderr)
    return code


def _quiet(rank: int, message: Mapping[str, Any]) -> None:
    pass


def _help(words: list[str]) -> int:
    arguments = parse_arguments([word for word in words if word not in ("--help", "-h")])
    print(build_parser(task_options(arguments.task) if arguments.task else "").format_help(), end="")
    return 0
