"""``unisono join``: workers of this host for a run that is under way."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.cli.argument_words import read, whole
from unisono.cli.coordinator_options import contact
from unisono.cli.token import VARIABLE
from unisono.errors import InvalidInput, printable
from unisono.launch.stop_request import STOP, Interrupted
from unisono.membership import CoordinatorAddress
from unisono.membership.contact_file import read_contact
from unisono.observe.display import Display
from unisono.run.consent import Consent

USAGE = f"""\
usage: unisono join URL --task NAME [--workers N] [options]
       unisono join URL --script FILE [--workers N] [options]
       unisono join --run-dir DIR [--workers N]

Have workers of this host take part in a run that is under way: it may come to its end without them, and they without
it. URL is that of its coordinator, whose token {VARIABLE} holds; a run that lies in DIR says both itself. At Ctrl-C or
SIGTERM they hand over what they have and leave; the others go on.

This host runs the task or script that is named here, and refuses any other that the coordinator names. Without --task
and --script, the command shows the run's task on a terminal and asks.

  --workers N        processes to start here [1]
  --task NAME        the task of the run, as in unisono train NAME
  --script FILE      the script of the run, as in unisono launch FILE
  --directory DIR    where this host's tasks lie that are not built in [.]
  --token-file FILE  holds the token, in place of {VARIABLE}
  --authority FILE   certificate by which an https:// coordinator is known, or the fingerprint of its own as it is
                     printed there (sha256:...); none: for http:// to another host, which is not encrypted
  --logs DIR         where what they print goes [runs/<host>-<number>/logs]
"""
_CONSENT = ("--task", "--script", "--directory")
REACHING = ("--run-dir", "--token-file", "--authority")  # options that say where a coordinator is


def join(words: list[str]) -> int:
    """Run the words after ``unisono join``; 0 when the run is complete, or all workers of this host have left it.

    Raises:
        UnisonoError: what was written cannot work, or the workers of this host failed.
    """
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    options, rest = read(words, dict.fromkeys((*REACHING, *_CONSENT, "--workers", "--logs"), True))
    workers = whole("--workers", options.get("--workers", "1"))
    logs = Path(options["--logs"]) if "--logs" in options else None
    where = reached(options, rest, "join")
    with Display(f"joining {where.url}", sys.stderr) as display:
        consent = _consent(options, display)
        try:
            result = _join(where, workers, consent, logs, display)
        except Interrupted as stopped:
            display.close()
            if not stopped.results or any(result is not None for result in stopped.results):
                print(stopped, file=sys.stderr)
                return stopped.exit_code
            result = None
    print(_words(result))
    return 0 if result is None or result.get("complete", True) else Interrupted(STOP).exit_code


def reached(options: Mapping[str, str], rest: list[str], command: str) -> CoordinatorAddress:
    """The coordinator that the words after ``unisono join`` or ``unisono status`` mean.

    Raises:
        InvalidInput: not one URL or one run.
    """
    if len(rest) + ("--run-dir" in options) != 1:
        given = " ".join(rest) or "(nothing)"
        raise InvalidInput("URL", given, "one run is needed", f"write unisono {command} URL, or --run-dir DIR")
    if rest:
        return contact(rest[0], options)
    return read_contact(Path(options["--run-dir"]))


def _consent(options: Mapping[str, str], display: Display) -> Consent:
    """What this host is to run, as `options` say it.

    Raises:
        InvalidInput: a task and a script.
    """
    if "--task" in options and "--script" in options:
        raise InvalidInput("--script", options["--script"], "--task is given too", "a run has one of them")

    def asks(what: str) -> bool:
        display.handle(0, {"kind": "breakpoint"})  # from now on nothing moves
        print(
            f"the run's coordinator tells this host to run\n  {what}\nrun it? [y/N] ",
            end="",
            file=sys.stderr,
            flush=True,
        )
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    seen = sys.stdin.isatty() and sys.stderr.isatty()
    directory = str(Path(options.get("--directory", ".")).absolute())
    return Consent(
        options.get("--task", ""),
        options.get("--script", ""),
        "--run-dir" in options,
        asks if seen else None,
        directory,
    )


def _join(
    where: CoordinatorAddress, workers: int, consent: Consent, logs: Path | None, display: Display
) -> Mapping[str, Any] | None:
    from unisono.run import start as run

    return run.join(where, workers, consent, logs=logs, on_message=display.handle)


def _words(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "all workers of this host have left; the run may go on without them"
    if "steps" not in result:
        return f"the script has come to its end; its run lies in {printable(str(result['run']))}"
    return printable(f"the run has ended, {result['ending']}; its result lies in {result['run']}")
