"""From a finished run back to a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import unisono
from tests.support.fake_run import CommandOutput
from tests.support.training_runs import regression, train
from unisono import Result, Task
from unisono.checkpoint import checkpoints, fingerprint
from unisono.cli import main
from unisono.elastic.model_state import weights_of
from unisono.errors import CheckpointError, InvalidInput
from unisono.tasks.source import NamedTask

ROOT = Path(__file__).parents[2]


class Tied(nn.Module):
    """A weight with two names, running statistics, and a buffer that ``state_dict()`` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.other = nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.norm(self.one(x) @ self.mask)).mean(1, keepdim=True)


def tied() -> Task:
    task = regression()
    return Task(model=Tied, data=task.data, loss=task.loss, defaults=task.defaults, name="tied")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Of a run of two steps, with a checkpoint after each."""
    path = tmp_path_factory.mktemp("tied")
    settings = {"workers": 1, "steps": 2, "checkpoint_every": 1}
    return Result(**train(1, NamedTask("tests.end_to_end.test_results:tied", {}, str(ROOT)), path, **settings))


def test_a_state_dict_has_all_names_of_the_model_and_no_others(result: Result) -> None:
    model = Tied()
    model.load_state_dict(result.state_dict())
    assert fingerprint(weights_of(model)) == result.weights_sha256
    assert model.one.weight is model.other.weight
    assert result.state_dict().keys() == model.state_dict().keys()


def test_a_run_its_checkpoints_one_of_them_and_its_result_can_be_loaded(result: Result) -> None:
    whole = fingerprint(result.state_dict())
    run = Path(result.run)
    paths = dict(checkpoints(run / "checkpoints"))
    for place in (result, result.run, run, run / "checkpoints", paths[2]):
        assert fingerprint(unisono.load(place)) == whole
    assert fingerprint(unisono.load(paths[1])) != whole
    with pytest.raises(InvalidInput, match=r"run = .*nowhere: there is no checkpoint"):
        unisono.load(run / "nowhere")


def test_a_result_does_not_stand_for_an_older_checkpoint(result: Result) -> None:
    paths = dict(checkpoints(Path(result.run, "checkpoints")))
    with pytest.raises(CheckpointError, match="sound checkpoint is of step 1, but the run has reached step 2"):
        replace(result, run=str(paths[1])).state_dict()


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandOutput]:
    return lambda *words: CommandOutput(main(["export", *map(str, words)]), *capsys.readouterr())


def test_export_writes_what_torch_and_safetensors_read(
    result: Result, export: Callable[..., CommandOutput], tmp_path: Path
) -> None:
    for name in ("model.pt", "model.safetensors"):
        said = export(result.run, "--to", tmp_path / name)
        assert (said.code, said.out.strip()) == (0, str(tmp_path / name)), said.err
    model = Tied()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert fingerprint(weights_of(model)) == result.weights_sha256
    model = Tied()
    safetensors.torch.load_model(model, tmp_path / "model.safetensors")
    assert fingerprint(weights_of(model)) == result.weights_sha256
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "model.safetensors"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [((), "usage: unisono export RUN --to"), (("RUN",), "--to = (nothing): no file is named"),
     (("RUN", "--to", "model.bin"), "--to = model.bin: neither .safetensors nor .pt"),
     (("RUN", "--to", "nowhere/model.pt"), "nowhere/.model.pt.tmp: No such file or directory"),
     (("RUN", "--to", "there.pt"), "--to = there.pt: it exists already"),
     (("RUN", "--to", "x.pt", "--max-shard-bytes", "5GB"), "5GB: a .pt file is not split; leave it out"),
     (("nowhere", "--to", "x.pt"), "run = nowhere: there is no checkpoint"),
     (("a", "b", "--to", "x.pt"), "RUN = a b: one run is needed")],
    ids=str,
)  # fmt: skip
def test_export_says_what_cannot_be(words, sentence, result, export, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.pt").touch()
    said = export(*(result.run if word == "RUN" else word for word in words))
    assert sentence in (said.out if not words else said.err)
    assert said.code == (0 if not words else 1 if "nowhere/" in sentence else 2)
    assert {path.name for path in tmp_path.iterdir()} == {"there.pt"}
