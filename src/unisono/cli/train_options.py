"""Options of ``unisono train``: the fields of `Config`, the command's own options, and those of the task."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from unisono.cli.argument_words import RENAMED, unknown_option
from unisono.cli.config_fields import Field, fields
from unisono.cli.coordinator_options import OPTIONS as COORDINATOR_OPTIONS
from unisono.errors import InvalidInput

_DESCRIPTION = """\
Train TASK: a built-in one (see unisono tasks), path/to/file.py:function or package.module:function.
Values are Python expressions: --compress 'Exact()'."""
_OWN = ("--config", "--set", "--json", "--debug", "--help", *COORDINATOR_OPTIONS)


@dataclass(frozen=True)
class TrainArguments:
    """The arguments of ``unisono train``, as text.

    Args:
        task: the name of the task; None: it is not given.
        settings: the fields of `Config` that are given.
        arguments: the options of the task: a text, a list of texts, or True for an option without value.
        sets: ``KEY=VALUE`` of every ``--set``.
        config: the path of a TOML file; None: there is none.
        json: the path for the result as JSON; None: it is not written.
        coordinator: the options of `unisono.cli.coordinator_options` that are given.
        debug: the rank of the worker that has the terminal; None: no option names one.
    """

    task: str | None
    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]
    sets: Sequence[str]
    config: str | None
    json: str | None
    coordinator: Mapping[str, str]
    debug: str | None = None


def parse_arguments(words: Sequence[str]) -> TrainArguments:
    """Parse the arguments of ``unisono train``.

    Raises:
        InvalidInput: a known option has no value, or more than one task is given.
    """
    tasks, own, task_arguments = split_words(words, option_arity(fields()))
    if len(tasks) > 1:
        cure = "give one, and options as --name value"
        raise InvalidInput("task", " ".join(tasks), "more than one task is given", cure)
    parsed = vars(build_parser().parse_args(own))
    config, json, sets, debug = (parsed.pop(name) for name in ("config_file", "json_file", "sets", "debug_rank"))
    coordinator = {name: parsed.pop(name) for name in COORDINATOR_OPTIONS if name in parsed}
    task = tasks[0] if tasks else None
    return TrainArguments(task, parsed, task_arguments, sets, config, json, coordinator, debug)


def option_arity(known: Mapping[str, Field]) -> dict[str, int]:
    """The command's own options, with the number of words that follow each."""
    own: dict[str, int] = dict.fromkeys(_OWN, 1) | {"--help": 0, "-h": 0}
    for field in known.values():
        own[field.option] = 0 if field.kind == "bool" else 1
        if field.kind == "bool":
            own["--no-" + field.option.removeprefix("--")] = 0
    return own


def split_words(words: Sequence[str], known: Mapping[str, int]) -> tuple[list[str], list[str], dict[str, Any]]:
    """Split `words` into arguments, the command's own options with their values, and options of the task.

    An option of the task takes all words up to the next option: none (True), one (a text) or several (a list).
    """
    arguments: list[str] = []
    own: list[str] = []
    task_arguments: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            arguments.append(word)
            continue
        if name in RENAMED:
            raise unknown_option(name, value, list(known))
        if not word.startswith("--") or name in known:
            arity = 0 if equals else known.get(name, 0)
            own += [word, *rest[:arity]]
            del rest[:arity]
            continue
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--") and rest[0] != "-h":
            values.append(rest.pop(0))
        task_arguments[name.removeprefix("--")] = True if not values else values[0] if len(values) == 1 else values
    return arguments, own, task_arguments


def build_parser(task_options: str = "") -> argparse.ArgumentParser:
    """The parser of the command's own options; its help ends with `task_options`."""
    parser = _Parser(
        prog="unisono train",
        usage="unisono train TASK [options]",
        description=_DESCRIPTION,
        epilog=task_options or "Options of the task itself: unisono train TASK --help",
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_Help,
    )
    training = parser.add_argument_group("training")
    for field in fields().values():
        _add(training, field)
    command = parser.add_argument_group("command")
    command.add_argument(
        "--config", dest="config_file", metavar="FILE.toml", default=None, help="read settings from this file"
    )
    command.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting or option of the task; repeatable",
    )
    command.add_argument("--json", dest="json_file", metavar="FILE", default=None, help="write the result to this file")
    command.add_argument(
        "--debug",
        dest="debug_rank",
        metavar="RANK",
        default=None,
        help="the worker that reads from this terminal and may call breakpoint() [0 if it is the only worker]",
    )
    others = parser.add_argument_group("workers of other hosts")
    for name, (metavar, text) in COORDINATOR_OPTIONS.items():
        others.add_argument(name, dest=name, metavar=metavar, help=text)
    command.add_argument(
        "-h", "--help", action="store_true", dest="help", default=argparse.SUPPRESS, help="print this help"
    )
    return parser


def _add(group: argparse._ArgumentGroup, field: Field) -> None:
    default = "" if field.default in ("None", "False") else f" [{field.default.strip(chr(39))}]"
    text = (field.meaning.rstrip(".") + default).replace("%", "%%")
    if field.kind == "bool":
        group.add_argument(field.option, action=argparse.BooleanOptionalAction, help=text, dest=field.name)
    else:
        group.add_argument(field.option, metavar=_metavar(field), help=text, dest=field.name)


def _metavar(field: Field) -> str:
    plain = {"int": "N", "float": "X", "str": "NAME"}
    return {"run_dir": "DIR"}.get(field.name, plain.get(field.kind.removesuffix(" | None"), "VALUE"))


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        about, _, problem = message.removeprefix("argument ").partition(": ")
        if about == "unrecognized arguments":
            raise InvalidInput(problem, "(nothing)", "there is no such option", "see unisono train --help")
        raise InvalidInput(about, "(nothing)", problem or message, "see unisono train --help")
