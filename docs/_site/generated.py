"""Reference pages that the code writes: the commands, and the fields of `Config`.

A page has a line ``<!-- generated: NAME -->``, in place of which the text of `TEXTS` is read.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

from unisono.cli.main import COMMANDS, USAGE, main
from unisono.config import Config

PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.M)


def help_of(command: str) -> str:
    """What ``unisono COMMAND --help`` prints."""
    with redirect_stdout(io.StringIO()) as printed:
        main([command, "--help"])
    return printed.getvalue().rstrip()


def commands() -> str:
    """Each command with its help. Options that are those of ``unisono train`` are shown there only."""
    training = sections(help_of("train"))
    text = [f"```text\n{USAGE}```"]
    for command in COMMANDS:
        parts = sections(help_of(command))
        own = [part for part in parts if command == "train" or part not in training]
        text += [f"## unisono {command}", "```text\n" + "\n\n".join(own) + "\n```"]
        if len(own) < len(parts):
            text.append("It also takes the options of [unisono train](#unisono-train).")
    return "\n\n".join(text)


def sections(text: str) -> list[str]:
    """The parts of a help text, which blank lines separate."""
    return re.split(r"\n\n+", text)


def settings() -> str:
    """The fields of `Config`: option, type, default and meaning."""
    body = inspect.cleandoc((Config.__doc__ or "").partition("Args:\n")[2])
    meanings = {name: " ".join(said.split()) for name, said in re.findall(r"^(\w+): (.*(?:\n +.*)*)", body, re.M)}
    text = []
    for field in dataclasses.fields(Config):
        if field.name not in meanings:
            continue
        option = "--" + field.name.replace("_", "-")
        text += [
            f"({field.name})=",
            f"`{field.name}`",
            f": `{option}` · `{field.type}` · default `{field.default!r}`",
            "",
            f"  {code(meanings[field.name])}",
            "",
        ]
    return "\n".join(text)


def code(docstring: str) -> str:
    """Text of a docstring as Markdown."""
    return docstring.replace("``", "`").replace("<", "&lt;") if "`" not in docstring else docstring.replace("``", "`")


TEXTS: dict[str, Callable[[], str]] = {"commands": commands, "settings": settings}


def read(app: Any, page: str, source: list[str]) -> None:
    """Handles ``source-read``."""
    source[0] = PLACE.sub(lambda place: TEXTS[place[1]](), source[0])


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
