"""``unisono train TASK``: parse, start the run, show how it goes and what came of it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from unisono.cli.argument_words import ended
from unisono.cli.request import Request, request
from unisono.cli.task_help import task_options
from unisono.cli.train_options import given, parser
from unisono.errors import Diverged, InvalidInput, UnisonoError
from unisono.launch import current_identity
from unisono.launch.stop_request import Interrupted
from unisono.observe.display import Display, summary
from unisono.observe.formatting import resume_command


def train(words: list[str]) -> int:
    """Run the words after ``unisono train``; 0 when all steps are done, 128 and the signal's number when the run was
    asked to stop before.

    Raises:
        UnisonoError: what was written cannot work, or the run failed.
    """
    if "--help" in words or "-h" in words:
        return _help(words)
    asked = request(given(words))
    if current_identity().rank > 0:  # under another launcher, where worker 0 speaks for all
        try:
            run_of(asked, _quiet)
        except Interrupted as stopped:
            return stopped.exit_code
        return 0
    with Display(asked.source.name, sys.stderr) as display:
        try:
            result = run_of(asked, display.handle)
        except Interrupted as stopped:
            return _stopped(stopped, display)
        except (InvalidInput, Diverged):
            raise
        except UnisonoError as error:
            return _stopped(error, display)
    if result is not None:
        summary(asked.source.name, result, sys.stdout)
    return 0


def run_of(asked: Request, on_message: Callable[[int, Mapping[str, Any]], None]) -> Mapping[str, Any] | None:
    """Start what was asked for: the fields of its `Result`, or None for a worker of another launcher."""
    from unisono.run import start as run

    result = run.start(
        asked.source, asked.settings, json=asked.json, on_message=on_message, calling=asked.calling, debug=asked.debug
    )
    return None if result is None else dataclasses.asdict(result)


def _stopped(error: UnisonoError, display: Display) -> int:
    """Say why the run ended before its end, and how to go on with it."""
    display.close()
    words, code = ended(error)
    print(words, file=sys.stderr)
    if display.run is not None:
        print(f"the run lies in {display.run}; go on with  {resume_command(display.run)}", file=sys.stderr)
    return code


def _quiet(rank: int, message: Mapping[str, Any]) -> None:
    pass


def _help(words: list[str]) -> int:
    asked = given([word for word in words if word not in ("--help", "-h")])
    print(parser(task_options(asked.task) if asked.task else "").format_help(), end="")
    return 0
