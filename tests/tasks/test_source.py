"""Where a task comes from, its arguments by annotation, and messages for what cannot work."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from unisono.config import FIELDS
from unisono.errors import InvalidInput
from unisono.tasks.arguments import bind_arguments, nested, parameters
from unisono.tasks.source import NamedTask
from unisono.tasks.task import Task

FILE = """
from __future__ import annotations
from typing import TYPE_CHECKING
import torch
from unisono.tasks.task import Task
import beside
if TYPE_CHECKING:
    from somewhere import Unknown

def _task(width: int = 3):
    loss = lambda output, batch: output.mean()
    return Task(lambda: torch.nn.Linear(width, 1), beside.data, loss, name=f"wide{width}")

def make(width: int = 3, *, deep: bool = False) -> Unknown:
    return _task(width)

def needs(width: int) -> Task:
    return _task(width)

def nothing():
    return 3

def broken():
    zero = 0
    return 1 / zero

ready = _task(5)
number = 3
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    before, known = list(sys.path), set(sys.modules)
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("data = [1.0, 2.0]\n")
    (tmp_path / "wrong.py").write_text("x = 1\ny = x +\n")
    (tmp_path / "fails.py").write_text("import json\njson.loads('{')\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "lacks.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "string.py").write_text(FILE)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "inner.py").write_text("from mine import make\n")
    yield tmp_path
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "arguments", "called"),
    [
        ("mine.py:make", {}, "wide3"),
        ("mine.py:make", {"width": "7"}, "wide7"),
        ("mine.py:needs", {"width": 4}, "wide4"),
        ("mine.py:ready", {}, "wide5"),
        ("mine:make", {}, "wide3"),
        ("pack.inner:make", {}, "wide3"),
        ("string.py:make", {}, "wide3"),  # named like a module of the standard library
        ("digits", {"hidden": "4"}, "digits"),
    ],
)
def test_a_task_is_found(place: Path, name: str, arguments: Mapping[str, Any], called: str) -> None:
    task = NamedTask(name, arguments, str(place)).load()
    assert isinstance(task, Task)
    assert task.name == called


def test_a_source_travels_as_json_and_as_pickle(place: Path) -> None:
    source = NamedTask("mine.py:make", {"width": "7", "model": {"a": ["b"]}}, str(place))
    assert NamedTask(**json.loads(json.dumps(source.mapping()))) == source
    assert pickle.loads(pickle.dumps(source)) == source  # noqa: S301


def test_a_file_is_loaded_once_so_that_its_classes_stay_the_same(place: Path) -> None:
    for name in ("mine.py:make", "string.py:make"):
        assert NamedTask(name, {}, str(place)).target() is NamedTask(name, {}, str(place)).target()


def test_an_absolute_name_means_the_same_everywhere(place: Path) -> None:
    assert NamedTask("mine.py:make", {}, str(place)).absolute() == f"{place}/mine.py:make"
    assert NamedTask("mine:make", {}, str(place)).absolute() == "mine:make"
    assert NamedTask("digits").absolute() == "digits"


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("mine.py:mke", {}, "task = mine.py:mke: mine.py has no function mke; did you mean make?"),
        ("mine.py:zzz", {}, "known: broken, make, needs, nothing"),
        ("mine.py:nothing", {}, "it returned an int, not a Task; end the function with return unisono.Task(…)."),
        ("mine.py:number", {}, "it returned an int, not a Task"),
        ("mine.py:broken", {}, r"mine.py, line 25 (return 1 / zero): ZeroDivisionError: division by zero"),
        ("wrong.py:x", {}, "wrong.py, line 2: SyntaxError: invalid syntax"),
        ("fails.py:x", {}, "fails.py, line 2 (json.loads('{')): json.decoder.JSONDecodeError"),
        ("leaves.py:x", {}, "leaves.py, line 2 (sys.exit(0)): SystemExit: 0; correct it there."),
        ("~nobody-of-that-name/x.py:f", {}, "write the path in full"),
        ("lacks.py:x", {}, "lacks.py, line 1 (import not_installed_anywhere): ModuleNotFoundError"),
        ("lacks:x", {}, "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("absent:x", {}, "task = absent:x: there is no module absent; check the name"),
        ("pack.absent:x", {}, "there is no module pack.absent"),
        ("absent.py:x", {}, "there is no file absent.py"),
        ("mine.py:", {}, "names no function; write mine.py:function."),
        ("mine.py:ready", {"width": 3}, "--width = 3: mine.py:ready is a value and takes no arguments"),
        ("mine.py:make", {"widht": "3"}, "--widht = 3: there is no such option; did you mean --width?"),
        ("mine.py:make", {"worker": "3"}, "--worker = 3: there is no such option; did you mean --workers?"),
        ("mine.py:make", {"width": "wide"}, "--width = wide: not a whole number; write --width INT."),
        ("mine.py:make", {"deep": "yes"}, "--deep = yes: not true or false; write --deep true|false."),
        ("mine.py:needs", {}, "--width = (nothing): the task needs it; give --width INT."),
        (
            "text",
            {"model.layer": "4"},
            "--model.layer = 4: there is no such option; did you mean --model.layers?",
        ),
        ("text", {"model.heads": "3"}, "--model = heads=3: width=128 is not a multiple of heads=3"),
        (
            "text",
            {"model": "big"},
            "--model = big: it has parts, and no value of its own; set its parts, for instance --model.layers.",
        ),
        ("text", {"text": True}, "--text = (nothing): not text; write --text TEXT."),
    ],
)
def test_what_cannot_be_found_is_one_sentence(place: Path, name: str, arguments: Mapping[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        NamedTask(name, arguments, str(place)).load(FIELDS)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@dataclass(frozen=True)
class Inner:
    size: int = 2
    rate: float | None = 0.5


@dataclass(frozen=True)
class Shape:
    layers: int = 1
    inner: Inner = Inner()


def function(
    a: int = 1,
    b: float = 1.0,
    c: str = "c",
    d: bool = False,
    e: tuple[str, ...] = (),
    f: int | None = None,
    g: Literal["x", "y"] = "x",
    h: Shape = Shape(layers=5),
    i=4,  # type: ignore[no-untyped-def]
    **rest: int,
) -> None:
    pass


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"a": "-3"}, {"a": -3}),
        ({"a": 3.0}, {"a": 3}),
        ({"b": "1e-3"}, {"b": 0.001}),
        ({"b": 2}, {"b": 2.0}),
        ({"c": "3"}, {"c": "3"}),
        ({"d": True}, {"d": True}),
        ({"d": "False"}, {"d": False}),
        ({"e": "one"}, {"e": ("one",)}),
        ({"e": ["one", "two"]}, {"e": ("one", "two")}),
        ({"f": "3"}, {"f": 3}),
        ({"f": "none"}, {"f": None}),
        ({"g": "y"}, {"g": "y"}),
        ({"i": "7"}, {"i": 7}),
        ({"h.layers": "2"}, {"h": Shape(2)}),
        ({"h.inner.size": "9"}, {"h": Shape(5, Inner(9))}),
        ({"h": {"inner": {"rate": "none"}}, "h.inner.size": 1}, {"h": Shape(5, Inner(1, None))}),
        ({"h": Shape(3)}, {"h": Shape(3)}),
    ],
)
def test_text_becomes_what_the_annotation_says(given: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    assert bind_arguments(function, given) == read
    assert all(type(bind_arguments(function, given)[name]) is type(value) for name, value in read.items())


@pytest.mark.parametrize(
    "given",
    [
        {"a": "1.5"},
        {"a": 1.5},
        {"a": True},
        {"a": None},
        {"b": "nan"},
        {"c": 3},
        {"d": 1},
        {"g": "z"},
        {"f": "x"},
    ],
)
def test_a_value_of_another_kind_is_refused(given: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        bind_arguments(function, given)


def test_parameters_are_flat_with_their_defaults() -> None:
    found = parameters(function)
    assert list(found) == ["a", "b", "c", "d", "e", "f", "g", "h.layers", "h.inner.size", "h.inner.rate", "i"]
    assert found["h.layers"].default == 5
    assert found["h.inner.rate"].default == 0.5


def test_nested_lets_the_later_of_two_win() -> None:
    assert nested({"m": {"a": 1, "b": 2}, "m.a": 3, "x-y": 4}) == {"m": {"a": 3, "b": 2}, "x_y": 4}
