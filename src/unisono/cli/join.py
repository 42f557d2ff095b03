"""``unisono join``: workers of this host for a run that is under way."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.cli.calling import contact
from unisono.cli.token import VARIABLE
from unisono.cli.words import read, whole
from unisono.errors import InvalidInput
from unisono.launch.stopping import STOP, Interrupted
from unisono.membership import Contact
from unisono.membership.card import contact_in
from unisono.observe.display import Display

USAGE = f"""\
usage: unisono join URL [--workers N] [options]
       unisono join --run DIR [--workers N]

Have workers of this host take part in a run that is under way: it may come to its end without them, and they without
it. URL is that of its coordinator, whose token {VARIABLE} holds; a run that lies in DIR says both itself. At Ctrl-C or
SIGTERM they hand over what they have and leave; the others go on.

  --workers N        processes to start here [1]
  --token-file FILE  holds the token, in place of {VARIABLE}
  --authority FILE   certificate by which an https:// coordinator is known
  --logs DIR         where what they print goes [runs/<host>-<number>/logs]
"""
REACHING = ("--run", "--token-file", "--authority")  # options that say where a coordinator is


def join(words: list[str]) -> int:
    """Run the words after ``unisono join``; 0 when the run is complete, or all workers of this host have left it.

    Raises:
        UnisonoError: what was written cannot work, or the workers of this host failed.
    """
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    options, rest = read(words, dict.fromkeys((*REACHING, "--workers", "--logs"), True))
    workers = whole("--workers", options.get("--workers", "1"))
    logs = Path(options["--logs"]) if "--logs" in options else None
    where = reached(options, rest, "join")
    with Display(f"joining {where.url}", sys.stderr) as display:
        try:
            result = _join(where, workers, logs, display)
        except Interrupted as stopped:
            display.close()
            if not stopped.results or any(result is not None for result in stopped.results):
                print(stopped, file=sys.stderr)
                return stopped.exit_code
            result = None
    print(_words(result))
    return 0 if result is None or result.get("complete", True) else Interrupted(STOP).exit_code


def reached(options: Mapping[str, str], rest: list[str], command: str) -> Contact:
    """The coordinator that the words after ``unisono join`` or ``unisono status`` mean.

    Raises:
        InvalidInput: not one URL or one run.
    """
    if len(rest) + ("--run" in options) != 1:
        given = " ".join(rest) or "(nothing)"
        raise InvalidInput("URL", given, "one run is needed", f"write unisono {command} URL, or --run DIR")
    if rest:
        return contact(rest[0], options)
    return contact_in(Path(options["--run"]))


def _join(where: Contact, workers: int, logs: Path | None, display: Display) -> Mapping[str, Any] | None:
    from unisono import run  # imports torch

    return run.join(where, workers, logs=logs, on_message=display.handle)


def _words(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "all workers of this host have left; the run may go on without them"
    if "steps" not in result:
        return f"the script has come to its end; its run lies in {result['run']}"
    return f"the run has ended, {result['ending']}; its result lies in {result['run']}"
