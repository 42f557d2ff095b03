"""The arithmetic and the tree of the benchmarks; never their times."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from benchmarks import harness
from benchmarks.__main__ import BY_NAME_ONLY, modules
from benchmarks.__main__ import main as run_by_name
from benchmarks.elasticity import coordinator
from benchmarks.harness import Claim, Spread, Verdict
from benchmarks.netlab.errors import Unavailable
from benchmarks.single_run import drop_ins, gpu, layout_memory, layout_speed, steps, unequal

ROOT = Path(__file__).parents[2]
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


@pytest.mark.long
def test_a_few_workers_go_through_the_benchmark_of_the_coordinator() -> None:
    ran = harness.run([*coordinator.command(24), "--seconds", "1", "--deaths", "2"])
    assert ran.report["workers"] == 24
    assert len(ran.report["changes"]) == 2
    assert ran.report["steady"]["beats_per_second"] > 24
    assert all(ours > 0 for verdict in coordinator.verdicts([ran]) for ours in verdict.ours)


@pytest.mark.short(1)
@pytest.mark.parametrize("way", ["unisono", "plain"])
def test_a_model_of_nothing_goes_through_the_benchmark_of_one_device(way: str) -> None:
    report = harness.run(gpu.command(way, "tiny", "cpu", 4)).report
    blocks = 2 * (12 * 32**2 + 13 * 32)
    assert report["parameters"] == 256 * 32 + 16 * 32 + blocks + 2 * 32 + 256 * 32
    assert report["flops_per_token"] == 6 * report["parameters"] + 12 * 2 * 32 * 16
    assert gpu.utilisation(report, report["tokens_per_second"] * report["flops_per_token"] * 4) == pytest.approx(0.25)


@pytest.mark.parametrize(("name", "known"), [("NVIDIA H200", True), ("NVIDIA A100-SXM4-80GB", True), ("CPU", False)])
def test_the_peak_of_a_device_is_known_by_its_name_or_not_at_all(name: str, known: bool) -> None:
    assert (gpu.peak_of(name) is not None) is known


def test_ways_that_do_not_compute_the_same_are_not_compared() -> None:
    case = layout_speed.CASES[0]
    layout_speed.compare(case, {"a": [1.0, 1.00005], "b": [1.0, 1.0]})
    with pytest.raises(SystemExit, match="did not compute the same"):
        layout_speed.compare(case, {"a": [1.0, 1.0], "b": [1.0, 1.001]})


def test_steps_of_two_ways_with_different_losses_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"unisono": 5.5, "ddp": 5.5005}

    def ran(command: list[str]) -> harness.Ran:
        way = next(word for word in command if word in losses)
        return harness.Ran({"loss": losses[way], "step_seconds_median": 0.5}, 0.0, 1.0)

    monkeypatch.setattr(harness, "run", ran)
    verdict = steps.measure(steps.CASES[0], "sgd", 1)
    assert (verdict.ours, verdict.theirs, verdict.peer) == ([2.0], [2.0], "DDP on gloo")
    losses["ddp"] = 5.6
    with pytest.raises(SystemExit, match="do not compute the same"):
        steps.measure(steps.CASES[0], "sgd", 1)


@pytest.mark.long
@pytest.mark.parametrize("interface", drop_ins.INTERFACES, ids=lambda interface: interface.name)
def test_an_interface_computes_what_the_one_does_whose_place_it_takes(interface: drop_ins.Interface) -> None:
    assert interface.missing() == []
    case = replace(interface.cases()[0], warmup=0, steps=11)
    assert steps.measure(case, "adamw", 1).ratio.median > 0


def test_what_a_worker_holds_is_that_of_the_one_with_most_above_an_empty_one() -> None:
    kinds = ("parameters", "gradients", "optimizer", "tensors")
    full = {"workers": [dict.fromkeys(kinds, 3), dict.fromkeys(kinds, 5)], "peak_rss_bytes": 100, "loss": 1.0}
    empty = {"workers": [dict.fromkeys(kinds, 1)] * 2, "peak_rss_bytes": 60, "loss": 2.0}
    found = layout_memory.Figure.of(full, empty)
    assert found == layout_memory.Figure(state=15, tensors=4, peak=40, fixed=60, loss=1.0)
    assert layout_memory.third(found, 60) == 65


@pytest.mark.long
@pytest.mark.root
def test_a_model_that_is_too_large_for_one_worker_trains_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*next(iter(layout_memory.THRESHOLD.items())))
    size, layout = layout_memory.Size(8, 256), "Layout(pipeline=2)"
    state = 16 * 12 * size.layers * size.width**2
    try:
        limit = layout_memory.limited(layout, size.empty, 0).peak + state * 2 // 3
    except Unavailable as refused:
        pytest.skip(str(refused))
    laid, alone = (layout_memory.limited(each, size, limit) for each in (layout, layout_memory.ONE_WORKER))
    assert laid.killed == 0, laid
    assert laid.report["loss"] < 6, laid
    assert alone.killed == 1, alone
    assert "SIGKILL" in alone.report["failed"], alone


def test_unequal_workers_are_judged_by_the_sum_of_their_own_speeds() -> None:
    speeds = {unequal.FAST: [100.0], unequal.SLOW: [40.0], unequal.BALANCED: [133.0], unequal.DDP: [80.0]}
    kept, against_ddp = unequal.judged(speeds)
    assert kept.ratio.median == pytest.approx(0.95)
    assert against_ddp.ratio.median == pytest.approx(133 / 80)
    assert kept.holds
    assert against_ddp.holds
    assert not unequal.judged({**speeds, unequal.BALANCED: [128.0]})[0].holds


# --- the tree


def imported(path: Path) -> set[Path]:
    """The files of `benchmarks/` that this file imports anywhere; scripts import each other by bare names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.replace(".", "/")
            for file in (f"{parts}.py", f"{parts}/__init__.py", f"benchmarks/scripts/{parts}.py"):
                found |= {ROOT / file} if (ROOT / file).is_file() else set()
    return found - {path}


def test_no_benchmark_imports_itself_in_a_circle() -> None:
    graph = {path: imported(path) for path in (ROOT / "benchmarks").rglob("*.py")}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_every_benchmark_is_found_by_its_name_alone(capsys: pytest.CaptureFixture[str]) -> None:
    names = modules()
    assert {"steps", "gpu", "links", "time_to_loss", "recovery"} <= set(names)
    assert set(names) >= BY_NAME_ONLY
    assert all(callable(importlib.import_module(module).main) for module in names.values())
    assert run_by_name(["gpu2"]) == 2
    assert "gpu2: no benchmark" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["benchmarks", "gpu"], ["benchmarks.gpu"]], ids=" ".join)
def test_both_forms_of_the_command_show_its_help(command: list[str]) -> None:
    shown = subprocess.run([sys.executable, "-m", *command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "usage:" in shown.stdout
