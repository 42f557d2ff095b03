"""The command ``unisono``: calls the subcommand, and prints errors as sentences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from unisono.cli.argument_words import error_output
from unisono.cli.terminal import ignoring_output_errors, interrupt_output, raising_on_signals
from unisono.errors import InvalidInput, UnisonoError, printable_lines
from unisono.notation import nearest

USAGE = """\
usage: unisono COMMAND …

Train one neural network on many devices as if they were one.

commands:
  train TASK     train a built-in task, path/to/file.py:function or package.module:function
  launch SCRIPT  run a script with its own training loop in several workers
  join URL       add workers of this host to a run in progress
  status URL     show the workers of a run, the line of code where each is, and where the time goes
  coordinator    run a coordinator apart from all workers
  tasks          list the built-in tasks and their options

  layout TASK    estimate memory and communication of each worker when the model is distributed
  simulate TASK  forecast training on other networks: real learning, simulated time
  chaos TASK     kill, freeze and disconnect workers, and compare the result with a run without faults

  export RUN     write the trained weights of a run to a .safetensors or .pt file
  checkpoint     show, verify and convert checkpoints

  --version      print the version
  --help         print this help; after a command, the help of that command

exit codes:
  0    the command succeeded; a run has completed all steps
  1    the run failed; it can be resumed from its last checkpoint
  2    the arguments are invalid, or the loss is not finite
  130  the run was stopped by Ctrl-C (143: SIGTERM, 129: SIGHUP); it can be resumed from its last step

example:
  unisono train digits --workers 2
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: the process's own) and return the exit code.

    The codes: 0: success; 1: a run failed; 2: the arguments are invalid, or the loss is not finite; 128 plus the number
    of a signal: interrupted by that signal.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with ignoring_output_errors() if words[:1] and words[0] in LONG_RUNNING else nullcontext():
        return _main(words)


def _main(words: list[str]) -> int:
    try:
        with raising_on_signals():
            return _command(words)
    except UnisonoError as error:
        return _print_error(*error_output(error))
    except KeyboardInterrupt as error:
        return _print_error(*interrupt_output(error))
    except BrokenPipeError:  # the reader of the output has exited, as head does
        sys.stderr.close()
        return 1


def _command(words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if name in ("-V", "--version"):
        print(f"unisono {_version()}")
        return 0
    if name not in COMMANDS:
        raise InvalidInput("command", name, "there is no such command", nearest(name, [*COMMANDS, "--version"]))
    return COMMANDS[name](rest)


def _train(words: list[str]) -> int:
    from unisono.cli.train import train

    return train(words)


def _simulate(words: list[str]) -> int:
    from unisono.cli.simulate import simulate

    return simulate(words)


def _layout(words: list[str]) -> int:
    from unisono.cli.layout import layout

    return layout(words)


def _launch(words: list[str]) -> int:
    from unisono.cli.launch import launch

    return launch(words)


def _tasks(words: list[str]) -> int:
    from unisono.cli.tasks import tasks

    return tasks(words)


def _join(words: list[str]) -> int:
    from unisono.cli.join import join

    return join(words)


def _status(words: list[str]) -> int:
    from unisono.cli.status import status

    return status(words)


def _coordinator(words: list[str]) -> int:
    from unisono.cli.coordinator import coordinator

    return coordinator(words)


def _chaos(words: list[str]) -> int:
    from unisono.cli.chaos import chaos

    return chaos(words)


def _checkpoint(words: list[str]) -> int:
    from unisono.cli.checkpoint import checkpoint

    return checkpoint(words)


def _export(words: list[str]) -> int:
    from unisono.cli.export import export

    return export(words)


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


LONG_RUNNING = ("train", "launch", "join", "coordinator", "chaos")
"""Commands that continue when their standard output is closed."""


def _version() -> str:
    from importlib.metadata import version

    return version("unisono")


def _print_error(message: str, code: int) -> int:
    print(printable_lines(message), file=sys.stderr)
    return code
