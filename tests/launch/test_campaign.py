"""The campaign itself, in its short form and on a toy."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launch.campaign import Campaign, conduct, draw
from tests.launch.observation import within

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_run_that_is_hit_leaves_nothing_and_resumes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.launch.counting", str(tmp_path / "run"), "200"]
    assert conduct(command, command, draw(seed=1, moments=10, seconds=0.8), tmp_path / "run") == []
    assert (tmp_path / "run" / "count-0").read_text() == "200"


def test_it_sees_a_process_that_stays_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.launch.campaign.GONE_SECONDS", 0.2)
    daemon = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    campaign = Campaign([], [sys.executable, "-c", daemon])
    assert "processes stay" in campaign.finish()
    assert campaign.left_over() == ""


def test_it_sees_processes_that_name_themselves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.launch.counting", str(tmp_path / "run"), "60"]
    campaign = Campaign(command, command)
    with ThreadPoolExecutor(1) as pool:
        finished = pool.submit(campaign.finish)
        names = {f"unisono {role}" for role in ("launcher", "forkserver", "worker 0", "worker 1")}
        assert within(10, lambda: names <= set(campaign.processes().values()))
        assert finished.result() == ""


def test_it_sees_shared_memory_that_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.launch.campaign.GONE_SECONDS", 0.2)
    file = Path("/dev/shm") / f"unisono-campaign-{tmp_path.name}"
    campaign = Campaign([], ["touch", str(file)])
    try:
        assert file.name in campaign.finish()
    finally:
        file.unlink()


def test_it_sees_a_resume_that_fails() -> None:
    assert "ended with 1" in Campaign([], ["false"]).finish()


def test_moments_are_drawn_from_the_seed() -> None:
    assert draw(3, 5, 1.0) == draw(3, 5, 1.0) != draw(4, 5, 1.0)
    assert subprocess.run([sys.executable, "-m", "tests.launch.campaign", "--help"], check=False).returncode == 0
