"""Real processes are killed, frozen and joined; the long form is `tests.campaigns.chaos`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos import slow_task
from unisono.cli import main


@pytest.mark.long
def test_a_kill_a_freeze_and_a_newcomer_change_nothing(tmp_path: Path, capsys) -> None:
    counts = {"kill": 1, "freeze": 1, "join": 1, "partition": 0, "drain": 0, "coordinator": 0, "seed": 4}
    faults = [f"--{name}={count}" for name, count in counts.items()]
    words = ["--workers", "3", "--run-dir", str(tmp_path / "runs"), "--json", str(tmp_path / "found.json")]
    code = main(["chaos", f"{slow_task.__file__}:task", *faults, *words])
    said = capsys.readouterr()
    assert code == 0, said
    (seed,) = json.loads((tmp_path / "found.json").read_text())["seeds"]
    assert seed["equal"]
    assert sorted(each["kind"] for each in seed["happened"]) == ["freeze", "join", "kill"]
    assert {row["name"]: row["disturbed"] for row in seed["compared"]}["losses"] == "of 150 steps"
    assert "seed 4: equal after 3 faults" in said.out
