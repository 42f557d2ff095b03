"""Shows the progress of a run: a live line on a terminal, a line now and then elsewhere; then a summary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from unisono.errors import InvalidInput, printable, printable_lines
from unisono.observe.formatting import clock, metrics_text, number, rate, result_rows, resume_command
from unisono.observe.rate_limit import RateLimit

PLAIN_SECONDS = 5.0
_REFRESHES_PER_SECOND = 8
_FINDINGS = 64  # remembered, so that none is shown twice


class Display:
    """Shows the messages of a run; a context, which restores the terminal at its end.

    Messages are mappings with a ``kind``: ``run`` (path), ``notice`` (text), ``finding`` (text; every worker reports
    it, and it is shown once), ``progress`` (step, steps, loss, samples_per_second, metrics), ``breakpoint`` (the live
    line stops). Other kinds are ignored.

    Args:
        name: what is trained.
        stream: the output; lines without colours or movement unless it is a terminal.
        console: the console to print to; None: one for `stream`.
        plain_seconds: the time between two lines without a terminal.

    Attributes:
        run: the path of the run directory, once it is known.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO,
        *,
        console: Console | None = None,
        plain_seconds: float = PLAIN_SECONDS,
    ) -> None:
        self._name = name
        self._console = console or Console(file=stream, highlight=False)
        self._rate_limit = RateLimit(plain_seconds)
        self._progress: Mapping[str, Any] | None = None
        self._first: tuple[float, int] | None = None
        self._spinner = Spinner("dots", Text(f"{name}: starting", style="dim"), style="cyan")
        self._live: Live | None = None
        self.run: str | None = None
        self._run_shown = False
        self._findings: deque[str] = deque(maxlen=_FINDINGS)

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=_REFRESHES_PER_SECOND,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is not None and not issubclass(kind, InvalidInput):
            self._show_run()

    def close(self) -> None:
        """Stop the live line; later output follows below it. May be called twice."""
        if self._live is not None:
            self._live.stop()

    def handle(self, rank: int, message: Mapping[str, Any]) -> None:
        """Process one message of worker `rank`."""
        match message.get("kind"):
            case "run":
                self.run = str(message["path"])  # shown with the first step: until then the run may be refused
            case "notice":
                self._print(Text.assemble(("note ", "yellow"), printable_lines(str(message["text"]))))
            case "finding" if message["text"] not in self._findings:
                self._findings.append(message["text"])
                self._print(Text.assemble(("stuck ", "red"), printable_lines(str(message["text"]))))
            case "progress":
                self._show_progress(message)
            case "breakpoint":
                self.close()
                self._live = None

    def _show_progress(self, progress: Mapping[str, Any]) -> None:
        self._progress = progress
        if self._first is None:
            self._first = time.monotonic(), progress["step"]
            self._show_run()
        if self._live is None and (self._rate_limit.due() or progress["step"] == progress["steps"]):
            self._print(Text(f"step {progress['step']:,}/{progress['steps']:,}  {self._figures(progress)}"))

    def _show_run(self) -> None:
        if self.run is not None and not self._run_shown:
            self._run_shown = True
            self._print(Text.assemble(("run ", "dim"), printable(self.run)))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _figures(self, progress: Mapping[str, Any]) -> str:
        figures = [f"loss {number(progress['loss'])}", f"{rate(progress['samples_per_second'])} samples/s"]
        metrics = printable(metrics_text(progress.get("metrics") or {}))
        left = self._left(progress)
        return "  ".join([*figures, *([metrics] if metrics else []), *([left] if left else [])])

    def _left(self, progress: Mapping[str, Any]) -> str:
        if self._first is None or progress["step"] <= self._first[1]:
            return ""
        began, step = self._first
        each = (time.monotonic() - began) / (progress["step"] - step)
        left = each * (progress["steps"] - progress["step"])
        return f"{clock(left)} left" if progress["step"] < progress["steps"] else ""

    def _render(self) -> RenderableType:
        if self._progress is None:
            starting = Table.grid()
            starting.add_column(no_wrap=True, overflow="ellipsis")
            starting.add_row(self._spinner)
            return starting
        line = Table.grid(padding=(0, 1))
        step, steps = self._progress["step"], self._progress["steps"]
        count, figures = f"{step:,}/{steps:,}", self._figures(self._progress)
        for text in (self._name, "", count):
            line.add_column(no_wrap=True, min_width=min(len(text), 24))
        line.add_column(no_wrap=True, overflow="ellipsis")
        left = self._console.width - len(self._name) - len(count) - len(figures) - 4
        bar = ProgressBar(total=steps, completed=step, width=max(8, min(30, left)))
        line.add_row(Text(self._name, style="bold"), bar, count, Text(figures, style="cyan"))
        return line


def summary(name: str, result: Mapping[str, Any], stream: TextIO, *, console: Console | None = None) -> None:
    """Print the result of a run: a panel on a terminal, plain lines elsewhere.

    Args:
        name: what was trained.
        result: the fields of a `Result`, as ``dataclasses.asdict`` returns them.
        stream: the output.
        console: the console to print to; None: one for `stream`.
    """
    console = console or Console(file=stream, highlight=False)
    command = resume_command(str(result["run"]), 2 * result["steps"])
    if not console.is_terminal:
        for label, text in [*result_rows(result), ("train on", command)]:
            console.print(Text(f"{label:<14} {text}"), soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for i, (label, text) in enumerate(result_rows(result)):
        grid.add_row(label, Text(text, style="bold" if i <= len(result["metrics"]) else ""))
    console.print(Panel(grid, title=Text(name, style="bold"), title_align="left", box=box.ROUNDED, expand=False))
    console.print(Text.assemble(("train on with  ", "dim"), command), soft_wrap=True)
