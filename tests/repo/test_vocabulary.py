"""Names, docstrings, comments, messages and pages use the standard terms of `docs/reference/glossary.md`."""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "unisono"
FILES = sorted([*SOURCE.rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
STANDARD_TERMS = {
    r"acquainted": "mutually reachable",
    r"beat(s|en|ing)?": "heartbeat",
    r"boards?": "shared-memory map",
    r"crew": "worker supervisor",
    r"crowded": "contended; contention factor",
    r"deal(t|er|ers|ing)|dealt out": "lease, leased, lease server, work leasing",
    r"debts?|owe[ds]?": "error-feedback residual",
    r"desks?": "actor server",
    r"doors?": "listening socket, store server",
    r"editions?": "weight version, weight delta",
    r"estranged": "quarantined, unreachable",
    r"foret(ell|ells|elling|old)": "estimate",
    r"heirs?": "replacement",
    r"joints": "cut points",
    r"lanes?": "channel",
    r"letters?": "message",
    r"likeness(es)?": "peer estimate",
    r"lockstep": "synchronous",
    r"made[- ]?up(?! of)": "virtual, simulated",
    r"milestones?": "snapshot",
    r"quarrels?": "unreachable pairs",
    r"rall(y|ied|ying)": "coordinator setup",
    r"reception": "actor listener",
    r"stand[- ]?ins?|standing in": "stub module, placeholder",
    r"stations?": "simulated host",
    r"succession": "restart policy",
    r"undisturbed": "baseline; without faults; preserved",
    r"vouch(es|ed|ing)?": "CPU liveness probe",
    r"walk(s|ed|ing)?": "local steps, local update; visit, traverse",
    r"wards?": "buddy",
}
LEGITIMATE = {  # uses that are what everybody calls it: a pattern of the text around the word, and why
    r"\b(os|ast)\.walk\b": "functions of the standard library",
    r"\bascii_letters\b": "a constant of the standard library",
    r"\bletters( and|,| or)\b.*\bdigits\b|\bof letters\b": "of the alphabet",
    r"\bquick succession\b": "one soon after another",
    r"\b[Cc]ycle walking\b": "a method of cryptography",
    r"\bslice, need, edition\b": "a key in the messages of a parameter server",
    r"\bTensor Board\b": "the name of a program",
}
_WORD = re.compile("|".join(f"(?P<w{n}>\\b(?:{word})\\b)" for n, word in enumerate(STANDARD_TERMS)), re.IGNORECASE)
_ALLOWED = re.compile("|".join(f"(?:{pattern})" for pattern in LEGITIMATE))
_PART_OF_A_NAME = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def coined(text: str) -> Iterator[tuple[str, str]]:
    """Each coined word of a line, with the term that is standard for it."""
    allowed = [found.span() for found in _ALLOWED.finditer(text)]
    for found in _WORD.finditer(text):
        if not any(start <= found.start() and found.end() <= end for start, end in allowed):
            (number,) = [int(group[1:]) for group, word in found.groupdict().items() if word]
            yield found[0], list(STANDARD_TERMS.values())[number]


def words_of_a_name(name: str) -> str:
    """`StandIn` and `stand_in` as words."""
    return " ".join(_PART_OF_A_NAME.findall(name))


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Names, comments, docstrings and messages of Python source, by line. A string without a space is a key."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            before = lines[token.start[0] - 1][: token.start[1]]
            module = re.search(r"\b(os|ast)\.$", before)
            yield token.start[0], module[0] + token.string if module else words_of_a_name(token.string)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line


def prose(page: str) -> Iterator[tuple[int, str]]:
    """The lines of a page outside its blocks of code."""
    inside = False
    for number, line in enumerate(page.splitlines(), 1):
        inside ^= line.lstrip().startswith("```")
        if not inside:
            yield number, line


def problems(path: Path, content: str) -> list[str]:
    """Coined words of a file: where, which, and what to write instead."""
    at = str(path.relative_to(ROOT))
    lines = [(1, words_of_a_name(path.stem)), *(texts(content) if path.suffix == ".py" else prose(content))]
    found = {(number, word, term) for number, line in lines for word, term in coined(line)}
    return [f"{at}:{number}: {word}: write {term}" for number, word, term in sorted(found)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_are_standard(path: Path) -> None:
    found = problems(path, path.read_text())
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Replicas walk."""', ["walk"]),
        ("x = 1  # in lockstep", ["lockstep"]),
        ("class StandIn: ...", ["Stand In"]),
        ("def hear_a_beat(): ...", ["beat"]),
        ("raise ValueError('the crew has left')", ["crew"]),
        ("key = 'beat'", []),
        ("for node in ast.walk(tree): forward(tensorboard, heartbeat)", []),
        ("# letters and digits, in quick succession", []),
    ],
)
def test_the_check_finds_what_it_looks_for(source: str, found: list[str]) -> None:
    at = SOURCE / "module.py"
    assert [line.split(": ")[1] for line in problems(at, source)] == found


def test_a_page_is_checked_outside_its_code() -> None:
    assert problems(ROOT / "README.md", "```sh\na beat\n```\nA beat.") == ["README.md:4: beat: write heartbeat"]
