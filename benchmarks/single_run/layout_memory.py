"""Memory of a worker under a layout, and training of a model three times larger than a worker's limit.

First, without limits: bytes of parameters, gradients and optimizer state that a worker holds; and its peak resident set
(with start-up, activations and the last checkpoint) above that of the same layout with a tiny model. Both are compared
with the parameters, gradients and optimizer state of one worker.

Then in control groups (Linux, version 1, controller ``memory``; root): every worker is limited to a third of what one
worker needs for parameters, gradients and optimizer state, plus the fixed cost of its layout. Under ``shard=4`` and
``pipeline=4`` the model reaches the loss that it reaches without limits; one worker under that limit is killed.

glibc does not return freed blocks to the system that lie between small tensors, as unsharded blocks do. These runs
therefore set ``MALLOC_MMAP_THRESHOLD_``, so that large tensors are returned. ``--as-is`` leaves it out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import BIN, SCRIPTS, Claim, Verdict
from benchmarks.netlab.cpu_quota import controller, remove
from benchmarks.netlab.errors import Unavailable

ONE_WORKER = "Layout()"
LAYOUTS = tuple(f"Layout({axis})" for axis in ("shard=2", "shard=4", "tensor=2", "pipeline=2", "pipeline=4"))
LIMITED = ("Layout(shard=4)", "Layout(pipeline=4)")
UNEVEN = 4 / 3  # what a worker may hold, over an even part
THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}  # bytes; what glibc begins with, and else raises as it goes
NOTHING = 16  # the width of a model that weighs almost nothing


@dataclass(frozen=True)
class Size:
    """The GPT that is trained: about ``12 * layers * width ** 2`` parameters, 16 bytes each in all."""

    layers: int
    width: int

    @property
    def empty(self) -> Size:
        """As many layers of almost nothing."""
        return Size(self.layers, NOTHING)


def run(layout: str, size: Size, groups: Path | None = None, limit_bytes: int = 0) -> dict[str, Any]:
    """One run; what `scripts/layout_memory_probe.py` reports."""
    options = [f"--layout={layout}", f"--layers={size.layers}", f"--width={size.width}"]
    if groups is not None:
        options += [f"--groups={groups}", f"--limit-bytes={limit_bytes}"]
    return harness.run(
        [str(BIN / "python"), str(SCRIPTS / "layout_memory_probe.py"), *options], timeout_seconds=900.0
    ).report


@dataclass(frozen=True)
class Figure:
    """One layout in one repeat, in bytes of the worker that has most.

    Args:
        state: parameters, gradients and optimizer state.
        tensors: all tensors there are after the last step.
        peak: the most memory ever taken, above `fixed`, which is that of a model of almost nothing.
    """

    state: int
    tensors: int
    peak: int
    fixed: int
    loss: float

    @staticmethod
    def of(full: Mapping[str, Any], empty: Mapping[str, Any]) -> Figure:
        workers = full["workers"]
        kinds = ("parameters", "gradients", "optimizer")
        return Figure(
            state=max(sum(worker[kind] for kind in kinds) for worker in workers),
            tensors=max(worker["tensors"] for worker in workers) - max(w["tensors"] for w in empty["workers"]),
            peak=full["peak_rss_bytes"] - empty["peak_rss_bytes"],
            fixed=empty["peak_rss_bytes"],
            loss=full["loss"],
        )


def measure(layout: str, size: Size) -> Figure:
    """Of one layout."""
    return Figure.of(run(layout, size), run(layout, size.empty))


def claims(figures: Mapping[str, Sequence[Figure]]) -> list[Verdict]:
    """What every layout holds, against the parameters, gradients and optimizer state of one worker."""
    whole = [figure.state for figure in figures[ONE_WORKER]]
    verdicts = []
    for layout in LAYOUTS:
        share = UNEVEN / int(layout[-2])
        for what, of in WHAT.items():
            claim = Claim(f"{layout}: {what}", share, at_least=False)
            held = [of(figure) / 1e6 for figure in figures[layout]]
            verdicts.append(Verdict(claim, "state of one worker", "MB", held, [w / 1e6 for w in whole]))
    return verdicts


WHAT: dict[str, Callable[[Figure], int]] = {
    "parameters, gradients, optimizer": lambda figure: figure.state,
    "peak of all memory, above that of an empty model": lambda figure: figure.peak,
}


@contextmanager
def groups(kind: str = "memory") -> Iterator[Path]:
    """A control group of the controller `kind` for those of the workers; what is still in them at the end is killed.

    Raises:
        Unavailable: there is no such controller, or the kernel refuses.
    """
    group = controller(kind) / f"unisono-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        raise Unavailable(f"no control group can be made: {error}") from error
    try:
        yield group
    finally:
        for child in [path for path in group.iterdir() if path.is_dir()]:
            remove(child)
        remove(group)


@dataclass(frozen=True)
class Trial:
    """A run under a limit.

    Args:
        killed: workers that the kernel killed for their memory.
        peak: the most that a worker's group was charged; file pages, which are given up under pressure, included.
    """

    report: Mapping[str, Any]
    limit: int
    killed: int
    peak: int

    def __str__(self) -> str:
        end = f"loss {self.report['loss']:.6f}" if "loss" in self.report else self.report["failed"]
        return f"limit {self.limit / 1e6:.0f} MB a worker: {end}; {self.killed} killed for their memory"


def limited(layout: str, size: Size, limit_bytes: int) -> Trial:
    """One run in control groups."""
    with groups() as group:
        report = run(layout, size, group, limit_bytes)
        members = [path for path in group.iterdir() if path.is_dir()]
        words = [line.split() for path in members for line in (path / "memory.oom_control").read_text().splitlines()]
        killed = sum(int(count) for word, count in words if word == "oom_kill")
        peak = max((int((path / "memory.max_usage_in_bytes").read_text()) for path in members), default=0)
    return Trial(report, limit_bytes, killed, peak)


def third(alone: Figure, fixed: int) -> int:
    """The limit in bytes: a third of what one worker needs for the model, and the fixed cost of a layout."""
    return alone.state // 3 + fixed


def trials(size: Size, figures: Mapping[str, Sequence[Figure]]) -> dict[str, Trial]:
    """Both layouts under the limit, and one worker, which gets the larger of the two limits."""
    limits = {layout: third(figures[ONE_WORKER][-1], _fixed(layout, size)) for layout in LIMITED}
    found = {layout: limited(layout, size, limit) for layout, limit in limits.items()}
    return found | {ONE_WORKER: limited(ONE_WORKER, size, max(limits.values()))}


def _fixed(layout: str, size: Size) -> int:
    """What a worker's group is charged for a model of almost nothing."""
    return limited(layout, size.empty, 0).peak


def holds(found: Mapping[str, Trial], losses: Mapping[str, float]) -> bool:
    """Whether the layouts trained, as they do without a limit, and one worker was killed."""
    trained = all(
        not found[layout].killed and abs(found[layout].report.get("loss", 0.0) - losses[layout]) < 1e-5
        for layout in LIMITED
    )
    return trained and found[ONE_WORKER].killed == 1 and "failed" in found[ONE_WORKER].report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=3)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--as-is", action="store_true", help="leave the C library's allocator as it is")
    asked = parser.parse_args(arguments)
    if not asked.as_is:
        os.environ.update(THRESHOLD)
    return judge(Size(asked.layers, asked.width), asked)


def judge(size: Size, asked: argparse.Namespace) -> int:
    """Measures, prints and records everything."""
    ways = {layout: functools.partial(measure, layout, size) for layout in (ONE_WORKER, *LAYOUTS)}
    figures = harness.interleave(ways, asked.repeats)
    verdicts = claims(figures)
    try:
        found = trials(size, figures)
    except Unavailable as missing:
        print(f"not measured under a limit: {missing}")
        found = {}
    for layout, trial in found.items():
        print(f"{layout}: {trial}")
    good = not found or holds(found, {layout: figures[layout][-1].loss for layout in LIMITED})
    details = {
        "size": vars(size),
        "as_is": asked.as_is,
        "figures": {layout: [vars(figure) for figure in each] for layout, each in figures.items()},
        "limited": {layout: vars(trial) for layout, trial in found.items()},
    }
    code = harness.conclude("layout_memory", verdicts, asked.json, **details)
    print(f"three times a worker's memory: {'PASS' if found and good else 'FAIL' if found else 'not measured'}")
    return code or (0 if good else 1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main())
