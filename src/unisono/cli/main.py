"""The command ``unisono``: find the subcommand, call it, and say in words what went wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from unisono.cli.argument_words import ended
from unisono.cli.terminal import endable, ending, going_on_unread
from unisono.errors import InvalidInput, UnisonoError, printable_lines
from unisono.notation import nearest

USAGE = """\
usage: unisono COMMAND …

Train one neural network on many devices as if they were one.

commands:
  train TASK     train a built-in task, path/to/file.py:function or package.module:function
  simulate TASK  forecast what training is like on other networks, with learning that is real
  layout TASK    say what each worker would hold and send when a model lies on several
  launch SCRIPT  run a script with its own training loop on several workers
  tasks          list the built-in tasks and their options
  join URL       have workers of this host take part in a run that is under way
  status URL     say who takes part in a run, what each does on which line, where the time goes, and what happened
  coordinator    agree on who trains, apart from all workers
  chaos TASK     kill, freeze and cut off workers of a training, and see whether that changes anything
  export RUN     write the trained weights of a run to a safetensors or .pt file
  checkpoint     show and verify checkpoints, convert them to safetensors and back

  --version      print the version
  --help         print this; also after a command

exit codes:
  0    done: of a run, all steps
  1    a run failed; it can be resumed from its last checkpoint
  2    what was written cannot work, or the loss is not finite
  130  a run was asked to stop by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP; it can be resumed from its last step

for instance:
  unisono train digits --workers 2
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: the process's own) and return the exit code.

    0: done. 1: a run failed. 2: what was written cannot work. 128 and a signal's number: interrupted by it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with going_on_unread() if given[:1] and given[0] in LONG else nullcontext():
        return _main(given)


def _main(given: list[str]) -> int:
    try:
        with endable():
            return _command(given)
    except UnisonoError as error:
        return _say(*ended(error))
    except KeyboardInterrupt as error:
        return _say(*ending(error))
    except BrokenPipeError:  # the reader of our output went away, as head does
        sys.stderr.close()
        return 1


def _command(given: list[str]) -> int:
    name, rest = (given[0], given[1:]) if given else ("--help", [])
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if name in ("-V", "--version"):
        print(f"unisono {_version()}")
        return 0
    if name not in COMMANDS:
        raise InvalidInput("command", name, "there is no such command", nearest(name, [*COMMANDS, "--version"]))
    return COMMANDS[name](rest)


def _train(given: list[str]) -> int:
    from unisono.cli.train import train

    return train(given)


def _simulate(given: list[str]) -> int:
    from unisono.cli.simulate import simulate

    return simulate(given)


def _layout(given: list[str]) -> int:
    from unisono.cli.layout import layout

    return layout(given)


def _launch(given: list[str]) -> int:
    from unisono.cli.launch import launch

    return launch(given)


def _tasks(given: list[str]) -> int:
    from unisono.cli.tasks import tasks

    return tasks(given)


def _join(given: list[str]) -> int:
    from unisono.cli.join import join

    return join(given)


def _status(given: list[str]) -> int:
    from unisono.cli.status import status

    return status(given)


def _coordinator(given: list[str]) -> int:
    from unisono.cli.coordinator import coordinator

    return coordinator(given)


def _chaos(given: list[str]) -> int:
    from unisono.cli.chaos import chaos

    return chaos(given)


def _checkpoint(given: list[str]) -> int:
    from unisono.cli.checkpoint import checkpoint

    return checkpoint(given)


def _export(given: list[str]) -> int:
    from unisono.cli.export import export

    return export(given)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "simulate": _simulate,
    "layout": _layout,
    "launch": _launch,
    "tasks": _tasks,
    "join": _join,
    "status": _status,
    "coordinator": _coordinator,
    "chaos": _chaos,
    "export": _export,
    "checkpoint": _checkpoint,
}


LONG = ("train", "launch", "join", "coordinator", "chaos")
"""Commands that go on when their standard output is closed: their work is worth more than what they print."""


def _version() -> str:
    from importlib.metadata import version

    return version("unisono")


def _say(sentence: str, code: int) -> int:
    print(printable_lines(sentence), file=sys.stderr)
    return code
