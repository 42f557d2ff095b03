"""What an earlier version wrote opens under today's names; what a user writes today is refused under the old ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from unisono.checkpoint import open_found
from unisono.cli.main import main
from unisono.cli.merged_options import build_request
from unisono.cli.train_options import parse_arguments
from unisono.config import FIELDS, Config, current
from unisono.errors import InvalidInput
from unisono.notation import RENAMED_SETTINGS, current_names, parse, show
from unisono.run.directory import with_previous_settings
from unisono.sync import Gossip
from unisono.trainer.checkpoint_restorer import history

OLD_RUN = Path(__file__).parent / "earlier_run"  # config.toml, task and checkpoint, as an earlier version wrote them
OLD = Config(
    workers=2, min_workers=1, max_workers=2, memory_checkpoints=False, steps=4, global_batch=8, micro_batch=2,
    keep_checkpoints=1, timeout_seconds=100.0, activation_checkpointing="none", compare_replicas_every=0)  # fmt: skip


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run of an earlier version, beside its task."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(OLD_RUN / "line.py", tmp_path)
    return Path(shutil.copytree(OLD_RUN, tmp_path / "old"))


def is_old_run(config: Config) -> bool:
    """Whether `config` is that of the old run."""
    fields = ("sync", "min_workers", "max_workers", "memory_checkpoints", "keep_checkpoints", "timeout_seconds")
    wanted = Config.of({**OLD.mapping(), "sync": "Gossip(synchronize_every=2)"})
    return [getattr(config, name) for name in fields] == [getattr(wanted, name) for name in fields]


def test_the_sample_has_every_old_name() -> None:
    settings = tomllib.loads((OLD_RUN / "config.toml").read_text())
    assert RENAMED_SETTINGS.keys() - settings.keys() == {"run"}  # which config.toml leaves out
    assert set(RENAMED_SETTINGS.values()) <= FIELDS.keys()


def test_a_file_of_settings_has_either_names(old_run: Path) -> None:
    asked = build_request(parse_arguments(["--config", str(old_run / "config.toml"), "--min-workers", "2"]))
    assert asked.source.name == "line.py:line"
    assert is_old_run(Config.of({**asked.settings, "min_workers": 1}))
    assert asked.settings["min_workers"] == "2"


def test_a_run_to_resume_has_either_names(old_run: Path) -> None:
    settings = dict(with_previous_settings({"run_dir": str(old_run), "resume": True, "max_workers": 2}))
    assert is_old_run(Config.of(settings))


@pytest.mark.parametrize("old", sorted(RENAMED_SETTINGS))
def test_a_setting_under_both_names_is_refused(old: str, old_run: Path) -> None:
    new = RENAMED_SETTINGS[old]
    with pytest.raises(InvalidInput, match=f"{old} = 1: {new} is given too; give one of the two"):
        current_names({old: 1, new: 1})
    file = old_run / "config.toml"
    file.write_text(f"{old} = 1\n{new} = 1\n")
    with pytest.raises(InvalidInput, match=f"{new} is given too"):
        build_request(parse_arguments(["line.py:line", "--config", str(file)]))
    with pytest.raises(InvalidInput, match=f"{new} is given too"):
        with_previous_settings({"run_dir": str(old_run), "resume": True})


def test_values_have_either_names() -> None:
    names = {"Gossip": Gossip}
    assert parse("sync", "Gossip(meet_every=7)", names) == Gossip(synchronize_every=7)
    with pytest.raises(InvalidInput, match="synchronize_every is given twice"):
        parse("sync", "Gossip(meet_every=7, synchronize_every=7)", names)
    assert show(Gossip(synchronize_every=7)) == "Gossip(synchronize_every=7)"


@pytest.mark.parametrize(
    ("line", "cure"),
    [(f"train line.py:line --{old.replace('_', '-')} 1", f"write --{new.replace('_', '-')}.")
     for old, new in RENAMED_SETTINGS.items()]
    + [(f"train line.py:line --set {old}=1", f"write {new}=1.") for old, new in RENAMED_SETTINGS.items()]
    + [("train line.py:line --no-copies", "write --no-memory-checkpoints."),
       ("launch --run there line.py", "write --run-dir."), ("join --run there", "write --run-dir."),
       ("status --run there", "write --run-dir."), ("chaos line.py:line --run there", "write --run-dir."),
       ("coordinator --minimum 1", "write --min-workers."), ("coordinator --maximum 1", "write --max-workers."),
       ("coordinator --expected 1", "write --expected-workers."), ("coordinator --unit 1", "write --replica-size."),
       ("coordinator --shares 1", "write --micro-batches.")],
)  # fmt: skip
def test_old_options_are_refused_with_the_new_ones(
    line: str, cure: str, old_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert cure in capsys.readouterr().err


def test_an_old_field_is_refused_with_the_new_one() -> None:
    with pytest.raises(InvalidInput, match="keep = 2: there is no such field; write keep_checkpoints"):
        Config.of({"keep": 2})


def test_a_checkpoint_says_what_it_was_made_with_in_names_of_today() -> None:
    found = open_found(OLD_RUN, "run", print)
    settings = history(found)["config"]
    assert settings["sync"] == "Gossip(synchronize_every=2)"
    assert set(settings) == FIELDS.keys()
    assert is_old_run(Config.of(settings))


def test_a_value_that_nobody_knows_stays_as_it_is() -> None:
    assert current({"sync": "OfTomorrow()", "keep": 3}) == {"sync": "OfTomorrow()", "keep_checkpoints": 3}


def test_a_run_goes_on_from_an_old_checkpoint(old_run: Path) -> None:
    command = ["train", "--run-dir", str(old_run), "--resume", "--steps", "6", "--checkpoint-every", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "unisono", *command], cwd=old_run.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = open_found(old_run, "run", print)
    assert found.step == 6
    assert "sync/step" in found.specs  # the synchronizer has taken up its state
