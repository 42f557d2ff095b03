"""The arithmetic of the benchmarks; never their times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import harness
from benchmarks.harness import Claim, Spread, Verdict

FASTER, QUICKER = Claim("faster", 2.0), Claim("sooner", 0.4, at_least=False)


@pytest.mark.parametrize(
    ("claim", "ratio", "holds"),
    [(FASTER, 2.0, True), (FASTER, 1.9, False), (QUICKER, 0.4, True), (QUICKER, 0.5, False)],
)
def test_a_claim_holds_on_its_own_side_of_the_target(claim: Claim, ratio: float, holds: bool) -> None:
    assert claim.holds(ratio) is holds


def test_ratios_are_taken_within_the_repeats() -> None:
    slow_machine_later = Verdict(FASTER, "peer", "steps/s", [200.0, 20.0, 2.0], [100.0, 10.0, 1.0])
    assert slow_machine_later.ratio == Spread(2.0, 2.0, 2.0)
    assert slow_machine_later.holds


def test_one_repeat_has_no_spread() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)


def test_the_order_turns_round_and_every_way_runs_in_every_repeat() -> None:
    order: list[str] = []
    ran = harness.interleave({way: lambda way=way: order.append(way) for way in "ab"}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {way: len(results) for way, results in ran.items()} == {"a": 3, "b": 3}


def test_the_record_holds_every_figure_and_no_path(tmp_path: Path) -> None:
    verdict = Verdict(QUICKER, "peer", "s", [1.0, 2.0], [4.0, 4.0])
    code = harness.conclude("made up", [verdict], tmp_path / "new" / "record.json")
    text = (tmp_path / "new" / "record.json").read_text()
    claim = json.loads(text)["claims"][0]
    assert code == 0
    assert (claim["ours"], claim["peer_figures"], claim["verdict"]) == ([1.0, 2.0], [4.0, 4.0], "PASS")
    assert "/" not in text.replace(harness._cpu(), "").replace("steps/s", "")


def test_a_command_that_fails_ends_the_benchmark_with_what_it_said() -> None:
    with pytest.raises(SystemExit, match=r"(?s)ended with 3.*no such luck"):
        harness.run([sys.executable, "-c", "print('no such luck'); raise SystemExit(3)"])


def test_a_command_that_hangs_is_ended() -> None:
    with pytest.raises(SystemExit, match="still running after"):
        harness.run([sys.executable, "-c", "import signal; signal.pause()"], timeout_seconds=0.3)
