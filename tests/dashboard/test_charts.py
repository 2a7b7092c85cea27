# SPDX-License-Identifier: Apache-2.0
"""The chart kit in a real browser: what is drawn, what the pointer and the keys do, what can be saved."""

from __future__ import annotations

import csv
import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.conditions import holds_for_each
from support.dashboard_server import judge, needs_browser
from support.gallery_server import gallery_served

pytestmark = [pytest.mark.browser, needs_browser]

DARKEST, BRIGHTEST = [0x00, 0x22, 0x4E], [0xFE, 0xE8, 0x38]  # the ends of cividis
SECTIONS = ("overview", "lines", "large", "heat", "round", "map", "layers", "topology")
CHARTS = {"accuracy": "lines", "gsc": "lines", "clients": "heatmap", "phases": "stack"}


@pytest.fixture(scope="module")
def gallery() -> Iterator[str]:
    with gallery_served() as url:
        yield url


def draw(page: Any, gallery: str, section: str) -> None:
    page.goto(f"{gallery}/?only={section}")
    page.wait_for_function("window.gallery?.ready")
    settle(page)


def settle(page: Any) -> None:
    """Until two pictures have passed: observers answer after the first, charts draw with the next."""
    page.evaluate(
        "() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(go, 30))))"
    )


def ask(page: Any, question: str, argument: Any = None) -> Any:
    """What the gallery answers (chart_gallery/asked.js)."""
    return page.evaluate(f"(given) => window.gallery.asked.{question}(given)", argument)


def move(page: Any, chart: str, at: int) -> None:
    spot = ask(page, "place", [chart, at, 0])
    page.mouse.move(spot["x"], spot["y"])


def pixel(page: Any, chart: str, at: int, y: float) -> list[int]:
    return ask(page, "pixel", [chart, at, y])[:3]


# Whether a cell of the matrix has a ring, without and with NaN in it.
RING_IN_A_MATRIX = """async () => {
  const chart = window.gallery.charts.matrix;
  const ringed = [];
  for (const cell of [0, NaN]) {
    chart.update({ rows: ["c0", "c1"], values: Float32Array.of(1, cell, 0, 1), low: -1, high: 1 });
    await new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 0));
    const { dom, box } = chart.frame;
    const ratio = dom.canvas.width / box.width;
    const inside = [box.x0 + 1.25 * box.cell, box.y0 + 0.25 * box.cell, box.cell / 2, box.cell / 2];
    const at = inside.map((p) => Math.round(p * ratio));
    const { data } = dom.canvas.getContext("2d").getImageData(...at);
    const light = (i) => Math.min(data[i], data[i + 1], data[i + 2]);
    const lights = Array.from({ length: data.length / 4 }, (_, i) => light(4 * i));
    ringed.push(Math.max(...lights) - Math.min(...lights) > 100);
  }
  return ringed;
}"""


def saved(page: Any, chart: str, entry: str, folder: Path) -> bytes:
    plot = page.locator("#main figure", has=page.locator(f".chart-title:text-is({chart!r})"))
    plot.locator(".chart-menu-button").click()
    with page.expect_download() as waiting:
        plot.get_by_role("menuitem", name=entry).click()
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path.read_bytes()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_chart_draws_without_an_error(page: Any, gallery: str, section: str) -> None:
    draw(page, gallery, section)
    assert all(ask(page, "labels"))  # even of those that are not drawn yet
    for at in range(page.locator("figure").count()):
        page.locator("figure").nth(at).scroll_into_view_if_needed()
        settle(page)
    assert holds_for_each(re.search(r"[;:,]", label) for label in ask(page, "labels"))


@pytest.mark.parametrize("page", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True)
def test_axe_has_nothing_against_the_charts(page: Any, gallery: str) -> None:
    for section in ("overview", "round", "map"):
        draw(page, gallery, section)
        assert judge(page) == []


def test_a_cell_has_the_colour_of_its_value(page: Any, gallery: str) -> None:
    draw(page, gallery, "heat")
    assert pixel(page, "logged", 31, 2.5 * 14) == DARKEST  # zero has no logarithm: the map's lowest
    draw(page, gallery, "map")
    assert page.evaluate(RING_IN_A_MATRIX) == [False, True]
    draw(page, gallery, "overview")
    assert pixel(page, "clients", 12, 3.5 * 14 - 5) == [0, 0, 0]  # NaN
    assert pixel(page, "clients", 14, 4.5 * 14 - 5) == BRIGHTEST  # +∞
    assert pixel(page, "clients", 16, 4.5 * 14 - 5) == DARKEST  # −∞
    red, green, _ = pixel(page, "clients", 9, 2.5 * 14)  # the middle of the ✕ of a failed client
    assert red > 150
    assert green < 90


def test_what_was_not_sampled_is_hatched_and_not_coloured(page: Any, gallery: str) -> None:
    draw(page, gallery, "overview")
    colours = ask(page, "greys", ["clients", 7, 7 * 14 + 2])
    assert colours["spread"] < 16  # greys only
    assert colours["kinds"] > 1  # and more than one of them


def test_a_spike_is_seen_however_far_one_zooms_out(page: Any, gallery: str) -> None:
    draw(page, gallery, "lines")
    assert ask(page, "inked", ["spike", 7001])[0] < 0.1
    assert ask(page, "inked", ["spike", 13001])[1] > 0.9
    assert re.search(r"1 of [3-6] points shown, extremes kept", page.locator("#lines").inner_text())
    draw(page, gallery, "large")
    assert pixel(page, "dense", 3002, 24) == BRIGHTEST  # one round of six thousand, in a fifth of a pixel
    assert pixel(page, "dense", 3002, 8) == DARKEST


def test_the_round_under_the_pointer_is_shown_in_all_charts(page: Any, gallery: str) -> None:
    draw(page, gallery, "overview")
    move(page, "accuracy", 20)
    settle(page)
    assert page.evaluate("window.gallery.axis.hover") == 20
    lines = ask(page, "crosshairs")
    assert len(lines) == len(CHARTS)
    assert len(set(lines)) == 1
    assert page.locator(".chart-tip").inner_text().startswith("round 20")
    readouts = page.locator(".chart-readout").all_inner_texts()
    assert all(readouts), readouts
    page.mouse.move(5, 5)
    settle(page)
    assert page.evaluate("window.gallery.axis.hover") is None
    assert page.locator(".chart-tip:visible").count() == 0


def test_a_drag_zooms_all_charts_and_a_double_click_goes_back(page: Any, gallery: str) -> None:
    draw(page, gallery, "overview")
    move(page, "accuracy", 10)
    page.mouse.down()
    move(page, "accuracy", 15)
    move(page, "accuracy", 20)
    page.mouse.up()
    settle(page)
    assert page.evaluate("window.gallery.axis.view") == [10, 20]
    assert ask(page, "views") == [[10, 20]] * len(CHARTS)
    assert page.evaluate("window.gallery.clicked") == []  # a drag is no click
    page.mouse.wheel(0, 200)  # the wheel is the page's
    settle(page)
    assert page.evaluate("window.gallery.axis.view") == [10, 20]
    page.evaluate("scrollTo(0, 0)")
    spot = ask(page, "place", ["phases", 15, 0])
    page.mouse.dblclick(spot["x"], spot["y"])
    settle(page)
    assert page.evaluate("window.gallery.axis.view") == [1, 40]
    page.wait_for_timeout(300)
    assert page.evaluate("window.gallery.clicked") == []  # nor is a double click


def test_a_click_tells_round_and_cell(page: Any, gallery: str) -> None:
    draw(page, gallery, "overview")
    for where in (["accuracy", 7, 0], ["clients", 12, 3], ["phases", 30, 0]):
        spot = ask(page, "place", where)
        page.mouse.click(spot["x"], spot["y"])
    assert page.evaluate("window.gallery.clicked") == [["round", 7], ["cell", "c2", 12], ["round", 30]]


def test_keys_move_and_are_announced(page: Any, gallery: str) -> None:
    draw(page, gallery, "overview")
    page.evaluate("window.gallery.charts.accuracy.frame.dom.plot.focus()")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("window.gallery.axis.hover") == 5
    said = page.locator("#announcer").inner_text()
    assert said.startswith("round 5, c7, ")
    assert "c7 label noise" in said
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("window.gallery.axis.hover") == 39
    page.keyboard.press("Enter")
    assert page.evaluate("window.gallery.clicked") == [["round", 39]]
    page.keyboard.press("+")
    low, high = page.evaluate("window.gallery.axis.view")
    assert high - low < 30
    assert low <= 39 <= high
    page.keyboard.press("0")
    assert page.evaluate("window.gallery.axis.view") == [1, 40]
    page.evaluate("window.gallery.charts.clients.frame.dom.plot.focus()")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.locator("#announcer").inner_text().startswith("c0, round ")
    summary = ask(page, "labels")[0]
    assert summary.startswith("Accuracy, rounds 1 to 40; last value 5")
    assert summary.endswith("3 findings marked")


def test_the_menu_is_a_menu(page: Any, gallery: str) -> None:
    draw(page, gallery, "overview")
    button = page.locator(".chart-menu-button").first
    assert button.get_attribute("aria-expanded") == "false"
    button.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    items = page.get_by_role("menuitem")
    assert items.all_inner_texts() == ["Save as SVG", "Save as PNG", "Save values as CSV"]
    page.keyboard.press("ArrowDown")
    assert items.nth(1).evaluate("node => node === document.activeElement")
    page.keyboard.press("Escape")
    assert items.count() == 0
    assert button.evaluate("node => node === document.activeElement")


def test_csv_has_every_value_exactly(page: Any, gallery: str, tmp_path: Path) -> None:
    draw(page, gallery, "overview")
    rows = list(csv.reader(io.StringIO(saved(page, "Accuracy", "CSV", tmp_path).decode())))
    stored = ask(page, "stored")
    assert rows[0] == ["series", "round", "value", "low", "high"]
    assert [row[2] for row in rows if row[0] == "c7"] == stored["line"]
    assert len(rows) == 1 + 40 + 5 * 40
    cells = list(csv.reader(io.StringIO(saved(page, "Loss of clients", "CSV", tmp_path).decode())))
    assert ["c1", "9", "9", "", "failed"] in cells
    assert ["c2", "12", "12", "", "NaN"] in cells
    assert np.float32(cells[1][3]) == np.float32(stored["cell"])


def test_names_in_csv_are_no_formulas(page: Any, gallery: str) -> None:
    draw(page, gallery, "heat")
    text = ask(page, "table", [["=1+1", "@x", 'a,"b"', -0.1, 1e-300, None]])
    assert text == '\'=1+1,\'@x,"a,""b""",-0.1,1e-300,\r\n'


@pytest.mark.parametrize(
    ("section", "title"),
    [("overview", "Accuracy"), ("overview", "Loss of clients"), ("round", "Round 12"), ("topology", "star of 20")],
)
def test_svg_needs_nothing_but_itself(page: Any, gallery: str, tmp_path: Path, section: str, title: str) -> None:
    draw(page, gallery, section)
    text = saved(page, title, "SVG", tmp_path).decode()
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    names = {node.tag.split("}")[1] for node in root.iter()}
    assert not names & {"script", "foreignObject"}
    assert "text" in names
    attributes = {name.lower() for node in root.iter() for name in node.attrib}
    assert not [name for name in attributes if name.startswith("on") or name == "class"]
    assert "var(--" not in text
    assert not re.search(r'href="(?!data:image/png|/)', text)
    words = "".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
    assert title in words


def test_a_saved_waterfall_has_its_legend(page: Any, gallery: str, tmp_path: Path) -> None:
    draw(page, gallery, "round")
    root = ET.fromstring(saved(page, "Round 12", "SVG", tmp_path).decode())
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    legend = page.locator("#main figure").first.locator(".chart-legend").all_inner_texts()
    assert legend
    for part in legend:
        assert part in words


def test_png_is_one(page: Any, gallery: str, tmp_path: Path) -> None:
    draw(page, gallery, "overview")
    assert saved(page, "Accuracy", "PNG", tmp_path).startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("section", ["lines", "heat", "round", "map", "topology"])
def test_hostile_names_are_text(page: Any, gallery: str, section: str) -> None:
    draw(page, gallery, section)
    page.evaluate("() => { for (const one of Object.values(window.gallery.charts)) one.frame.dom.plot.focus(); }")
    page.keyboard.press("ArrowRight")
    settle(page)
    assert page.evaluate("window.hurt") is None
    assert page.locator("#main img, #main script").count() == 0
    assert page.locator("[href^='javascript']").count() == 0
    assert "<img" in page.locator("#main").inner_text() or page.locator("#main text", has_text="<im").count()


def test_missing_values_part_the_line_and_nan_is_marked(page: Any, gallery: str) -> None:
    draw(page, gallery, "lines")
    seen = ask(page, "drawn", ["odd", "#0072b2"])
    assert seen["paths"][0].count("M") == 5  # NaN, missing, +∞ and −∞ each part it
    middle = page.evaluate("window.gallery.charts.odd.frame.box.x(7)")
    assert any(abs(x - middle) < 0.02 for x in seen["circles"])
    assert page.locator("#lines .chart-blank:visible").inner_text() == "Nothing was recorded for this yet."


def test_only_the_rows_in_sight_are_there_and_the_rest_is_scrolled_to(page: Any, gallery: str) -> None:
    draw(page, gallery, "large")
    scroller = page.locator("#large .chart-scroll").first
    assert 20 < scroller.locator(".chart-rows > *").count() < 60
    scroller.evaluate("node => { node.scrollTop = 12 * 500; }")
    settle(page)
    assert "c500" in scroller.locator(".chart-rows > *").all_inner_texts()
    at = scroller.bounding_box()
    page.mouse.click(at["x"] + 400, at["y"] + 6)
    assert page.evaluate("window.gallery.clicked.at(-1).slice(0, 2)") == ["cell", "c500"]


def test_live_data_extend_the_axis_and_never_move_a_zoom(page: Any, gallery: str) -> None:
    draw(page, gallery, "overview")
    ask(page, "grow", 45)
    assert page.evaluate("window.gallery.axis.view") == [1, 45]  # all was seen: all is seen
    page.evaluate("window.gallery.axis.setView(10, 20)")
    ask(page, "grow", 50)
    assert page.evaluate("window.gallery.axis.view") == [10, 20]
    assert page.evaluate("window.gallery.axis.domain") == [1, 50]


def test_a_zoom_is_in_the_address(page: Any, gallery: str) -> None:
    draw(page, gallery, "heat")
    bound = ask(page, "bound", "from=5&to=9")
    assert bound == {"first": [5, 9], "zoomed": {"from": 7, "to": 8}, "all": {"from": None, "to": None}, "left": 0}


def test_the_theme_is_followed(page: Any, gallery: str) -> None:
    draw(page, gallery, "overview")
    ink = "() => window.gallery.charts.accuracy.frame.dom.svg.querySelector('text').getAttribute('fill')"
    light = page.evaluate(ink)
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    settle(page)
    assert page.evaluate(ink) != light


def test_a_destroyed_chart_leaves_nothing(page: Any, gallery: str) -> None:
    draw(page, gallery, "overview")
    move(page, "accuracy", 20)
    page.evaluate(
        "() => { for (const one of Object.values(window.gallery.charts)) { one.update({}); one.destroy(); } }"
    )
    settle(page)
    assert page.locator("figure").count() == 0
    assert page.locator(".chart-tip:visible").count() == 0
    assert page.evaluate("window.gallery.axis.listeners.size") == 0


def test_a_chart_out_of_sight_is_not_drawn(page: Any, gallery: str) -> None:
    draw(page, gallery, "map")
    assert page.evaluate("window.gallery.charts.bigMatrix.frame.box") is None
    page.evaluate("window.gallery.charts.bigMatrix.frame.dom.figure.scrollIntoView()")
    settle(page)
    assert page.evaluate("window.gallery.charts.bigMatrix.frame.box.cell") > 0


def test_what_is_printed_is_drawn(page: Any, gallery: str) -> None:
    draw(page, gallery, "map")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("window.gallery.charts.bigMatrix.frame.box.cell") > 0


@pytest.mark.parametrize("page", [{"viewport": {"width": 390, "height": 800}}], indirect=True)
def test_nothing_is_wider_than_a_phone(page: Any, gallery: str) -> None:
    for section in SECTIONS:
        draw(page, gallery, section)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, section


def test_numbers_are_written_as_people_read_them(page: Any, gallery: str) -> None:
    draw(page, gallery, "heat")
    said = {
        ("number", 0.8712): "0.871", ("number", -1234567.8): "−1.23×10⁶", ("number", 12345): "12 345",
        ("number", 0.00012): "1.2×10⁻⁴", ("number", None): "–", ("number", math.nan): "NaN", ("number", -0.0): "0",
        ("seconds", 0.0123): "12.3 ms", ("seconds", 125): "2 min 5 s", ("seconds", 4000): "1 h 7 min",
        ("bytes", 4.1e6): "4.1 MB", ("bytes", 999_999): "1 MB", ("percent", 0.96): "96 %",
        ("percent", 9.99e-6): "< 0.001 %",
        ("withUnit", 3, "nats"): "3 nats", ("withUnit", 0.3, "share"): "30 %", ("brief", 3, "nats"): "3",
        ("exact", -0.1): "−0.1", ("ago", 100, 280): "3 min ago", ("when", math.nan): "–",
    }  # fmt: skip
    assert ask(page, "written", [list(call) for call in said]) == list(said.values())


def test_one_long_round_does_not_flatten_the_others(page, gallery):
    """A warm-up is cut off, and said to be: on its scale all other rounds would lie on the floor."""
    page.goto(gallery)
    words = page.evaluate(
        """async () => {
          const { stackChart } = await import("/static/charts/index.js");
          const host = document.createElement("div");
          document.body.prepend(host);
          const chart = stackChart(host, { title: "round time", unit: "seconds" });
          const rounds = [0, 1, 2, 3, 4, 5];
          chart.update({ rounds, parts: [{ name: "compute", values: [9, 0.2, 0.3, 0.2, 0.25, 0.2] }], note: "of it" });
          await new Promise((go) => setTimeout(go, 200));
          return host.innerText + " " + [...host.querySelectorAll("text")].map((one) => one.textContent).join(" ");
        }"""
    )
    assert "round 0 cut off" in words
    assert re.search(r"9.s", words)
    assert "6" not in re.findall(r"(\d+).s", words)  # no tick beyond what the others need


def test_a_round_that_is_cut_off_keeps_the_proportions_of_its_parts(page, gallery):
    """The other rounds fill 94 % of the height and have no wait; the round that is cut off waits for 3/4 of it."""
    page.goto(gallery)
    heights = page.evaluate(
        """async () => {
          const { stackChart } = await import("/static/charts/index.js");
          const host = document.createElement("div");
          document.body.prepend(host);
          const chart = stackChart(host, { title: "round time", unit: "seconds" });
          const parts = { compute: [10, 1, 1, 1, 1, 1], wait: [30, 0, 0, 0, 0, 0] };
          const named = Object.entries(parts).map(([name, values]) => ({ name, values }));
          chart.update({ rounds: [0, 1, 2, 3, 4, 5], parts: named });
          while (!host.querySelector("path")) await new Promise((go) => setTimeout(go, 20));
          return [...host.querySelectorAll("path")].map((bars) => bars.getBBox().height);
        }"""
    )
    wait, compute = sorted(heights)[-2:]
    assert wait / compute == pytest.approx(0.75 * 1.06, rel=0.02)


def test_long_names_keep_what_tells_them_apart(page, gallery):
    """Every name begins with «hospital-of-»: beside a matrix and beside points, the rest is shown."""
    page.goto(gallery)
    drawn = page.evaluate(
        """async () => {
          const { matrix, scatter } = await import("/static/charts/index.js");
          const rows = ["berlin", "hamburg", "munich"].map((city) => `hospital-of-${city}-radiology-department-node`);
          const texts = [], canvas = CanvasRenderingContext2D.prototype, { fillText } = canvas;
          canvas.fillText = function (text, ...rest) { texts.push(text); return fillText.call(this, text, ...rest); };
          const host = () => document.body.insertBefore(document.createElement("div"), document.body.firstChild);
          const [first, second] = [host(), host()];
          matrix(first, { title: "likeness" }).update({ rows, values: new Float32Array(9) });
          while (texts.length < 6) await new Promise((go) => setTimeout(go, 20));
          const points = rows.map((name, at) => ({ name, x: at, y: at, severity: "warning" }));
          scatter(second, { title: "map" }).update({ points });
          while (second.querySelectorAll("text").length < 3) await new Promise((go) => setTimeout(go, 20));
          return [texts, [...second.querySelectorAll("text")].map((one) => one.textContent)];
        }"""
    )
    for texts in drawn:
        for city in ("ber", "ham", "mun"):
            assert any(text.startswith(f"…{city}") for text in texts), texts
        assert not any(text.startswith("hospital") for text in texts)


def test_what_is_counted_has_no_halves(page, gallery):
    page.goto(gallery)
    ticks = page.evaluate(
        """async () => {
          const { honestEnds, linear, log } = await import("/static/charts/scales.js");
          const ends = (low, high, unit) => linear(...honestEnds(low, high, unit), 200, 0, 6, unit).ticks;
          return { events: ends(0, 1, "events"), steps: ends(9, 9, "steps"), log: log(0.6, 1.6, 200, 0).ticks };
        }"""
    )
    assert ticks["events"] == [0, 1]
    assert ticks["steps"] == [9]
    assert len(ticks["log"]) > 1  # an axis with one number says nothing
