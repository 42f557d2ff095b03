"""``unisono checkpoint``: what it shows, verifies and converts, and its refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.checkpoint.sharded_states import LAYOUTS, save_parts, tensors
from tests.support.checkpoints import flip, load
from tests.support.fake_run import CommandOutput
from unisono.checkpoint import fingerprint, open_checkpoint
from unisono.cli import main

META = {"config": {"layout": "Layout(shard=2)", "sync": "AllReduce()", "workers": 4}, "numbers": {}}
WEIGHTS = {name.removeprefix("model/"): x for name, x in tensors().items() if name.startswith("model/")}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("sound") / "run"
    for step in (1, 2):
        save_parts(run / "checkpoints", step, tensors(), LAYOUTS["rows over 4"](tensors()), meta=META)
    return run


@pytest.fixture
def run(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(sound, tmp_path / "run")).relative_to(tmp_path)


@pytest.fixture
def unisono(capsys: pytest.CaptureFixture[str]) -> Callable[[str], CommandOutput]:
    return lambda line: CommandOutput(main(["checkpoint", *line.split()]), *capsys.readouterr())


Unisono = Callable[[str], CommandOutput]


def harm(path: Path) -> None:
    stored = open_checkpoint(path).stored["model/matrix"][2]
    flip(stored.file, stored.begin)


def names(text: str) -> set[str]:
    return {line.split()[0] for line in text.splitlines() if line.strip()}


@pytest.mark.parametrize("place", ["", "/checkpoints", "/checkpoints/step-00000002"])
def test_show_says_what_is_there(run: Path, unisono: Unisono, place: str) -> None:
    said = unisono(f"show {run}{place}")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(
        "run/checkpoints/step-00000002\nstep 2, 155 weights, written by 4 workers, layout Layout("
    )
    sums = [line.split() for line in said.out.splitlines()[3:7]]
    assert sums == [
        ["tensors", "numbers", "bytes"],
        ["model", "7", "155", "582"],
        ["optimizer", "2", "49", "200"],
        ["all", "9", "204", "782"],
    ]
    assert set(tensors()) <= names(said.out)
    row = next(line for line in said.out.splitlines() if line.startswith("model/odd"))
    assert row.split(maxsplit=3)[1:] == ["bfloat16", "5×3", "0 [0:2, 0:3], 1 [2:4, 0:3], 2 [4:5, 0:3]"]


def test_show_passes_over_what_is_damaged_and_says_so(run: Path, unisono: Unisono) -> None:
    flip(run / "checkpoints/step-00000002/manifest.json", 50)
    said = unisono(f"show {run}")
    assert said.err.startswith("damaged: run/checkpoints/step-00000002/manifest.json: ")
    assert "\nstep 1, " in said.out
    assert unisono(f"show {run}/checkpoints/step-00000002").code == 1


def test_a_name_cannot_steer_the_terminal(tmp_path: Path, unisono: Unisono) -> None:
    found = {"model/\x1b[31mred\n": torch.zeros(2)}
    save_parts(tmp_path, 1, found, LAYOUTS["whole on 1"](found))
    said = unisono(f"show {tmp_path}")
    assert "\x1b" not in said.out
    assert r"model/\x1b[31mred\n" in said.out
    os.truncate(tmp_path / "step-00000001" / "part-0.safetensors", 5)
    assert "\x1b" not in unisono(f"verify {tmp_path}").out


def test_verify_reads_every_checkpoint(run: Path, unisono: Unisono) -> None:
    said = unisono(f"verify {run}")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert [line.split(", ")[:2] for line in lines] == [
        [f"run/checkpoints/step-0000000{step}: sound", f"step {step}"] for step in (1, 2)
    ]


def test_verify_names_what_is_damaged_and_what_it_held(run: Path, unisono: Unisono) -> None:
    path = run / "checkpoints/step-00000002"
    harm(path)
    (path / "part-3.safetensors").unlink()
    said = unisono(f"verify {run}")
    assert (said.code, said.err) == (1, "")
    assert "step-00000001: sound" in said.out
    assert "step-00000002: damaged\n" in said.out
    assert "part-2.safetensors: the bytes of tensor 'model/matrix' [4:6, 0:6] of [8, 6] are not" in said.out
    assert "part-3.safetensors: No such file or directory (it held 'model/bias'" in said.out


def test_verify_finds_a_pointer_to_nowhere(run: Path, unisono: Unisono) -> None:
    flip(run / "checkpoints/LATEST", 5)
    said = unisono(f"verify {run}")
    assert said.code == 1
    assert said.out.startswith("run/checkpoints/LATEST: its checksum does not match")


# --- conversion


def test_weights_become_a_file_that_the_library_loads_into_a_model(run: Path, unisono: Unisono) -> None:
    said = unisono(f"convert {run} --to model.safetensors")
    assert (said.code, said.out) == (0, "model.safetensors\n")
    assert fingerprint(safetensors.torch.load_file("model.safetensors")) == fingerprint(WEIGHTS)


def test_weights_there_and_back(run: Path, unisono: Unisono) -> None:
    assert unisono(f"convert {run} --to model.safetensors --max-shard-bytes 1kB").out == "model.safetensors\n"
    os.remove("model.safetensors")
    said = unisono(f"convert {run} --to model.safetensors --max-shard-bytes=300")
    assert said.out.splitlines()[-1] == "model.safetensors.index.json"
    for place in (".", "model.safetensors.index.json"):
        shutil.rmtree("back", ignore_errors=True)
        assert unisono(f"convert --from {place} back").out == "back/step-00000000\n"
        model = {name: x for name, x in tensors().items() if name.startswith("model/")}
        assert fingerprint(load("back/step-00000000").tensors) == fingerprint(model)
        assert unisono("verify back").code == 0


def test_everything_there_and_back(run: Path, unisono: Unisono) -> None:
    assert unisono(f"convert {run} --all --to x.safetensors").code == 0
    assert fingerprint(safetensors.torch.load_file("x.safetensors")) == fingerprint(tensors())
    assert unisono("convert --from x.safetensors back --all").out == "back/step-00000002\n"
    loaded = load("back/step-00000002")
    assert (loaded.step, loaded.meta, fingerprint(loaded.tensors)) == (2, META, fingerprint(tensors()))
    assert unisono("convert --from x.safetensors weights").code == 0
    assert sorted(load("weights/step-00000002").tensors) == [name for name in sorted(tensors()) if "model/" in name]


def test_a_file_from_elsewhere_as_it_is(unisono: Unisono, tmp_path: Path) -> None:
    safetensors.torch.save_file(WEIGHTS, tmp_path / "w.safetensors")
    for option, prefix in (("", "model/"), (" --all", "")):
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        unisono(f"convert --from {tmp_path}/w.safetensors {tmp_path}/back{option}")
        loaded = load(tmp_path / "back/step-00000000")
        assert sorted(loaded.tensors) == sorted(prefix + name for name in WEIGHTS)
        assert loaded.meta == {"converted_from": "w.safetensors"}


def test_a_damaged_checkpoint_is_not_converted(run: Path, unisono: Unisono) -> None:
    harm(run / "checkpoints/step-00000002")
    said = unisono(f"convert {run} --to model.safetensors")
    assert (said.code, said.out) == (1, "")
    assert "part-2.safetensors: the bytes of tensor 'model/matrix'" in said.err
    assert sorted(os.listdir()) == ["run"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("shwo run", "checkpoint = shwo: there is no such subcommand; did you mean show?"),
        ("show", "DIR = (nothing): one directory is needed"),
        ("show run run", "DIR = run run: one directory is needed"),
        ("show nowhere", "DIR = nowhere: there is no checkpoint"),
        ("verify nowhere", "DIR = nowhere: there is no checkpoint"),
        ("show run --to x", "--to = (nothing): there is no such option; leave it out"),
        ("convert run", "convert = run: either --to or --from is needed"),
        ("convert run --to a.safetensors --from b", "either --to or --from"),
        ("convert run --too a.safetensors", "did you mean --to?"),
        ("convert run --to", "--to = (nothing): a value is missing"),
        ("convert run --all=1 --to a.safetensors", "--all = 1: it takes no value"),
        ("convert run --to a.pt", "--to = a.pt: not a safetensors file"),
        ("convert run --to nowhere/a.safetensors", "there is no directory nowhere"),
        ("convert run --to there.safetensors", "there.safetensors exists already"),
        ("convert run --to a.safetensors --max-shard-bytes 0", "--max-shard-bytes = 0: not a size of at least"),
        ("convert run --to a.safetensors --max-shard-bytes many", "write for instance 5GB"),
        ("convert --from nowhere.safetensors new", "--from = nowhere.safetensors: there is no such file"),
        ("convert --from there.safetensors run/checkpoints", "it exists already"),
        ("convert --from there.safetensors there.safetensors", "it exists already"),
        ("convert --from there.safetensors run", "it exists already"),
        ("convert --from there.safetensors new --max-shard-bytes 5", "a checkpoint is one file"),
    ],
)
def test_misuse_is_one_sentence(run: Path, unisono: Unisono, line: str, words: str) -> None:
    safetensors.torch.save_file(WEIGHTS, "there.safetensors")
    said = unisono(line)
    assert (said.code, said.out) == (2, "")
    assert words in said.err
    assert said.err.count("\n") == 1


def test_what_is_no_safetensors_file_is_named(unisono: Unisono, run: Path) -> None:
    Path("x.safetensors").write_bytes(b"PK\x03\x04 somebody's pickle")
    said = unisono("convert --from x.safetensors new")
    assert (said.code, said.err) == (1, "x.safetensors: it is no safetensors file\n")
    assert not Path("new").exists()


def test_help_imports_no_torch() -> None:
    code = "import sys; from unisono.cli import main; main(['checkpoint', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("usage: unisono checkpoint show DIR")
    assert done.stdout.endswith("False\n")
