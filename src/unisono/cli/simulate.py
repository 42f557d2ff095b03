"""``unisono simulate TASK``: forecasts a run on another network, as a table and curves."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.cli.argument_words import Others, read_pairs
from unisono.cli.merged_options import TrainRequest, build_request
from unisono.cli.task_help import task_options
from unisono.cli.terminal import interrupt_output
from unisono.cli.train_options import build_parser, parse_arguments
from unisono.errors import InvalidInput, UnisonoError

if TYPE_CHECKING:
    from unisono.plan import Forecast

_DESCRIPTION = """\
Train TASK on virtual workers in this process, with simulated time. Learning and messages are real; their duration is
computed from --link, --latency and --compute. Takes the options of unisono train; those about processes, disks and
devices have no effect."""
OPTIONS = {
    "--link": ("RATE", "rate of a worker's link in each direction: 100Mbit, 12.5MB/s; or one per worker: 1Gbit,25Mbit "
               "[10Gbit]"),
    "--latency": ("TIME", "duration of the shortest message: 20ms; or one per worker; with gloo "
                  "about twice the delay between hosts [50us]"),
    "--compute": ("TIME", "duration of forward and backward of one worker's part of a step (global_batch / workers "
                  "samples): 50ms, 50ms±10%%, 40ms..80ms; or one per worker: 50ms,50ms,170ms; auto: "
                  "measure it here, on one thread [auto]"),
    "--against": ("VARIANT", "compare with a variant: 'AllReduce()', 'DiLoCo(every=32) + Quantize(4)', 'Quantize(4)', "
                  "'LocalSGD(8) + lr=0.1'; repeatable"),
    "--plot": ("FILE", "plot loss over time and over bytes (.png, .svg or .pdf; needs matplotlib)"),
}  # fmt: skip
_MAX_WIDTH = 110  # columns of a chart
_DEFAULTS = {"--link": "10Gbit", "--latency": "50us", "--compute": "auto"}


@dataclass(frozen=True)
class SimulateRequest:
    """What the command was asked to forecast.

    Args:
        request: what to train, as ``unisono train`` reads it.
        options: the command's own options by name, each with the last value given for it.
        against: the value of every ``--against``.
    """

    request: TrainRequest
    options: Mapping[str, str]
    against: Sequence[str]


def simulate(words: list[str]) -> int:
    """Run ``unisono simulate`` with the arguments `words`; 0 when the forecast is printed.

    Raises:
        UnisonoError: the arguments are invalid, the loss diverges, or a file cannot be written.
    """
    if "--help" in words or "-h" in words:
        return _help(words)
    simulation = read_request(words)
    if simulation.request.settings.get("resume"):
        raise InvalidInput("--resume", True, "a simulation writes and reads no run", "leave it out")
    from unisono.plan import plot

    figure = plot.check("--plot", simulation.options["--plot"]) if "--plot" in simulation.options else None
    try:
        heading, forecasts = _forecasts(simulation)
    except KeyboardInterrupt as error:
        # Threads of virtual workers are inside torch, which a regular exit would unload.
        message, code = interrupt_output(error)
        print(message, file=sys.stderr, flush=True)
        os._exit(code)
    _print(heading, forecasts)
    if simulation.request.json:
        _write(simulation.request.json, heading, forecasts)
    if figure:
        plot.draw(figure, heading, forecasts)
    return 0


def _forecasts(simulation: SimulateRequest) -> tuple[str, dict[str, Forecast]]:
    """A heading for all forecasts, and the forecast of each variant."""
    from unisono.config import FIELDS
    from unisono.observe.display import Display
    from unisono.plan import forecast, scenarios
    from unisono.tasks.task import with_data

    source, (link, latency, compute) = simulation.request.source, (simulation.options[name] for name in _DEFAULTS)
    task = with_data(source.load(FIELDS))
    ways = scenarios.variants(task, simulation.request.settings, simulation.against)
    first = next(iter(ways.values()))
    share = scenarios.share_samples(first)
    compute = scenarios.measured(task, first, compute)
    clusters = [scenarios.cluster(way, link, latency, compute, share) for way in ways.values()]
    forecasts = {}
    for (name, way), cluster in zip(ways.items(), clusters, strict=True):
        with Display(name, sys.stderr) as display:
            forecasts[name] = forecast(task, way, cluster, partial(display.handle, 0))
    heading = (
        f"{source.name} on {first.workers} workers, links of {link} and {latency}, "
        f"{compute} for {share:g} samples, global batch {first.global_batch}"
    )
    return heading, forecasts


def _print(heading: str, forecasts: Mapping[str, Forecast]) -> None:
    from rich.console import Console

    from unisono.observe.formatting import duration
    from unisono.plan import forecast_table as table
    from unisono.plan import text_chart as chart

    console = Console(file=sys.stdout, highlight=False)
    console.print(heading, style="bold", markup=False)
    for forecast in table.tables(forecasts, console.width):
        console.print()
        console.print(forecast)
    console.print()
    over_time = {name: [(p.seconds, p.loss) for p in it.points] for name, it in forecasts.items()}
    over_bytes = {name: [(float(p.bytes), p.loss) for p in it.points] for name, it in forecasts.items()}
    width = min(console.width, _MAX_WIDTH)
    console.print(chart.chart("loss over time", over_time, duration, width=width))
    if len(forecasts) > 1:
        console.print()
        console.print(chart.chart("loss over bytes sent by each worker", over_bytes, chart.size, width=width))
        console.print()
        console.print(chart.legend(list(forecasts)))


def _write(path: Path, heading: str, forecasts: Mapping[str, Forecast]) -> None:
    from unisono.observe import write_summary

    variants = {
        name: {**asdict(it), "steps_per_second": it.steps_per_second, "points": [astuple(p) for p in it.points]}
        for name, it in forecasts.items()
    }
    try:
        write_summary(path, {"about": heading, "points": ["step", "seconds", "bytes", "loss"], "ways": variants})
    except OSError as error:
        raise UnisonoError(f"the forecast was not written to {path}: {error.strerror}") from error


def _help(words: Sequence[str]) -> int:
    _, rest = _split([word for word in words if word not in ("--help", "-h")])
    task = parse_arguments(rest).task
    parser = build_parser(task_options(task) if task else "")
    parser.usage, parser.description = "unisono simulate TASK [options]", _DESCRIPTION
    group = parser.add_argument_group("simulation")
    for name, (metavar, text) in OPTIONS.items():
        group.add_argument(name, metavar=metavar, help=text)
    print(parser.format_help(), end="")
    return 0


def read_request(words: Sequence[str]) -> SimulateRequest:
    """Read the command's own options, and the others as ``unisono train`` does.

    Raises:
        InvalidInput: an option has no value, or ``unisono train`` would refuse the arguments.
    """
    pairs, rest = _split(words)
    options = _DEFAULTS | {name: value for name, value in pairs if name != "--against"}
    against = [value for name, value in pairs if name == "--against"]
    return SimulateRequest(build_request(parse_arguments(rest)), options, against)


def _split(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The command's own options, and all other words."""
    return read_pairs(words, {name: metavar for name, (metavar, _) in OPTIONS.items()}, others=Others.KEEP)
