"""The campaign `tests.campaigns.kills` itself, on a toy, and its short form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.campaigns import kills
from tests.campaigns.kills import Campaign, Subject, conduct, draw, training
from tests.support.leftovers import session, within

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.alone  # it looks for what a run leaves on the machine


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def toy(*command: str) -> Subject:
    """Anything that is begun anew each time, and comes to nothing."""
    return Subject(command, command, begun=lambda _: False, outcome=lambda _: None, seconds=lambda _: (0.1, 0.1))


def counting() -> Subject:
    """A run of two workers that count to 60, which takes most of a second."""
    command = (sys.executable, "-m", "tests.support.toy_training", "{directory}/run", "60")
    return Subject(
        command,
        command,
        begun=lambda at: (at / "run").exists(),
        outcome=lambda at: (at / "run" / "count-0").read_text(),
        stepping=lambda at: (at / "run" / "count-0").exists(),
        seconds=lambda _: (0.6, 0.5),
    )


@pytest.mark.long
def test_a_run_that_is_hit_leaves_nothing_and_comes_to_the_same_end(tmp_path: Path) -> None:
    assert (
        conduct(training(workers=3, steps=100, task="examples/custom_task.py:blobs"), tmp_path, moments=2, seed=2) == []
    )


@pytest.mark.long
def test_a_toy_that_is_hit_leaves_nothing(tmp_path: Path) -> None:
    assert conduct(counting(), tmp_path, moments=7, seed=1) == []


def test_it_sees_a_process_that_stays_and_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kills, "GONE_SECONDS", 0.2)
    daemon = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    hits = Campaign(toy(sys.executable, "-c", daemon), tmp_path)
    assert "processes stay" in hits.complete(hits.fresh("run"))


def test_it_sees_processes_that_name_themselves(tmp_path: Path) -> None:
    hits = Campaign(counting(), tmp_path)
    at = hits.fresh("run")
    with hits.launched(counting().start, at) as run:
        names = {f"unisono {role}" for role in ("launcher", "forkserver", "worker 0", "worker 1")}
        assert within(10, lambda: names <= set(session(run.pid).values()))
    assert run.returncode == 0
    assert hits.left_over(run.pid, at) == ""


def test_it_sees_shared_memory_that_stays(tmp_path: Path) -> None:
    file = Path("/dev/shm") / f"unisono-campaign-{tmp_path.name}"
    hits = Campaign(toy("touch", str(file)), tmp_path)
    try:
        assert file.name in hits.complete(hits.fresh("run"))
    finally:
        file.unlink()


def test_it_sees_temporary_files_that_stay(tmp_path: Path) -> None:
    hits = Campaign(toy("mktemp", "-d"), tmp_path)
    assert "temporary files stay" in hits.complete(hits.fresh("run"))


def test_it_sees_a_run_that_fails(tmp_path: Path) -> None:
    hits = Campaign(toy("false"), tmp_path)
    assert "false ended with 1" in hits.complete(hits.fresh("run"))


def test_it_sees_another_outcome(tmp_path: Path) -> None:
    came_to = iter(range(9))
    subject = Subject(["true"], ["true"], lambda _: True, outcome=lambda _: next(came_to), seconds=lambda _: (0.1, 0.1))
    (wrong,) = conduct(subject, tmp_path, moments=1)
    assert "came to" in wrong


def test_moments_are_drawn_from_the_seed_and_from_both_phases() -> None:
    assert draw(3, 5, (1.0, 2.0)) == draw(3, 5, (1.0, 2.0)) != draw(4, 5, (1.0, 2.0))
    early, late = draw(0, 20, (1.0, 5.0))[::2], draw(0, 20, (1.0, 5.0))[1::2]
    assert [moment.stepping for moment in early + late] == [False] * 10 + [True] * 10
    assert max(moment.after_seconds for moment in early) < 1.0 < max(moment.after_seconds for moment in late)
    assert {moment.role for moment in early} == {moment.role for moment in late}
