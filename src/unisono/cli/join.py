"""``unisono join``: starts workers of this host for a run that is in progress."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.cli.argument_words import option_table, read_options, whole_number
from unisono.cli.coordinator_options import coordinator_address
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

Add workers of this host to a run in progress. URL is that of the run's coordinator, whose token is in {VARIABLE}; a run
directory DIR contains both. At Ctrl-C or SIGTERM, these workers finish their step and leave, and the others continue.
The run may also end without them.

This host runs the task or script that is named here, and refuses any other that the coordinator names. Without --task
and --script, the command shows the run's task on the terminal, and asks whether to run it.

  --workers N        processes to start here [1]
  --task NAME        the task of the run, as in unisono train NAME
  --script FILE      the script of the run, as in unisono launch FILE
  --directory DIR    this host's directory of tasks that are not built in [.]
  --run-dir DIR      the directory of a run on this host
  --token-file FILE  file with the token, instead of {VARIABLE}
  --authority FILE   the authority's certificate that has signed the coordinator's certificate, or the fingerprint that
                     the coordinator has printed (sha256:...); none: plain http:// to another host, not encrypted
  --logs DIR         directory for the workers' logs [runs/<host>-<number>/logs]
"""


def join(words: list[str]) -> int:
    """Run ``unisono join`` with the arguments `words`.

    Returns 0 when the run is complete, or all workers of this host have left it.

    Raises:
        UnisonoError: the arguments are invalid, or the workers of this host failed.
    """
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    options, rest = read_options(words, option_table(USAGE))
    workers = whole_number("--workers", options.get("--workers", "1"))
    logs = Path(options["--logs"]) if "--logs" in options else None
    address = address_from(options, rest, "join")
    with Display(f"joining {address.url}", sys.stderr) as display:
        consent = _consent(options, display)
        try:
            result = _join(address, workers, consent, logs, display)
        except Interrupted as interrupted:
            display.close()
            if not interrupted.results or any(result is not None for result in interrupted.results):
                print(interrupted, file=sys.stderr)
                return interrupted.exit_code
            result = None
    print(_summary(result))
    return 0 if result is None or result.get("complete", True) else Interrupted(STOP).exit_code


def address_from(options: Mapping[str, str], rest: list[str], command: str) -> CoordinatorAddress:
    """The coordinator that the arguments of ``unisono join`` or ``unisono status`` name.

    Raises:
        InvalidInput: there is not exactly one URL or run directory.
    """
    if len(rest) + ("--run-dir" in options) != 1:
        given = " ".join(rest) or "(nothing)"
        raise InvalidInput("URL", given, "one run is needed", f"write unisono {command} URL, or --run-dir DIR")
    if rest:
        return coordinator_address(rest[0], options)
    return read_contact(Path(options["--run-dir"]))


def _consent(options: Mapping[str, str], display: Display) -> Consent:
    """What `options` allow this host to run.

    Raises:
        InvalidInput: both a task and a script are given.
    """
    if "--task" in options and "--script" in options:
        raise InvalidInput("--script", options["--script"], "--task is given too, and a run has only one of the two",
                           "leave one out")  # fmt: skip

    def ask(what: str) -> bool:
        display.handle(0, {"kind": "breakpoint"})  # stops the live display
        question = f"the run's coordinator asks this host to run\n  {what}\nrun it? [y/N] "
        print(question, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    is_interactive = sys.stdin.isatty() and sys.stderr.isatty()
    directory = str(Path(options.get("--directory", ".")).absolute())
    return Consent(
        options.get("--task", ""),
        options.get("--script", ""),
        "--run-dir" in options,
        ask if is_interactive else None,
        directory,
    )


def _join(
    address: CoordinatorAddress, workers: int, consent: Consent, logs: Path | None, display: Display
) -> Mapping[str, Any] | None:
    from unisono.run import start as run

    return run.join(address, workers, consent, logs=logs, on_message=display.handle)


def _summary(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "all workers of this host have left; the run may continue without them"
    if "steps" not in result:
        return f"the script has finished; its run directory is {printable(str(result['run']))}"
    return printable(f"the run has ended, {result['ending']}; its run directory is {result['run']}")
