# SPDX-License-Identifier: Apache-2.0
"""Whatever a replay session shows can be drawn: tensors, series, tables and words; into any kind of file."""

import re
import warnings
from xml.etree import ElementTree as ET

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")

from fedvitals.errors import ConfigError
from fedvitals.plot.replay import BARS, draw
from fedvitals.plot.svg import svg_of
from fedvitals.replay.debugger.debugger_output import (
    DebuggerOutput,
    series_output,
    table_output,
    tensor_output,
    text_output,
)

EVIL = '<script>alert(1)</script>$\\frac{1}{0}$\x1b[2J"&'
SVG = "{http://www.w3.org/2000/svg}"


def texts(figure):
    svg = svg_of(figure, "a picture", "x")
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")], svg


def values():
    return np.random.default_rng(0).normal(0.5, 1, 1000).astype(np.float32)


def test_a_tensor_is_a_histogram():
    found = tensor_output("gradient of conv1", values())
    figure = draw(found)
    (axes,) = figure.axes
    heights = [patch.get_height() for patch in axes.patches]
    assert heights == [float(count) for count in found.summary.counts]
    assert sum(heights) == 1000
    said_, _ = texts(figure)
    assert any("gradient of conv1" in text for text in said_)
    assert any("norm" in text and "1000" in text for text in said_)


@pytest.mark.parametrize("odd", [np.zeros(5), np.array([np.nan, np.inf]), np.empty(0), np.float32(3), np.full(4, 1e30)])
def test_odd_tensors_are_drawn_or_said(odd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said_, _ = texts(draw(tensor_output("odd", odd)))
    assert said_


def test_a_series_has_a_line_for_each_name_and_gaps_where_nothing_is_known():
    figure = draw(
        series_output("loss of c7", [1, 2, 3, 4], {"c7": [1.0, None, 0.5, 0.25], "median": [1.0, 0.9, 0.8, 0.7]})
    )
    (axes,) = figure.axes
    drawn = [line.get_ydata() for line in axes.lines if len(line.get_ydata()) == 4]
    assert len(drawn) == 2
    assert np.isnan(drawn[0][1])
    assert {"c7", "median"} <= set(texts(figure)[0])


def test_more_than_eight_lines_are_a_band():
    many = {f"c{i}": [float(i), float(i + 1), None] for i in range(30)}
    figure = draw(series_output("all of them", [0, 1, 2], many))
    (axes,) = figure.axes
    assert len([line for line in axes.lines if len(line.get_ydata()) == 3]) == 8
    assert len(axes.collections) == 1
    assert any("22 more" in text for text in texts(figure)[0])


def test_a_table_is_bars_of_its_first_column_of_numbers():
    found = table_output(
        "diff", ["layer", "round", "norm", "note"], [["a", 1, 2.5, "x"], ["b", 1, -1.0, ""], ["c", 1, None, ""]]
    )
    figure = draw(found)
    (axes,) = figure.axes
    assert [patch.get_width() for patch in axes.patches] == [2.5, -1.0, 0.0]
    said_, _ = texts(figure)
    assert {"a", "b", "c", "2.5", "–"} <= set(said_)
    assert any("norm" in text for text in said_)


@pytest.mark.thorough
def test_of_a_long_table_some_rows_are_drawn_and_that_is_said():
    figure = draw(table_output("long", ["n", "v"], [[f"c{i}", float(i)] for i in range(1000)]))
    assert len(figure.axes[0].patches) == BARS
    assert any(f"{BARS} of 1000 rows" in text for text in texts(figure)[0])


@pytest.mark.parametrize(
    "shown",
    [
        text_output("where", "round 12"),
        table_output("names", ["a"], [["x"]]),
        table_output("none", ["a"], []),
        series_output("none", [], {}),
        DebuggerOutput("bare", "tensor"),
        series_output("nan", [1.0], {"x": [float("nan")]}),
    ],
    ids=lambda shown: shown.title,
)
def test_what_has_no_picture_is_said_in_words(shown):
    said_, _ = texts(draw(shown))
    assert any(shown.title in text for text in said_)


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ["png", "svg", "pdf", "html"])
@pytest.mark.parametrize(
    "shown",
    [tensor_output(EVIL, values(), EVIL), series_output(EVIL, [1, 2], {EVIL: [1.0, 2.0]}, x_name=EVIL, y_name=EVIL),
     table_output(EVIL, [EVIL, "norm"], [[EVIL, 1.0]], EVIL), text_output(EVIL, EVIL, EVIL)],
    ids=["tensor", "series", "table", "text"],
)  # fmt: skip
def test_files_of_every_kind_and_names_that_are_only_text(shown, ending, tmp_path):
    path = tmp_path / f"picture.{ending}"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph|.*glyph")
        draw(shown, path)
    content = path.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF", "html": b"<!doctype html>"}[ending])
    if ending in ("svg", "html"):
        text = content.decode()
        assert "<script" not in text
        assert not re.search(r"[\x00-\x08\x0b-\x1f]", text.replace("\n", ""))
        assert "http://" not in text.replace("http://www.w3.org", "")
    if ending == "html" and shown.kind != "text":
        assert "<table>" in content.decode()


def test_the_same_data_give_the_same_bytes(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw(series_output("loss", [1, 2], {"c7": [1.0, 2.0]}), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_another_ending_is_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(ConfigError, match="png, svg, pdf, html"):
        draw(text_output("x"), tmp_path / "x.gif")
    assert not [*tmp_path.iterdir()]
