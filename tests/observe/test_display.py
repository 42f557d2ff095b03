"""The display: one live line on a terminal, plain lines elsewhere, and a summary of both kinds."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from unisono.errors import InvalidInput
from unisono.observe.display import Display, summary
from unisono.observe.formatting import clock, duration, number, rate, resume_command

RESULT: Mapping[str, Any] = {
    "steps": 240,
    "samples": 15360,
    "loss": 0.0042123,
    "metrics": {"loss": 0.05, "accuracy": 0.9916434, "bits_per_byte": 2.5},
    "weights_sha256": "3f" * 32,
    "wall_seconds": 9.84,
    "startup_seconds": 2.13,
    "samples_per_second": 4321.5,
    "bytes_sent_per_worker": 52123456,
    "step_seconds_median": 0.0123,
    "peak_rss_bytes": 412345678,
    "run": "runs/digits-2026-11-20 10:38",
}


def progress(step: int, **more: Any) -> Mapping[str, Any]:
    shown = {"kind": "progress", "step": step, "steps": 240, "loss": 2.3 / step, "samples_per_second": 4321.5}
    return {**shown, "metrics": {}, **more}


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)


def seen(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_there_are_plain_lines_at_least_the_first_and_the_last() -> None:
    stream = io.StringIO()
    with Display("digits", stream, plain_seconds=1e9) as display:
        display.handle(0, {"kind": "run", "path": "runs/a"})
        for step in range(1, 241):
            display.handle(0, progress(step))
        display.handle(1, {"kind": "notice", "text": "too little shared memory: gloo"})
        display.handle(1, {"kind": "of a later version"})
    assert stream.getvalue().splitlines() == [
        "run runs/a",
        "step 1/240  loss 2.3  4,322 samples/s",
        "step 240/240  loss 0.009583  4,322 samples/s",
        "note too little shared memory: gloo",
    ]
    assert display.run == "runs/a"


@pytest.mark.parametrize(
    ("error", "says"), [(InvalidInput("steps", 0, "below 1", "use 1"), ""), (ValueError(), "run runs/a\n")]
)
def test_a_run_refused_for_invalid_input_is_not_shown(error: Exception, says: str) -> None:
    stream = io.StringIO()
    with contextlib.suppress(type(error)), Display("digits", stream) as display:
        display.handle(0, {"kind": "run", "path": "runs/a"})
        raise error
    assert stream.getvalue() == says


def test_without_a_terminal_a_long_line_is_not_broken() -> None:
    stream = io.StringIO()
    with Display("digits", stream) as display:
        display.handle(0, {"kind": "notice", "text": "word " * 60})
    assert stream.getvalue().count("\n") == 1


def test_on_a_terminal_one_line_is_live_and_the_cursor_is_restored() -> None:
    console = terminal()
    with Display("digits", io.StringIO(), console=console) as display:
        display.handle(0, progress(120))
        display.handle(0, {"kind": "notice", "text": "[brackets] stay"})
        display.handle(0, progress(240, metrics={"accuracy": 0.99}))
    text = seen(console)
    assert "digits: starting" in text
    assert "note [brackets] stay" in text
    assert "240/240 loss 0.009583  4,322 samples/s  accuracy 0.99" in text
    assert text.index("\x1b[?25l") < text.index("\x1b[?25h")
    assert text.count("\n") == 2  # the notice, and the end of the live line


def test_an_error_restores_the_terminal() -> None:
    console = terminal()
    with pytest.raises(RuntimeError), Display("digits", io.StringIO(), console=console):
        raise RuntimeError
    assert seen(console).rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_the_live_line_is_one_line_on_any_width(width: int) -> None:
    console = terminal(width)
    with Display("a_task_with_a_long_name", io.StringIO(), console=console) as display:
        display.handle(0, progress(120, metrics={"accuracy": 0.99, "bits_per_byte": 2.5}))
    assert seen(console).count("\n") == 1


def test_the_remaining_time_follows_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stream = io.StringIO()
    with Display("digits", stream, plain_seconds=0) as display:
        display.handle(0, progress(10))
        now[0] += 10
        display.handle(0, progress(30))
    assert stream.getvalue().splitlines()[-1].endswith("1:45 left")


def test_the_summary_without_a_terminal_has_one_line_per_item() -> None:
    stream = io.StringIO()
    summary("digits", RESULT, stream)
    lines = {line[:14].strip(): line[15:] for line in stream.getvalue().splitlines()}
    assert lines == {
        "training loss": "0.004212",
        "held-out loss": "0.05",
        "accuracy": "0.9916",
        "bits per byte": "2.5",
        "trained": "240 steps, 15,360 samples",
        "speed": "4,322 samples/s · 12.3 ms a step",
        "time": "9.8 s, of which 2.1 s to start",
        "sent": "52.1 MB by each worker",
        "memory": "412.3 MB at most in a worker",
        "weights": "3f" * 32,
        "run": "runs/digits-2026-11-20 10:38",
        "train on": resume_command(RESULT["run"], 480),
    }


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_summary_on_a_terminal_is_a_panel_that_loses_nothing(width: int) -> None:
    console = terminal(width)
    summary("digits", RESULT, io.StringIO(), console=console)
    panel, _, command = seen(console).partition("train on with")
    assert panel.splitlines()[0].startswith("╭─ digits ─")
    assert all(len(line) <= width for line in panel.splitlines())
    joined = "".join(c for c in panel if c not in "│ \n")
    assert "3f" * 32 in joined
    assert "0.9916" in panel
    assert command.strip() == resume_command(RESULT["run"], 480)


def test_the_command_to_resume_survives_a_shell() -> None:
    assert resume_command("runs/a b") == "unisono train --run-dir 'runs/a b' --resume"
    assert resume_command("r", 5).endswith("--resume --steps 5")


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (number, 0.000123456, "0.0001235"),
        (number, 12345.6, "12,346"),
        (number, float("nan"), "nan"),
        (rate, 1234.5, "1,234"),
        (rate, 3.14159, "3.14"),
        (duration, 0.0123, "12.3 ms"),
        (duration, 9.84, "9.8 s"),
        (duration, 245, "4 min 05 s"),
        (duration, 12000, "3 h 20 min"),
        (clock, 7.4, "0:07"),
        (clock, 3723, "1:02:03"),
        (clock, -1, "0:00"),
    ],
)
def test_numbers_as_text(function: Any, value: float, text: str) -> None:
    assert function(value) == text


def test_what_every_worker_reports_is_shown_once() -> None:
    stream = io.StringIO()
    display = Display("digits", stream)
    for rank in range(3):
        display.handle(rank, {"kind": "finding", "text": "step 7 is not done: worker 1 sleeps"})
    display.handle(0, {"kind": "finding", "text": "step 7 is not done: worker 1 still sleeps"})
    assert stream.getvalue().splitlines() == [
        "stuck step 7 is not done: worker 1 sleeps",
        "stuck step 7 is not done: worker 1 still sleeps",
    ]


def test_received_text_does_not_control_the_terminal() -> None:
    """Another host's sentences are shown here: none of them sets a title, clears the screen or hides what follows."""
    for console in (terminal(), None):
        stream = io.StringIO()
        with Display("digits", stream, console=console) as display:
            for kind in ("notice", "finding"):
                display.handle(0, {"kind": kind, "text": "\x1b]0;title\x07 \x9b2J [/x] \u202e two\nlines"})
        shown = seen(console) if console else stream.getvalue()
        assert shown.count("\\x1b]0;title\\x07 \\x9b2J [/x] \\u202e two\nlines") == 2
        assert not any(order in shown for order in ("\x1b]", "\x9b", "\x07", "\u202e"))
