"""A fake run behind the command line, and the captured output of a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.membership.endpoint import CoordinatorOptions
from unisono.tasks.source import NamedTask


@dataclass(frozen=True)
class Result:
    steps: int = 240
    samples: int = 15360
    loss: float = 0.004212
    metrics: Mapping[str, float] = field(default_factory=lambda: {"accuracy": 0.9916})
    weights_sha256: str = "3f" * 32
    wall_seconds: float = 9.8
    startup_seconds: float = 2.1
    samples_per_second: float = 4321.0
    bytes_sent_per_worker: int = 52_100_000
    step_seconds_median: float = 0.0123
    peak_rss_bytes: int = 412_000_000
    run: str = "runs/digits-1"
    complete: bool = True
    ending: str = "all 240 steps are done"


@dataclass
class FakeRun:
    """Stands for `unisono.run.start.start`: records its arguments and calls `act`."""

    act: Callable[[Callable[[int, Mapping[str, Any]], None]], Result | None] = lambda on_message: Result()
    source: NamedTask | None = None
    settings: Mapping[str, Any] | None = None
    json: Path | None = None
    coordinator: CoordinatorOptions | None = None
    debug: int | None = None

    def start(
        self, source: NamedTask, settings: Mapping[str, Any], *, json: Path | None, on_message: Any,
        coordinator: CoordinatorOptions | None = None, debug: int | None = None,
    ) -> Result | None:  # fmt: skip
        self.debug = debug
        self.source, self.settings, self.json, self.coordinator = source, settings, json, coordinator
        return self.act(on_message)


@dataclass(frozen=True)
class CommandOutput:
    code: int
    out: str
    err: str
