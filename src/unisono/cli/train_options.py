"""The options of ``unisono train``: Config's fields, the command's own, and whatever the task may take."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from unisono.cli.argument_words import RENAMED, unknown
from unisono.cli.config_fields import Field, fields
from unisono.cli.coordinator_options import OPTIONS as CALLING
from unisono.errors import InvalidInput

_DESCRIPTION = """\
Train TASK: a built-in one (see unisono tasks), path/to/file.py:function or package.module:function.
Values are written as in Python: --compress 'Exact()'."""
_OWN = ("--config", "--set", "--json", "--debug", "--help", *CALLING)


@dataclass(frozen=True)
class Given:
    """What was written on the command line, still as text.

    Args:
        task: the task's name, if it was given.
        settings: Config fields.
        arguments: the task's options: text, a list of texts, or True where nothing follows the option.
        sets: the ``KEY=VALUE`` of every ``--set``.
        config: the TOML file.
        json: where the result is written.
        calling: options that say where the coordinator is, see `unisono.cli.coordinator_options`.
        debug: the worker that has the terminal.
    """

    task: str | None
    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]
    sets: Sequence[str]
    config: str | None
    json: str | None
    calling: Mapping[str, str]
    debug: str | None = None


def given(words: Sequence[str]) -> Given:
    """Read the words after ``unisono train``.

    Raises:
        InvalidInput: a known option without its value, or more than one task.
    """
    tasks, ours, theirs = split(words, flags(fields()))
    if len(tasks) > 1:
        cure = "give one, and options as --name value"
        raise InvalidInput("task", " ".join(tasks), "more than one task is given", cure)
    read = vars(parser().parse_args(ours))
    config, json, sets, debug = (read.pop(name) for name in ("config_file", "json_file", "sets", "debug_rank"))
    calling = {name: read.pop(name) for name in CALLING if name in read}
    return Given(tasks[0] if tasks else None, read, theirs, sets, config, json, calling, debug)


def flags(known: Mapping[str, Field]) -> dict[str, int]:
    """Every option of our own, with the number of words that follow it."""
    own: dict[str, int] = dict.fromkeys(_OWN, 1) | {"--help": 0, "-h": 0}
    for field in known.values():
        own[field.option] = 0 if field.kind == "bool" else 1
        if field.kind == "bool":
            own["--no-" + field.option.removeprefix("--")] = 0
    return own


def split(words: Sequence[str], known: Mapping[str, int]) -> tuple[list[str], list[str], dict[str, Any]]:
    """Words that are no option, our own options with their values, and options that only the task knows.

    Such an option takes all words up to the next option: none (True), one (text) or several (a list).
    """
    alone: list[str] = []
    ours: list[str] = []
    theirs: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            alone.append(word)
            continue
        if name in RENAMED:
            raise unknown(name, value, list(known))
        if not word.startswith("--") or name in known:
            after = 0 if equals else known.get(name, 0)
            ours += [word, *rest[:after]]
            del rest[:after]
            continue
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--") and rest[0] != "-h":
            values.append(rest.pop(0))
        theirs[name.removeprefix("--")] = True if not values else values[0] if len(values) == 1 else values
    return alone, ours, theirs


def parser(task_options: str = "") -> argparse.ArgumentParser:
    """The parser of our own words; its help ends with `task_options`."""
    made = _Parser(
        prog="unisono train",
        usage="unisono train TASK [options]",
        description=_DESCRIPTION,
        epilog=task_options or "Options of the task itself: unisono train TASK --help",
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_Help,
    )
    training = made.add_argument_group("training")
    for field in fields().values():
        _add(training, field)
    command = made.add_argument_group("command")
    command.add_argument(
        "--config", dest="config_file", metavar="FILE.toml", default=None, help="settings to begin with"
    )
    command.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting or task option; repeatable",
    )
    command.add_argument("--json", dest="json_file", metavar="FILE", default=None, help="write the result there")
    command.add_argument(
        "--debug",
        dest="debug_rank",
        metavar="RANK",
        default=None,
        help="the worker whose breakpoint() has this terminal [a worker that is alone]",
    )
    others = made.add_argument_group("workers of other hosts")
    for name, (metavar, meaning) in CALLING.items():
        others.add_argument(name, dest=name, metavar=metavar, help=meaning)
    command.add_argument("-h", "--help", action="store_true", dest="help", default=argparse.SUPPRESS, help="print this")
    return made


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
