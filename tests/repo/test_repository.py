"""Rules of the whole repository, which the tests of single folders do not cover."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "unisono"
MODULES = sorted(SOURCE.rglob("*.py"))
NAMES = [str(path.relative_to(SOURCE)) for path in MODULES]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()

PATHS_OF_SOME_MACHINE = ("/" + "work/", "/" + "opt/", "/" + "root/", "/" + "home/")
TRACES_OF_THE_WORKPLACE = ("issue " + "#", "issues/" + "2", "as an AI" + " ")
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
OWN_MEMORY = {  # what is unpickled here was written by this program itself, into memory: no file, no message
    "data/remote_exception.py": "whether an error survives the way to the main process, tried in one line",
    "launch/worker_main.py": "arguments from the launcher, in anonymous memory",
    "run/spec.py": "a task that a Python program carries to the workers it starts",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as text; empty where the expression is not such a name."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def imports(module: ast.Module) -> Iterator[str]:
    """Every name that `module` imports, whole."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def canonical(requirement: str) -> str:
    """The package's name in a requirement line, in one spelling."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def required() -> set[str]:
    project = PYPROJECT["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    return {canonical(line) for line in lines} - {"unisono"}


def files() -> list[Path]:
    """What is in the repository, or would be with ``git add``; everything where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


# --- names and words


def undocumented(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                yield prefix + node.name


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_every_public_name_says_what_it_is(path: Path) -> None:
    missing = list(undocumented(tree(path).body))
    if path.name not in ("__init__.py", "__main__.py") and not ast.get_docstring(tree(path)):
        missing.append("the module itself")
    assert not missing


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_modules_are_named_by_what_they_do(path: Path) -> None:
    assert path.stem.strip("_") not in {
        "util",
        "utils",
        "helper",
        "helpers",
        "common",
        "misc",
        "manager",
        "base",
    }


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "__init__.py" and p.parent != SOURCE], ids=str)
def test_a_package_only_hands_names_on(path: Path) -> None:
    handed_on = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)
    assert [type(node).__name__ for node in tree(path).body if not isinstance(node, handed_on)] == []


def test_a_member_that_a_page_or_docstring_names_is_there() -> None:
    """Of what is written as `Class.member` where the class is ours."""
    members = defaultdict(set)
    for path in MODULES:
        for found in (node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(found):
                named = getattr(node, "name", None) or getattr(node, "attr", None) or getattr(node, "id", None)
                members[found.name] |= {named} if isinstance(named, str) else set()
    wrong = [
        f"{path.relative_to(ROOT)}: {name}.{member}"
        for path in [*MODULES, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for name, member in re.findall(r"`([A-Z][A-Za-z]+)\.([a-z_]+)`", path.read_text())
        if name in members and member not in members[name]
    ]
    assert wrong == []


def test_the_root_has_few_rooms() -> None:
    """What a newcomer reads first. The contract in pyproject.toml names each of them."""
    modules = [path.stem for path in SOURCE.glob("*.py")]
    folders = [path.parent.name for path in SOURCE.glob("*/__init__.py")]
    assert len(modules) <= 8, modules
    assert len(folders) <= 21, folders


def test_no_two_public_classes_share_a_name() -> None:
    """But those for other frameworks, which have the names of the classes whose place they take."""
    places = defaultdict(list)
    own = [(name, path) for name, path in zip(NAMES, MODULES, strict=True) if "frameworks" not in path.parts]
    for name, path in own:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_file_tells_of_the_machine_it_was_written_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in files()
        for word in PATHS_OF_SOME_MACHINE + TRACES_OF_THE_WORKPLACE
        if word in path.read_text(errors="ignore")
    ]
    assert found == []


def test_no_file_is_too_large_for_a_repository() -> None:
    assert [str(path.relative_to(ROOT)) for path in files() if path.stat().st_size > 500_000] == []


# --- walls that the linter cannot say


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("comm/", "launch/", "layout/"))])
def test_only_comm_launch_and_layout_touch_torch_distributed(name: str) -> None:
    path = SOURCE / name
    used = [name for name in imports(tree(path)) if name.startswith("torch.distributed")]
    used += [n for n in map(dotted, _attributes(path)) if n.startswith("torch.distributed")]
    assert used == []


def _attributes(path: Path) -> Iterator[ast.expr]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute))


def dangers(module: ast.Module) -> Iterator[str]:
    """Calls and constants that would run somebody else's code, or listen on every interface."""
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            yield node.value
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        package, _, verb = name.rpartition(".")
        if name in ("eval", "exec", "torch.load", "os.system", "os.popen"):
            yield name
        if package in PICKLES and verb in ("load", "loads", "Unpickler", "open"):
            yield name
        for keyword in node.keywords:
            if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                yield "shell=True"


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_nothing_is_evaluated_unpickled_or_offered_to_the_world(path: Path) -> None:
    found = list(dangers(tree(path)))
    if str(path.relative_to(SOURCE)) in OWN_MEMORY:
        found = [name for name in found if not name.endswith("pickle.loads")]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "eval(x)",
        "torch.load(f)",
        "pickle.loads(b)",
        "run(c, shell=True)",
        "run(c, shell=x)",
        "bind('0.0.0.0')",
    ],
)
def test_the_check_finds_what_it_looks_for(code: str) -> None:
    assert len(list(dangers(ast.parse(code)))) == 1


def test_the_top_package_is_light() -> None:
    code = "import sys, unisono; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_public_name_is_also_a_modules() -> None:
    """Importing the module would put it in the place of the name, at any time and from anywhere."""
    import unisono

    assert not {path.stem for path in SOURCE.iterdir()} & set(unisono.__all__)


# --- what is installed


def test_every_dependency_is_pinned_and_torch_comes_first() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines[0].startswith("torch==")
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []
    assert required() - {canonical(line) for line in lines} == set()


def test_every_pinned_package_but_torch_has_hashes() -> None:
    """`.ci/hashes` writes them; no package is installed here by `make` whose bytes are not those."""
    pins = {tuple(line.split("==")) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    kept: set[tuple[str, str]] = set()
    for page in ("run", "dev"):
        text = (ROOT / "requirements" / f"{page}.txt").read_text()
        for name, version, hashes in re.findall(r"^([a-z0-9-]+)==(\S+) \\\n((?:    --hash=\S+.*\n)+)", text, re.M):
            assert re.fullmatch(r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", hashes)
            kept.add((name, version))
    assert kept == {(canonical(name), version) for name, version in pins} - {("torch", version) for _, version in pins}


def test_the_lower_bounds_are_versions_that_are_tested() -> None:
    """By `make lowest`."""
    pins = dict(line.split("==") for line in (ROOT / "requirements" / "lowest.txt").read_text().splitlines())
    bounds = dict(line.split(">=") for line in PYPROJECT["project"]["dependencies"])
    tested = {name: version for name, version in pins.items() if name in bounds}
    padded = {name: f"{bound}.0.0".split(".")[:3] for name, bound in bounds.items()}
    assert {name: version.split(".") for name, version in tested.items()} == padded


def test_every_dependency_is_accounted_for() -> None:
    rows = (ROOT / "docs" / "dependencies.md").read_text()
    assert {canonical(name) for name in re.findall(r"^\| ([\w-]+) \|", rows, re.M)} - {"package"} == required()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_torch_is_installed_by_a_call_of_its_own_before_the_package() -> None:
    plan = subprocess.run(
        ["make", "-n", "-B", "train", "VENV=nowhere", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},  # of who runs the tests
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    calls = [line for line in plan.splitlines() if "pip" in line and " install " in line]
    assert len(calls) == 3
    assert "torch==" in calls[0]
    assert "--require-hashes" in calls[1]
    assert "-c constraints.txt" in calls[2]
    assert plan.splitlines()[-1].endswith("unisono train digits --workers 2")
