"""Plots loss curves into an image file, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from unisono.errors import InvalidInput, UnisonoError
from unisono.plan.simulation import Forecast

KINDS = (".png", ".svg", ".pdf")
_MEGABYTE = 1e6


def check(field: str, path: str) -> Path:
    """Check the path of the image, and return it.

    Raises:
        InvalidInput: the image format is unknown, there is no such directory, or matplotlib is not installed.
    """
    file = Path(path).absolute()
    if file.suffix.lower() not in KINDS:
        raise InvalidInput(field, path, "not a supported image format", f"end it with {' or '.join(KINDS)}")
    if not file.parent.is_dir() or file.is_dir():
        problem = "this is a directory" if file.is_dir() else f"there is no directory {file.parent}"
        raise InvalidInput(field, path, problem, "create it, or name another file")
    if find_spec("matplotlib") is None:
        raise InvalidInput(
            field, path, "plotting needs matplotlib, which is not installed", "pip install 'unisono[plot]'"
        )
    return file


def draw(path: Path, title: str, forecasts: Mapping[str, Forecast]) -> None:
    """Plot loss over time and over bytes, side by side.

    Raises:
        UnisonoError: `path` cannot be written.
    """
    from matplotlib.figure import Figure  # its import takes half a second

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    over_time, over_bytes = figure.subplots(1, 2, sharey=True)
    for name, forecast in forecasts.items():
        losses = [point.loss for point in forecast.points]
        over_time.plot([point.seconds for point in forecast.points], losses, label=name, linewidth=1.2)
        over_bytes.plot([point.bytes / _MEGABYTE for point in forecast.points], losses, label=name, linewidth=1.2)
    over_time.set(xlabel="seconds", ylabel="training loss")
    over_bytes.set(xlabel="MB sent by each worker")
    for axes, ends in (
        (over_time, [forecast.seconds for forecast in forecasts.values()]),
        (over_bytes, [forecast.bytes_per_worker for forecast in forecasts.values()]),
    ):
        axes.grid(alpha=0.3)
        if min(ends) > 0 and max(ends) / min(ends) > 8:
            axes.set_xscale("log")
    over_time.legend(loc="upper right")
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UnisonoError(f"the plot was not written to {path}: {error.strerror}") from error
