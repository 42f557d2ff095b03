"""``unisono status``: what each worker does, on which line, and where the time went."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.coordinator import TOKEN, running_coordinator
from unisono.cli import main
from unisono.membership import Agent, CoordinatorAddress, Policy, StateVersion
from unisono.membership.client import CoordinatorClient
from unisono.membership.contact_file import write_contact
from unisono.observe.activity import Activity, Phase

DOING = Activity(Phase.DATA, 7, 1, 2.5, "", (), "own.py:31 __getitem__")


def test_a_run_under_way_says_what_each_does_on_which_line_and_where_the_time_went(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    (run / "coordinator").mkdir(parents=True)
    with running_coordinator(tmp_path / "state", policy=Policy(expected_workers=1, max_workers=1)) as served:
        contact = CoordinatorAddress(served.url, TOKEN)
        write_contact(run, contact)
        spent = {Phase.COMPUTE: 6.0, Phase.DATA: 4.0}
        with CoordinatorClient(contact, Agent("0", StateVersion()), lambda view: None, activity=lambda: DOING,
                        spent=lambda: spent) as attendance:  # fmt: skip
            assert attendance.next_view() is not None
            attendance.joined(1, 0, "")  # with which it tells where the time went
            assert main(["status", "--run-dir", str(run)]) == 0
    said = capsys.readouterr().out
    assert "waiting for data for 2.5 s at own.py:31 __getitem__" in " ".join(said.split())
    assert "after the start: 60% compute, 40% data" in said
    assert "40% of the time was spent waiting for data" in said


def test_a_run_that_is_over_says_where_the_time_went(tmp_path: Path, capsys) -> None:
    ledger = [{"start": 1.0, "compute": 8.0, "communication": 1.0}, {"start": 1.5, "compute": 8.5}]
    summary = {"steps": 1200, "wall_seconds": 12.0, "ledger": ledger, "ending": "all 1,200 steps are done"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert main(["status", "--run-dir", str(tmp_path)]) == 0
    first, _, *table, shares = capsys.readouterr().out.splitlines()
    assert first == "the run has ended after 12.0 s, all 1,200 steps are done"
    assert [row.split() for row in table] == [
        ["worker", "start", "compute", "communication", "together"],
        ["0", "1.00", "8.00", "1.00", "10.00"],
        ["1", "1.50", "8.50", "0.00", "10.00"],
    ]
    assert shares == "after the start: 94% compute, 6% communication"


def test_of_a_run_that_never_was_nothing_is_said(tmp_path: Path, capsys) -> None:
    shutil.rmtree(tmp_path)
    assert main(["status", "--run-dir", str(tmp_path)]) == 2
    assert "the run in this directory has no active coordinator" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_what_a_worker_says_of_itself_is_shown_as_it_is(tmp_path: Path, capsys) -> None:
    """Brackets are no markup, and what a terminal would obey never gets there."""
    run = tmp_path / "run"
    (run / "coordinator").mkdir(parents=True)
    said = Activity(Phase.COMMUNICATION, 7, 1, 2.5, "[/x] [bold]", (), "[red]own.py:31 [link=http://a]")
    with running_coordinator(tmp_path / "state", policy=Policy(expected_workers=1, max_workers=1)) as served:
        contact = CoordinatorAddress(served.url, TOKEN)
        write_contact(run, contact)
        with CoordinatorClient(
            contact, Agent("0", StateVersion()), lambda view: None, activity=lambda: said
        ) as attendance:
            assert attendance.next_view() is not None
            attendance.joined(1, 0, "")
            assert main(["status", "--run-dir", str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "waiting for [/x] [bold] for 2.5 s at [red]own.py:31 [link=http://a]" in shown


def test_a_summary_that_somebody_wrote_does_not_reach_the_terminal_as_orders(tmp_path: Path, capsys) -> None:
    written = {"steps": 1, "wall_seconds": 1.0, "ledger": [], "ending": "\x1b]0;title\x07"}
    (tmp_path / "summary.json").write_text(json.dumps(written))
    assert main(["status", "--run-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == r"the run has ended after 1.0 s, \x1b]0;title\x07"
