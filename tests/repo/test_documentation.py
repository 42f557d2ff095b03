"""The pages are true: links lead somewhere, commands exist, and every block is executed or says why not.

The blocks of a page are one session in one directory, which has `examples/`, from top to bottom. By its language tag:

    sh        executed line by line; a command that fails ends the page
    console   what follows ``$`` is executed; its output is compared, where ``…`` is any text
    python    executed as a script. With a first line ``# name.py`` it is written to that file instead
    toml      with a first line ``# name.toml`` written to that file
    text      shown only; so are blocks without a program in them

``not-run: REASON`` behind the language leaves a block out. Runs of pages other than tutorials end after four steps,
unless they say otherwise: there a page shows options, and not what a run comes to.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from benchmarks.__main__ import modules as benchmarks

import unisono

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md", *sorted(DOCS.glob("**/*.md"))]
EXAMPLES = [path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))]
EXECUTED = ("sh", "console", "python", "toml")
SHOWN = ("text",)
QUICK = ("new-compressor", "new-synchronizer", "new-launcher", "first-run")
"""Tutorials that `make test` executes; `make test-all` executes all pages."""

SHORT_RUNS = """
unisono() {
    case " $* " in
    *--steps* | *--epochs* | *--help* | *--config*) command unisono "$@" ;;
    " train "* | " simulate "*) command unisono "$@" --steps 4 ;;
    *) command unisono "$@" ;;
    esac
}
"""


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    reason: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```+([^\s`]*)(?: not-run: ([^\n]+))?\n(.*?)^```+$", page.read_text(), re.M | re.S)
    return [Block(*each) for each in found]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def executed(page: Path) -> list[Block]:
    """The blocks that are executed here: those that are examples are executed by `test_examples`."""
    found = [block for block in blocks(page) if block.language in EXECUTED and not block.reason]
    return [block for block in found if block.text not in EXAMPLES]


SESSIONS = [
    pytest.param(page, id=name(page), marks=[] if page.stem in QUICK else [pytest.mark.long])
    for page in PAGES
    if executed(page) and page.name != "CHANGELOG.md"
]


class Session:
    """The directory of one page, and what is executed in it."""

    def __init__(self, directory: Path, prelude: str) -> None:
        self._directory, self._prelude = directory, prelude
        (directory / "examples").symlink_to(ROOT / "examples")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        modules = os.pathsep.join(filter(None, [*own, str(ROOT / "examples")]))
        quiet = {"COLUMNS": "110", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        self._environ = os.environ | quiet | {"PATH": path, "PYTHONPATH": modules}

    def execute(self, block: Block) -> None:
        file = re.match(r"# ([\w-]+\.(?:py|toml))\n", block.text)
        if file:
            (self._directory / file[1]).write_text(block.text)
        elif block.language == "python":
            (self._directory / "block.py").write_text(block.text)
            self._run([sys.executable, "block.py"])
        elif block.language == "sh":
            self._run(["bash", "-euc", self._prelude + block.text])
        elif block.language == "console":
            for command, expected in transcript(block.text):
                shown = self._run(["bash", "-uc", self._prelude + command], check=False)
                assert alike(shown, expected), f"$ {command}\n{shown}"
        else:
            pytest.fail(f"a {block.language} block without a file name in its first line")

    def _run(self, command: list[str], check: bool = True) -> str:
        done = subprocess.run(
            command, cwd=self._directory, env=self._environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=540, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command[-1]}\n{done.stdout}"
        return done.stdout


def transcript(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output below it."""
    for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def alike(shown: str, expected: str) -> bool:
    """Whether `shown` is `expected`, in which ``…`` stands for any text, and an empty text for all.

    Widths of columns and of ruled lines do not count.
    """
    shown, expected = (re.sub("─+", "─", " ".join(text.split())) for text in (shown, expected))
    pattern = ".*".join(re.escape(part.strip()) for part in expected.split("…"))
    return not expected or re.fullmatch(pattern, shown, re.S) is not None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", SESSIONS)
def test_the_blocks_of_a_page_are_executed(page: Path, tmp_path: Path) -> None:
    session = Session(tmp_path, "" if page.parent.name == "tutorials" else SHORT_RUNS)
    for block in executed(page):
        session.execute(block)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_block_is_executed_or_says_why_not(page: Path) -> None:
    odd = [block for block in blocks(page) if not block.language.startswith("{")]
    assert [block for block in odd if block.language not in EXECUTED + SHOWN] == []


@pytest.mark.parametrize(
    ("shown", "expected", "is_alike"),
    [
        ("a\nb c\n", "a\n…\n", True),
        ("loss 1.25 at 3", "loss … at 3", True),
        ("loss 1.25 at 3", "loss … at 4", False),
        ("anything", "", True),
        ("a  b", "a b", True),
        ("more", "mor", False),
    ],
)
def test_output_is_compared(shown: str, expected: str, is_alike: bool) -> None:
    assert alike(shown, expected) is is_alike


def test_each_block_is_one_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh not-run: two hosts\na\n```\n\ntext\n\n```sh\nb\n```\n\n```{toctree}\nc\n```\n")
    assert blocks(page) == [Block("sh", "two hosts", "a\n"), Block("sh", "", "b\n"), Block("{toctree}", "", "c\n")]


def test_a_page_that_adds_a_part_is_short() -> None:
    pages = [page for page in PAGES if page.stem.startswith("new-")]
    assert len(pages) == 3
    assert [name(page) for page in pages if len(page.read_text().splitlines()) > 60] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


# --- links


def test_a_page_links_to_what_is_there() -> None:
    broken = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        for target, part in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", text):
            there = (page.parent / target).resolve() if target else page
            if not there.exists():
                broken.append(f"{name(page)}: {target}")
            elif part and part[1:] not in anchors(there):
                broken.append(f"{name(page)}: {target}{part}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Those of a page's headings, and of the commands and fields that the site adds."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    found = {re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in headings}
    return found | ({f"unisono-{command}" for command in commands()} if page.name == "cli.md" else set())


def test_a_page_names_files_that_are_there() -> None:
    """Of paths with a folder, which may begin at the page or in the package."""
    missing = [
        f"{name(page)}: {path}"
        for page in PAGES
        for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]*\.(?:py|md|json|txt))`", page.read_text())
        if page.name != "CHANGELOG.md" and not path.startswith(("coordinator/", "checkpoints/"))
        if not any((start / path).exists() for start in (ROOT, page.parent, ROOT / "src" / "unisono"))
    ]
    assert missing == []


def test_every_page_is_in_the_site() -> None:
    """A table of contents names it, by itself or by a pattern."""
    named = set()
    for page in DOCS.glob("**/*.md"):
        for block in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), re.M | re.S):
            for line in block.splitlines():
                named |= set(page.parent.glob(f"{line}.md")) if line and line[0] != ":" else set()
    assert {name(page) for page in DOCS.glob("**/*.md")} - {name(page) for page in named} == {"docs/index.md"}


# --- commands


@cache
def commands() -> tuple[str, ...]:
    from unisono.cli.main import COMMANDS

    return tuple(COMMANDS)


@cache
def options_of(*command: str) -> str:
    shown = subprocess.run([sys.executable, "-m", "unisono", *command, "--help"], capture_output=True, text=True)
    return shown.stdout


def shell_lines(page: Path) -> Iterator[str]:
    """The lines of a page's shell blocks, without prompts and comments."""
    for block in blocks(page):
        if block.language in ("sh", "console"):
            for line in block.text.replace("\\\n", " ").splitlines():
                yield line.split("  #")[0].removeprefix("$ ").strip()


def runs(module: str) -> bool:
    """Whether ``python -m`` finds that module."""
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_command_that_a_page_names_exists(page: Path) -> None:
    """Of what is executed as well as of what is not."""
    lines = [*shell_lines(page), *re.findall(r"`((?:make|unisono|python -m) [^`]+)`", page.read_text())]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    unknown = []
    if page.name == "CHANGELOG.md":  # names what is no more
        return
    for line in lines:
        words = line.split()
        if words[:1] == ["make"]:
            unknown += [line for word in words[1:] if "=" not in word and word not in targets]
        if words[:1] == ["unisono"] and words[1:2] and words[1] in commands():
            known = options_of(words[1]) + options_of("train") * (words[1] == "chaos")
            known += options_of("train", words[2]) if words[2:3] in (["digits"], ["text"]) else ""
            # Options with a dot are the task's own.
            given = re.findall(r"(?<=\s)--[a-z-]+(?=\s|$)", line.split(".py")[0])
            unknown += [f"{line}: {option}" for option in given if not re.search(rf"{option}(?![\w-])", known)]
        unknown += [line for name in re.findall(r"-m benchmarks ([a-z]\w*)", line) if name not in benchmarks()]
        unknown += [line for module in re.findall(r"-m ((?:benchmarks|tests)[.]\S+)", line) if not runs(module)]
    assert unknown == []


# --- the reference


def test_every_public_name_is_in_the_reference() -> None:
    reference = "\n".join(page.read_text() for page in (DOCS / "reference" / "python").glob("*.md"))
    named = set(re.findall(r"^\.\. (?:autoclass|autofunction|class):: unisono\.(\w+)(?:\(\))?$", reference, re.M))
    assert named == set(unisono.__all__)


def recorded_events() -> dict[str, set[str]]:
    """The events that the source records: of each, its fields."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event"):
                continue
            if node.args and isinstance(node.args[0], ast.Constant):
                fields = {keyword.arg for keyword in node.keywords if keyword.arg}
                found.setdefault(node.args[0].value, set()).update(fields)
    return found


def test_every_event_is_in_the_reference() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \|", (DOCS / "reference" / "events.md").read_text(), re.M)
    described = {event: set(re.findall(r"`(\w+)`", fields)) for event, fields in rows}
    recorded = recorded_events()
    assert {event: recorded[event] - described.get(event, set()) for event in recorded} == {
        event: set() for event in recorded
    }
