"""The examples run, come to what they promise, and stand in the README as they are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from unisono import Config, notation
from unisono.config import INSIDE, NOTED

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()
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


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_readme_shows_the_example_as_it_is(example: Path) -> None:
    assert f"```python\n{example.read_text()}```\n" in README
    assert f"examples/{example.name}" in README


def test_a_custom_loop_has_the_same_weights_alone_and_launched(tmp_path: Path) -> None:
    """And, as test_launchers.py shows, under torchrun and others."""
    last = {way: said(tmp_path, *words, EXAMPLES / "custom_loop.py").splitlines()[-1] for way, words in WAYS.items()}
    assert len(set(last.values())) == 1, last
    found = re.fullmatch(r"loss (\S+)  weights [0-9a-f]{64}", last["alone"])
    assert found, last["alone"]
    assert float(found[1]) < 0.7  # three clouds, untrained: log 3 = 1.1


@pytest.mark.parametrize("way", ["alone", "launch"])
def test_a_custom_loop_learns_from_data_of_its_own(way: str, tmp_path: Path) -> None:
    losses = re.findall(r"epoch \d  loss (\S+)", said(tmp_path, *WAYS[way], EXAMPLES / "custom_loop_own_data.py"))
    assert len(losses) == 2
    assert float(losses[-1]) < 0.5


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_of_ones_own_is_trained_and_takes_options(workers: int, tmp_path: Path) -> None:
    options = ["--workers", str(workers), "--width", "16", "--run", "run", "--json", "result.json"]
    said(tmp_path, "-m", "unisono", "train", f"{EXAMPLES / 'own_task.py'}:blobs", *options)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["samples"]) == (150, 150 * 64)
    assert result["metrics"]["accuracy"] > 0.9
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["task"]["width"] == "16"


def test_training_from_python_gives_the_same_weights_on_one_worker_and_on_two(tmp_path: Path) -> None:
    lines = [line.split() for line in said(tmp_path, EXAMPLES / "train_from_python.py").splitlines()]
    assert [line[0] for line in lines] == ["1", "2"]
    assert lines[0][1:3] == lines[1][1:3]
    assert float(lines[0][1]) > 0.9
    assert all((Path(run) / "summary.json").is_file() for *_, run in lines)


def test_the_readmes_settings_are_settings() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", README, re.S)
    settings = tomllib.loads(block)
    assert settings.pop("task") == {"name": "digits", "hidden": 16}
    assert Config.of(settings).mapping().items() >= settings.items()


def test_the_readmes_notation_is_the_notation() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", README, re.M)
    assert [field for field, _ in rows] == ["sync", "compress", "schedule", "load", "layout"]
    for field, values in rows:
        named = {text.partition("(")[0] for text in re.findall(r"`([^`]+)`", values)}
        assert named == set(NOTED[field])
        for text in re.findall(r"`([^`]+)`", values):
            names = NOTED[field] | INSIDE.get(field, {})
            value = notation.parse(field, text, names)
            assert notation.parse(field, notation.show(value), names) == value
