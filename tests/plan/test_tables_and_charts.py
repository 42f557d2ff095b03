"""Tables, curves and pictures: they fit into 80 columns whatever the figures are."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from unisono.errors import InvalidInput
from unisono.plan import Forecast, Point
from unisono.plan.forecast_table import tables
from unisono.plan.plot import check, draw
from unisono.plan.text_chart import MARKS, Axis, chart, legend, size


def made(speed: float, loss: float = 2.0) -> Forecast:
    points = tuple(Point(i + 1, speed * (i + 1), 1000 * (i + 1), loss / (i + 1)) for i in range(30))
    return Forecast(
        30, 30 * speed, speed, 0.9 * speed, 1.2 * speed, 0.9, 31_000, loss / 30, {"accuracy": 0.98}, "", points
    )


def printed(*what: object, width: int = 80) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width)
    for each in what:
        console.print(each)
    return stream.getvalue().splitlines()


WAYS = {
    "AllReduce()": made(5.2),
    "DiLoCo(every=32) + Quantize(bits=4)": made(0.1),
    "ParameterServer(servers=2, staleness=4) + TopK(density=0.01)": made(600.0),
    "LocalSGD(every=8)": made(1e-6),
    "Gossip()": made(3.0),
}


def test_every_way_stands_whole_in_80_columns() -> None:
    lines = printed(*tables(WAYS, 80))
    assert max(map(len, lines)) <= 80
    assert sum(line.count("AllReduce()") for line in lines) == 1
    whole = "".join("".join(line.split()) for line in lines)
    assert whole.count("steps/s") == 2
    assert "…" not in whole
    for mark in MARKS[:5]:
        assert mark in whole
    for figure in ("5.2s", "4.7–6.2s", "90–120ms", "31.0kB", "accuracy0.98", "5h00min"):
        assert figure in whole, figure


def test_a_wide_terminal_has_all_in_one_table() -> None:
    assert len(tables(WAYS, 140)) == 1
    assert len(tables(WAYS, 20)) == 5


def test_a_curve_goes_from_its_first_loss_to_its_last() -> None:
    lines = chart("loss", {"a": [(0.0, 4.0), (1.0, 3.0), (2.0, 2.0)]}, str, width=40, height=3).plain.splitlines()
    assert lines[0] == "loss"
    assert lines[1].startswith("4 │●")
    assert lines[2].strip().startswith("│")
    assert lines[3].startswith("2 │")
    assert lines[3].endswith("●")
    assert lines[5].split() == ["0.0", "2.0"]
    assert max(map(len, lines)) <= 40


def test_curves_of_very_different_lengths_share_a_logarithmic_axis() -> None:
    curves = {"long": [(float(i), 1.0) for i in range(1, 101)], "short": [(i / 100, 0.5) for i in range(1, 101)]}
    plain = chart("", curves, str, width=60).plain
    assert "logarithmic" in plain
    assert max(line.rfind("○") for line in plain.splitlines()) > 20


def test_the_first_of_two_lies_on_top() -> None:
    plain = chart("", {"a": [(0.0, 1.0), (1.0, 0.0)], "b": [(0.0, 1.0), (1.0, 0.0)]}, str, width=40).plain
    assert "●" in plain
    assert "○" not in plain
    assert legend(["a", "b"]).plain == "● a   ○ b"


points = st.tuples(st.floats(0, 1e9), st.floats(allow_nan=True, allow_infinity=True, width=32))


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.lists(points, min_size=1, max_size=20).map(sorted), min_size=1))
def test_any_curves_can_be_drawn(curves: dict[str, list[tuple[float, float]]]) -> None:
    text = chart("title", curves, size, width=72)
    assert isinstance(text, Text)
    assert "nan" not in text.plain


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 200), st.booleans(), st.floats(-1e7, 1e7))
def test_an_axis_has_a_cell_for_everything(a: float, b: float, cells: int, logarithmic: bool, value: float) -> None:
    axis = Axis(min(a, b), max(a, b), cells, logarithmic)
    assert 0 <= axis.cell(value) < cells
    assert axis.cell(axis.least) == 0
    assert axis.cell(axis.most) == (cells - 1 if a != b else 0)


@pytest.mark.parametrize("kind", [".png", ".svg"])
def test_a_picture_is_drawn(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = check("--plot", str(tmp_path / f"curves{kind}"))
    draw(file, "a title", WAYS)
    assert file.stat().st_size > 10_000
    if kind == ".svg":
        assert "<svg" in file.read_text()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.jpeg", "not a supported image format"),
        ("a", "not a supported image format"),
        ("no/a.png", "there is no directory"),
    ],
)
def test_where_no_picture_can_be_drawn_it_is_said_first(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=says):
        check("--plot", str(tmp_path / name))


def test_without_matplotlib_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.plan.plot.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'unisono\[plot\]'"):
        check("--plot", str(tmp_path / "a.png"))
