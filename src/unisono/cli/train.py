"""``unisono train TASK``: parse, start the run, show how it goes and what came of it."""

from __future__ import annotations

import dataclasses
import sys

from unisono.cli.describe import task_options
from unisono.cli.options import given, parser
from unisono.cli.settings import request
from unisono.observe.display import Display, summary


def train(words: list[str]) -> int:
    """Run the words after ``unisono train``; 0 when the run has come to its end.

    Raises:
        UnisonoError: what was written cannot work, or the run failed.
    """
    if "--help" in words or "-h" in words:
        return _help(words)
    asked = request(given(words))

    from unisono import run  # imports torch: only now, so that a mistyped command line is answered at once

    with Display(asked.source.name, sys.stderr) as display:
        result = run.start(asked.source, asked.settings, json=asked.json, on_message=display.handle)
    if result is not None:  # a worker that another launcher started leaves the last word to worker 0
        summary(asked.source.name, dataclasses.asdict(result), sys.stdout)
    return 0


def _help(words: list[str]) -> int:
    asked = given([word for word in words if word not in ("--help", "-h")])
    print(parser(task_options(asked.task) if asked.task else "").format_help(), end="")
    return 0
