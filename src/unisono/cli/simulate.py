"""``unisono simulate TASK``: what a run on another network would be like, as a table and curves."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.cli.request import Request, request
from unisono.cli.task_help import task_options
from unisono.cli.terminal import ending
from unisono.cli.train_options import given, parser
from unisono.errors import InvalidInput, UnisonoError

if TYPE_CHECKING:
    from unisono.plan import Forecast

_DESCRIPTION = """\
Train TASK on virtual workers of this process, on a made-up clock: what is learned and sent is real, how long it takes
is computed from --link, --latency and --compute. All options of unisono train hold; those that concern processes,
disks and devices mean nothing here."""
OPTIONS = {
    "--link": ("RATE", "rate of a worker's link in each direction: 100Mbit, 12.5MB/s; or one for each: 1Gbit,25Mbit "
               "[10Gbit]"),
    "--latency": ("TIME", "what the shortest message takes: 20ms; or one for each worker; on gloo "
                  "about twice the delay between hosts [50us]"),
    "--compute": ("TIME", "what forward and backward of one worker's share of a step take, which is global_batch / "
                  "workers samples: 50ms, 50ms±10%%, 40ms..80ms; or one for each worker: 50ms,50ms,170ms; auto "
                  "measures it here, on one thread [auto]"),
    "--against": ("WAY", "compare with another way: 'AllReduce()', 'DiLoCo(every=32) + Quantize(4)', 'Quantize(4)', "
                  "'LocalSGD(8) + lr=0.1'; repeatable"),
    "--plot": ("FILE", "draw loss over time and over bytes (.png, .svg or .pdf; needs matplotlib)"),
}  # fmt: skip
_WIDEST = 110  # columns of a chart
_DEFAULTS = {"--link": "10Gbit", "--latency": "50us", "--compute": "auto"}


@dataclass(frozen=True)
class SimulateRequest:
    """What is to be forecast, as the user wrote it.

    Args:
        request: as of ``unisono train``.
        options: of our own, by name; the last one of each counts.
        against: every ``--against``.
    """

    request: Request
    options: Mapping[str, str]
    against: Sequence[str]


def simulate(words: list[str]) -> int:
    """Run the words after ``unisono simulate``; 0 when everything is said.

    Raises:
        UnisonoError: what was written cannot work, or the loss diverges.
    """
    if "--help" in words or "-h" in words:
        return _help(words)
    asked = read(words)
    if asked.request.settings.get("resume"):
        raise InvalidInput("--resume", True, "a simulation writes and reads no run", "leave it out")
    from unisono.plan import plot as figure

    picture = figure.check("--plot", asked.options["--plot"]) if "--plot" in asked.options else None
    try:
        heading, forecasts = _forecasts(asked)
    except KeyboardInterrupt as error:
        # Virtual workers' threads still stand inside torch, which the interpreter's orderly end would pull away.
        said, code = ending(error)
        print(said, file=sys.stderr, flush=True)
        os._exit(code)
    _print(heading, forecasts)
    if asked.request.json:
        _write(asked.request.json, heading, forecasts)
    if picture:
        figure.draw(picture, heading, forecasts)
    return 0


def _forecasts(asked: SimulateRequest) -> tuple[str, dict[str, Forecast]]:
    """What all of it is about, in one sentence, and what every way will be like."""
    from unisono.config import FIELDS
    from unisono.observe.display import Display
    from unisono.plan import forecast
    from unisono.plan import scenarios as study
    from unisono.tasks.task import with_data

    source, (link, latency, compute) = asked.request.source, (asked.options[name] for name in _DEFAULTS)
    task = with_data(source.load(FIELDS))
    ways = study.variants(task, asked.request.settings, asked.against)
    first = next(iter(ways.values()))
    share = study.share_samples(first)
    compute = study.measured(task, first, compute)
    clusters = [study.cluster(way, link, latency, compute, share) for way in ways.values()]
    found = {}
    for (name, way), cluster in zip(ways.items(), clusters, strict=True):
        with Display(name, sys.stderr) as display:
            found[name] = forecast(task, way, cluster, partial(display.handle, 0))
    heading = (
        f"{source.name} on {first.workers} workers, links of {link} and {latency}, "
        f"{compute} for a share of {share:g} samples, global batch {first.global_batch}"
    )
    return heading, found


def _print(heading: str, forecasts: Mapping[str, Forecast]) -> None:
    from rich.console import Console

    from unisono.observe.formatting import duration
    from unisono.plan import forecast_table as table
    from unisono.plan import text_chart as chart

    console = Console(file=sys.stdout, highlight=False)
    console.print(heading, style="bold", markup=False)
    for each in table.tables(forecasts, console.width):
        console.print()
        console.print(each)
    console.print()
    over_time = {name: [(p.seconds, p.loss) for p in it.points] for name, it in forecasts.items()}
    over_bytes = {name: [(float(p.bytes), p.loss) for p in it.points] for name, it in forecasts.items()}
    width = min(console.width, _WIDEST)
    console.print(chart.chart("loss over time", over_time, duration, width=width))
    if len(forecasts) > 1:
        console.print()
        console.print(chart.chart("loss over bytes sent by each worker", over_bytes, chart.size, width=width))
        console.print()
        console.print(chart.legend(list(forecasts)))


def _write(path: Path, heading: str, forecasts: Mapping[str, Forecast]) -> None:
    from unisono.observe import write_summary

    ways = {
        name: {**asdict(it), "steps_per_second": it.steps_per_second, "points": [astuple(p) for p in it.points]}
        for name, it in forecasts.items()
    }
    try:
        write_summary(path, {"about": heading, "points": ["step", "seconds", "bytes", "loss"], "ways": ways})
    except OSError as error:
        raise UnisonoError(f"the forecast was not written to {path}: {error.strerror}") from error


def _help(words: Sequence[str]) -> int:
    task = given(_own([word for word in words if word not in ("--help", "-h")])[2]).task
    made = parser(task_options(task) if task else "")
    made.usage, made.description = "unisono simulate TASK [options]", _DESCRIPTION
    group = made.add_argument_group("simulation")
    for name, (metavar, meaning) in OPTIONS.items():
        group.add_argument(name, metavar=metavar, help=meaning)
    print(made.format_help(), end="")
    return 0


def read(words: Sequence[str]) -> SimulateRequest:
    """Our own options, and the rest as ``unisono train`` reads it.

    Raises:
        InvalidInput: an option of ours without a value; whatever ``unisono train`` refuses.
    """
    options, against, rest = _own(words)
    return SimulateRequest(request(given(rest)), options, against)


def _own(words: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Our own options, every ``--against``, and all other words."""
    options, against, rest = dict(_DEFAULTS), [], []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name not in OPTIONS:
            rest.append(word)
            continue
        if not equals and (not left or left[0].startswith("--")):
            raise InvalidInput(name, "(nothing)", "a value is missing", f"write {name} {OPTIONS[name][0]}")
        value = value if equals else left.pop(0)
        if name == "--against":
            against.append(value)
        else:
            options[name] = value
    return options, against, rest
