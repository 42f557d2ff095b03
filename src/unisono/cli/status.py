"""``unisono status``: how a run stands, and where its time goes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.errors import InvalidInput, UnisonoError
from unisono.membership import Contact

USAGE = """\
usage: unisono status RUN
       unisono status URL

Say how a run stands: who is here, what each worker does and on which line of your code, where the time goes, and what
was said of steps that took too long. RUN is the directory of a run, under way or over; URL is that of its coordinator,
whose token stands in the variable UNISONO_TOKEN.

  --authority FILE  the certificate by which an https:// coordinator is known [the system's own list]
  --json            everything, as JSON
"""
TOKEN = "UNISONO_TOKEN"


def status(words: list[str]) -> int:
    """Run the words after ``unisono status``; 0 when it has been said.

    Raises:
        UnisonoError: what was written cannot work, or nobody answers.
    """
    if not words or "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    where, authority, as_json = _read(words)
    found, lines = _of_url(where, authority) if "://" in where else _of_run(Path(where))
    print(json.dumps(found, indent=2, ensure_ascii=False) if as_json else "\n".join(lines))
    return 0


def _read(words: list[str]) -> tuple[str, str, bool]:
    given = list(words)
    as_json = "--json" in given
    rest, authority = [], ""
    while given:
        word = given.pop(0)
        if word == "--authority":
            if not given:
                raise InvalidInput(word, "(nothing)", "a file is needed", "write --authority FILE")
            authority = given.pop(0)
        elif word.startswith("-") and word != "--json":
            raise InvalidInput("option", word, "there is no such option", "see unisono status --help")
        elif word != "--json":
            rest.append(word)
    if len(rest) != 1:
        raise InvalidInput("RUN", " ".join(rest) or "(nothing)", "one run is needed", "write unisono status RUN")
    return rest[0], authority, as_json


def _of_url(url: str, authority: str) -> tuple[Mapping[str, Any], list[str]]:
    token = os.environ.get(TOKEN, "")
    if not token:
        raise InvalidInput(
            TOKEN, "(nothing)", "the coordinator wants its token", f"write {TOKEN}=... before the command"
        )
    return _ask(Contact(url, token, authority=authority))


def _of_run(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    from unisono.gathering import contact_in
    from unisono.observe.status import ended
    from unisono.observe.written import SUMMARY

    try:
        contact = contact_in(path)
    except InvalidInput:
        try:
            found: Mapping[str, Any] = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            problem, cure = "neither is it under way, nor did it come to its end", f"look into {path / 'logs'}"
            raise InvalidInput("RUN", str(path), problem, cure) from None
        return found, ended(found)
    return _ask(contact)


def _ask(contact: Contact) -> tuple[Mapping[str, Any], list[str]]:
    from unisono.membership.line import Line
    from unisono.observe.status import under_way

    line = Line(contact.url, contact.token, contact.authority)
    answer = line.ask("GET", "/v1/status")
    line.close()
    if answer is None:
        raise UnisonoError(f"nobody answers at {contact.url}")
    if answer.status == 401:
        raise InvalidInput(
            TOKEN, "(not shown)", "it is not the token of that run", "see the run's coordinator/contact.json"
        )
    if answer.status != 200:
        raise UnisonoError(f"{contact.url} answered with {answer.status}")
    return answer.body, under_way(answer.body)
