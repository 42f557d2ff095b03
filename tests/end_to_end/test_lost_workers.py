"""Workers are killed in quick succession; the long form is `python -m tests.campaigns.lost_workers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.lost_workers.killing_launcher import Plan
from tests.campaigns.lost_workers.runs import KINDS, ended_early, trial
from unisono.launch.restart_policy import BEFORE_LOOP, WITHOUT_STEP


@pytest.mark.long
@pytest.mark.parametrize(("kind", "seed"), [("BlockMomentum", 11), ("shard", 16)])
def test_replacements_that_are_lost_too_change_nothing(kind: str, seed: int, tmp_path: Path) -> None:
    came = trial(KINDS[kind], seed, tmp_path, kills=4, heirs=1.0)
    assert not came.wrong, came
    assert len(came.strikes) >= 3  # the last one may come after the end


def test_a_plan_follows_from_its_seed_and_is_read_as_it_was_written(tmp_path: Path) -> None:
    plans = [Plan.draw(seed, tmp_path, tmp_path / "over", 5, 0.5) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert Plan.read(plans[0].write()) == plans[0]


def test_only_a_reason_is_a_right_end() -> None:
    strikes = [{"worker": name, "taken": taken} for name, taken in (("1", 5), ("0", 5), ("1.2", 6), ("1.3", 6))]
    limit = f"worker 1 failed: killed; 3 processes of worker 1 were lost in a row {WITHOUT_STEP} (the limit is 3)"
    assert ended_early(1, limit, strikes) == "it was given up, though there was a step"
    assert ended_early(1, limit, [{**each, "taken": 5} for each in strikes]) == ""
    assert ended_early(1, f"worker 1 failed: killed by SIGKILL, {BEFORE_LOOP}", strikes) == ""
    assert ended_early(1, "worker 1 failed: killed by SIGKILL", strikes).startswith("it ended with 1")
    assert ended_early(-9, "", strikes) == "it stood still"
