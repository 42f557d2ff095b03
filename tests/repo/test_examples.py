"""The examples run with the results that they promise, and README and docs show them as they are."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training_runs import train
from unisono import Config, notation
from unisono.checkpoint import fingerprint
from unisono.config import FIELDS, INSIDE, NOTED
from unisono.errors import InvalidInput
from unisono.tasks.source import NamedTask

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = "\n".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))])
WAYS = {
    "alone": [],
    "launch": ["-m", "unisono", "launch", "--workers", "2"],
}


def said(directory: Path, *words: str | Path) -> str:
    """What Python prints when it is called with `words` in `directory`."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(example: Path) -> list[str]:
    """What an example says of how it is run."""
    return re.findall(r"^ *(unisono train .*)$", ast.get_docstring(ast.parse(example.read_text())) or "", re.M)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_page_shows_the_example_as_it_is_or_how_it_is_run(example: Path) -> None:
    assert f"```python\n{example.read_text()}```\n" in PAGES or commands(example)[0] in PAGES
    assert f"examples/{example.name}" in PAGES


TASKS = {  # what they come from, and small forms of them
    "lm": (
        "transformers",
        "transformers_lm.py:lm",
        {"text": (__file__,), "model": {"layers": 2, "width": 32, "heads": 2, "context": 16}},
    ),
    "vit": ("sklearn", "vision.py:images", {"model": "vit", "layers": 2, "width": 16}),
    "cnn": ("sklearn", "vision.py:images", {"model": "cnn", "layers": 1, "width": 8}),
    "lstm": ("torch", "lstm.py:lstm", {"text": (__file__,), "layers": 2, "width": 32, "context": 16}),
    "keras": ("keras", "keras_model.py:digits", {"width": 4}),
}
LAYOUTS = [
    *((name, "Layout()") for name in TASKS),
    *((name, "Layout(shard=2)") for name in ("lm", "vit", "lstm", "keras")),
    ("lm", "Layout(tensor=2)"),
    ("vit", "Layout(tensor=2)"),
]
SAME, STEPS = 2e-6, 6


def losses(name: str, directory: Path, workers: int, **settings: Any) -> dict[int | str, float]:
    """Of the steps that the record tells of, the first and the last among them, and of held-out data."""
    needs, place, arguments = TASKS[name]
    if not find_spec(needs):
        pytest.skip(f"{needs} is not installed")
    last = train(
        workers, NamedTask(place, arguments, str(EXAMPLES)), directory, steps=STEPS, workers=workers, **settings
    )
    told = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return {e["step"]: e["loss"] for e in told if e["event"] == "step"} | {"held out": last["metrics"]["loss"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Any:
    """Losses on one worker, by task."""
    found: dict[str, dict[int | str, float]] = {}

    def of(name: str) -> dict[int | str, float]:
        return found.setdefault(name, found.get(name) or losses(name, tmp_path_factory.mktemp(name), 1))

    return of


@pytest.mark.short(4)
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_a_network_computes_on_two_workers_what_it_does_on_one(name: str, layout: str, alone, tmp_path: Path) -> None:
    found, expected = losses(name, tmp_path, 2, layout=layout), alone(name)
    both = found.keys() & expected.keys()
    assert {1, STEPS, "held out"} <= both
    assert max(abs(found[key] - expected[key]) for key in both) <= SAME


@pytest.mark.long
def test_a_keras_model_is_trained_as_it_is(tmp_path: Path) -> None:
    """Batch normalisation's statistics, which Keras has as parameters that are not trained, are alike too."""
    if not find_spec("keras"):
        pytest.skip("keras is not installed")
    (tmp_path / "plain.py").write_text(PLAIN)
    source = NamedTask("plain.py:plain", {}, str(tmp_path))
    exact = [train(n, source, tmp_path / f"{n}", steps=STEPS, workers=n, compress="Exact()") for n in (1, 2)]
    assert exact[0]["weights_sha256"] == exact[1]["weights_sha256"]
    bridged = train(
        1, NamedTask("plain.py:bridged", {}, str(tmp_path)), tmp_path / "bridged", steps=STEPS, compress="Exact()"
    )
    assert exact[0]["loss"] == bridged["loss"]


PLAIN = f"""
import sys
from dataclasses import replace

sys.path.insert(0, {str(EXAMPLES)!r})
from keras_model import digits, network

bridged = lambda: replace(digits(width=4, dropout=0.0), evaluate=None)
plain = lambda: replace(
    bridged(), model=lambda: network(4, 0.0), inputs=lambda batch: {{"inputs": batch[0], "training": True}}
)
"""


@pytest.mark.parametrize("name", TASKS)
def test_an_example_takes_what_it_says(name: str) -> None:
    if not find_spec(TASKS[name][0]):
        pytest.skip(f"{TASKS[name][0]} is not installed")
    said_of = commands(EXAMPLES / TASKS[name][1].partition(":")[0])
    assert said_of
    for command in said_of:
        _, _, task, *words = shlex.split(command)
        options = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
        assert options <= {*FIELDS, *NamedTask(task, {}, str(ROOT)).parameters()}


MISUSES = {
    "an unknown kind": ("transformers", "transformers_lm.py:lm", {"model.kind": "lama"}, "near: llama"),
    "another's kind": ("transformers", "transformers_lm.py:lm", {"model.kind": "t5"}, "no causal language model"),
    "heads": ("transformers", "transformers_lm.py:lm", {"model.heads": "3"}, "not a multiple of heads=3"),
    "another choice": ("sklearn", "vision.py:images", {"model": "resnet"}, "choose vit or cnn"),
    "no text": ("torch", "lstm.py:lstm", {"text": "nowhere"}, "--text = nowhere: cannot be read"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_what_an_example_cannot_do_is_said_in_words(name: str) -> None:
    needs, place, arguments, words = MISUSES[name]
    if not find_spec(needs):
        pytest.skip(f"{needs} is not installed")
    with pytest.raises(InvalidInput, match=words):
        NamedTask(place, arguments, str(EXAMPLES)).load()


def test_what_is_not_installed_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text("raise ModuleNotFoundError(\"No module named 'keras'\", name='keras')")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "train", f"{EXAMPLES}/keras_model.py:digits"], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        check=False)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "No module named 'keras'; install it" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_custom_loop_has_the_same_weights_alone_and_launched(tmp_path: Path) -> None:
    """And, as test_launchers.py shows, under torchrun and others."""
    last = {way: said(tmp_path, *words, EXAMPLES / "custom_loop.py").splitlines()[-1] for way, words in WAYS.items()}
    assert len(set(last.values())) == 1, last
    found = re.fullmatch(r"loss (\S+)  weights [0-9a-f]{64}", last["alone"])
    assert found, last["alone"]
    assert float(found[1]) < 0.7  # three clouds, untrained: log 3 = 1.1


@pytest.mark.long
def test_a_custom_loop_goes_on_where_it_was_stopped_and_its_weights_are_exported(tmp_path: Path) -> None:
    loop = EXAMPLES / "custom_loop_saved.py"
    whole = said(tmp_path, loop, "whole", "60")
    said(tmp_path, *WAYS["launch"], loop, "cut", "40")
    assert said(tmp_path, loop, "cut", "60") == whole
    said(tmp_path, "-m", "unisono", "export", "cut", "--to", "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert whole == f"weights {fingerprint(weights)}\n"


@pytest.mark.short(1)
@pytest.mark.parametrize("way", ["alone", "launch"])
def test_a_custom_loop_learns_from_data_of_its_own(way: str, tmp_path: Path) -> None:
    losses = re.findall(r"epoch \d  loss (\S+)", said(tmp_path, *WAYS[way], EXAMPLES / "custom_loop_dataloader.py"))
    assert len(losses) == 2
    assert float(losses[-1]) < 0.5


@pytest.mark.short(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_of_ones_own_is_trained_and_takes_options(workers: int, tmp_path: Path) -> None:
    options = ["--workers", str(workers), "--width", "16", "--run-dir", "run", "--json", "result.json"]
    said(tmp_path, "-m", "unisono", "train", f"{EXAMPLES / 'custom_task.py'}:blobs", *options)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["samples"]) == (150, 150 * 64)
    assert result["metrics"]["accuracy"] > 0.9
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["task"]["width"] == "16"


@pytest.mark.long
def test_training_from_python_gives_the_same_weights_on_one_worker_and_on_two(tmp_path: Path) -> None:
    lines = [line.split() for line in said(tmp_path, EXAMPLES / "train_from_python.py").splitlines()]
    assert [line[0] for line in lines] == ["1", "2"]
    assert lines[0][1:3] == lines[1][1:3]
    assert float(lines[0][1]) > 0.9
    assert all((Path(run) / "summary.json").is_file() for *_, run in lines)


def test_the_pages_settings_are_settings() -> None:
    found = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGES, re.S)]
    assert {"name": "digits", "hidden": 16} in [settings.pop("task") for settings in found]
    for settings in found:
        assert Config.of(settings).mapping().items() >= settings.items()


def test_the_pages_notation_is_the_notation() -> None:
    page = (ROOT / "docs" / "reference" / "notation.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", page, re.M)
    assert [field for field, _ in rows] == ["sync", "compress", "schedule", "load", "layout", "bad_step"]
    for field, values in rows:
        named = {text.partition("(")[0] for text in re.findall(r"`([^`]+)`", values)}
        assert named == set(NOTED[field])
        for text in re.findall(r"`([^`]+)`", values):
            names = NOTED[field] | INSIDE.get(field, {})
            value = notation.parse(field, text, names)
            assert notation.parse(field, notation.show(value), names) == value
