"""Draws curves in a terminal, with one character cell per point."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.filesize import decimal
from rich.text import Text

from unisono.observe.formatting import number

MARKS = "●○×+◆*"
COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")
Curve = Sequence[tuple[float, float]]
_LOGARITHMIC_FROM = 8.0  # ratio of the longest curve to the shortest, from which a linear axis would hide the shortest
_DECADES = 3.0  # the largest length of a logarithmic axis


@dataclass(frozen=True)
class Axis:
    """Maps numbers to ``0 .. cells - 1``."""

    least: float
    most: float
    cells: int
    logarithmic: bool = False

    def cell(self, value: float) -> int:
        """The cell of `value`, clipped to the axis."""
        above = value >= self.most > self.least
        least, most, value = (math.log(max(v, self.least)) if self.logarithmic else v
                              for v in (self.least, self.most, value))  # fmt: skip
        # The logarithms of neighbouring numbers may be equal.
        share = (value - least) / (most - least) if most > least else float(above)
        return min(self.cells - 1, max(0, round(share * (self.cells - 1))))


def chart(
    title: str, curves: Mapping[str, Curve], unit: Callable[[float], str], *, width: int, height: int = 12
) -> Text:
    """Draw `curves`, by name, as text of `width` columns. A column shows the mean of each curve's values in it.

    Args:
        unit: formats a number of the horizontal axis.
    """
    finite = {name: [(x, y) for x, y in curve if math.isfinite(y)] for name, curve in curves.items()}
    xs, ys = ([point[i] for curve in finite.values() for point in curve] for i in (0, 1))
    if not xs:
        return Text(f"{title}: nothing to show")
    side = max(len(number(min(ys))), len(number(max(ys))))
    across = _across([curve for curve in finite.values() if curve], max(16, width - side - 3))
    up = Axis(min(ys), max(ys), height)
    cells: dict[tuple[int, int], int] = {}
    for i, curve in reversed(list(enumerate(finite.values()))):  # the first curve is on top
        cells |= {(column, up.cell(value)): i for column, value in _means(curve, across).items()}
    made = Text.assemble((title, "bold"), "\n")
    for row in range(height - 1, -1, -1):
        edge = number(up.most) if row == height - 1 else number(up.least) if row == 0 else ""
        made.append(f"{edge:>{side}} │", style="dim")
        for column in range(across.cells):
            owner = cells.get((column, row))
            made.append(mark(owner) if owner is not None else " ")
        made.append("\n")
    left, right = unit(across.least), unit(across.most) + (", logarithmic" if across.logarithmic else "")
    made.append(f"{'':>{side}} └{'─' * across.cells}\n", style="dim")
    made.append(f"{'':>{side}}  {left}{right:>{across.cells - len(left)}}", style="dim")
    return made


def size(count: float) -> str:
    """A number of bytes as human-readable text."""
    return decimal(round(count))


def legend(names: Sequence[str]) -> Text:
    """The mark and the name of each curve."""
    return Text("   ").join(Text.assemble(mark(i), " ", name) for i, name in enumerate(names))


def mark(i: int) -> Text:
    """The mark of curve `i`."""
    return Text(MARKS[i % len(MARKS)], style=COLOURS[i % len(COLOURS)])


def _across(curves: Sequence[Curve], cells: int) -> Axis:
    ends = [curve[-1][0] for curve in curves]
    first = min((x for curve in curves for x, _ in curve if x > 0), default=0.0)
    most = max(ends)
    if min(ends) > 0 and most / min(ends) >= _LOGARITHMIC_FROM:
        return Axis(max(first, most / 10**_DECADES), most, cells, logarithmic=True)
    return Axis(0.0, most, cells)


def _means(curve: Curve, across: Axis) -> dict[int, float]:
    columns: dict[int, list[float]] = {}
    for x, y in curve:
        columns.setdefault(across.cell(x), []).append(y)
    return {column: math.fsum(values) / len(values) for column, values in columns.items()}
