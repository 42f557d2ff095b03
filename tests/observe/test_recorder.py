"""Events, scalars and files of a run: what is written, how often, at what cost, and on a full disk."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from unisono.observe import NullRecorder, Recorder, RunRecorder, write_config, write_summary
from unisono.observe.event_log import EventLog
from unisono.observe.sinks import TensorBoard

FOREVER = 1e9  # seconds


class RecordingSink:
    """A sink that records its calls."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.taken.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def test_an_event_is_one_line_with_its_time(tmp_path: Path) -> None:
    recorder, before = RunRecorder(tmp_path, []), time.time()
    recorder.event("start", workers=2, path=Path("a"), text="zwei\nZeilen", loss=float("nan"), more={"x": (1, None)})
    recorder.close()
    (event,) = events(tmp_path)
    assert before - 1 <= event.pop("time") <= time.time() + 1
    assert event == {
        "event": "start",
        "workers": 2,
        "path": "a",
        "text": "zwei\nZeilen",
        "loss": "nan",
        "more": {"x": [1, None]},
    }
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for name in ("first", "second"):
        recorder = RunRecorder(tmp_path, [])
        recorder.event(name)
        recorder.close()
    assert [e["event"] for e in events(tmp_path)] == ["first", "second"]


def test_the_rate_of_steps_is_limited_except_for_the_first_and_the_last(tmp_path: Path) -> None:
    kept = RecordingSink()
    recorder = RunRecorder(tmp_path, [kept], step_seconds=FOREVER)
    for step in range(1, 101):
        recorder.step(step, 100, lambda: {"loss": 1 / step, "note": "x"})  # noqa: B023  (read at once or never)
    assert [(e["step"], e["steps"], e["loss"]) for e in events(tmp_path)] == [(1, 100, 1.0), (100, 100, 0.01)]
    assert kept.taken == [(1, {"train/loss": 1.0}), (100, {"train/loss": 0.01})]
    recorder.close()
    assert kept.closed
    assert len(events(tmp_path)) == 2


def test_a_run_that_stops_early_still_writes_its_last_step(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, [], step_seconds=FOREVER)
    for step in (1, 2, 3):
        recorder.step(step, 100, lambda step=step: {"loss": float(step)})  # type: ignore[misc]
    recorder.close()
    assert [e["step"] for e in events(tmp_path)] == [1, 3]


def test_without_a_limit_every_step_is_written(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, [], step_seconds=0.0)
    for step in range(1, 6):
        recorder.step(step, 9, lambda: {})
    recorder.close()
    assert [e["step"] for e in events(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_step_that_is_not_due_costs_next_to_nothing(tmp_path: Path) -> None:
    recorder: Recorder = RunRecorder(tmp_path, [], step_seconds=FOREVER)
    fields: Callable[[], Mapping[str, Any]] = lambda: {}
    recorder.step(1, 10**9, fields)

    def once() -> float:
        began = time.perf_counter()
        for step in range(2, 2002):
            recorder.step(step, 10**9, fields)
        return (time.perf_counter() - began) / 2000

    assert min(once() for _ in range(20)) < 2e-6  # seconds; the least of many, since the machine is shared


def test_metrics_go_to_events_and_sinks(tmp_path: Path) -> None:
    kept = RecordingSink()
    recorder = RunRecorder(tmp_path, [kept])
    recorder.metrics(7, {"accuracy": 0.5})
    recorder.close()
    assert events(tmp_path)[0] | {"time": 0} == {"time": 0, "event": "metrics", "step": 7, "accuracy": 0.5}
    assert kept.taken == [(7, {"metrics/accuracy": 0.5})]


def test_a_full_disk_is_reported_once_and_nothing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RunRecorder(tmp_path, [])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recorder.event("lost")
        recorder.close()
    assert [r.message for r in caplog.records] == [
        f"events are not written to {tmp_path}/events.jsonl: No space left on device; the run continues"
    ]


def test_a_missing_directory_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        recording = EventLog(tmp_path / "gone")
        recording.write("lost", {})
        recording.close()
    assert len(caplog.records) == 1
    assert "No such file or directory" in caplog.text


def test_nothing_records_nothing() -> None:
    recorder: Recorder = NullRecorder()
    recorder.event("x")
    recorder.step(1, 2, lambda: pytest.fail("nobody reads it"))
    recorder.metrics(1, {})
    recorder.close()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoard(tmp_path)
    sink.scalars(3, {"train/loss": 0.5})
    sink.scalars(4, {"train/loss": 0.25})
    sink.close()
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(3, 0.5), (4, 0.25)]


def test_a_failing_tensorboard_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    sink = TensorBoard(tmp_path)
    with caplog.at_level(logging.WARNING):
        sink.scalars(1, {"a": 1.0})
        sink.scalars(2, {"a": 1.0})
    sink.close()
    assert len(caplog.records) == 1
    assert "the run continues" in caplog.text


def test_a_summary_with_a_loss_that_is_not_finite_is_json(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_summary(path, {"steps": 3, "loss": float("inf"), "metrics": {"a": 0.5}, "run": Path("runs/a")})
    assert json.loads(path.read_text()) == {"steps": 3, "loss": "inf", "metrics": {"a": 0.5}, "run": "runs/a"}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_file_that_cannot_be_written_leaves_the_old_one_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, {"steps": 3}, "digits", {})
    before = (tmp_path / "config.toml").read_text()

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_config(tmp_path, {"steps": 4}, "digits", {})
    assert (tmp_path / "config.toml").read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["config.toml"]
