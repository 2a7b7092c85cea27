# SPDX-License-Identifier: Apache-2.0
"""The reproduction's figures and page, drawn from invented results by the real code."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from fedvitals.plot.svg import for_page
from fedvitals_studies.reproduce.claims import REHEARSED
from fedvitals_studies.reproduce.conditions import BY_NAME, CONDITIONS
from fedvitals_studies.reproduce.extra_conditions import BEYOND_FIGURES, over_repeats
from fedvitals_studies.reproduce.figures import FIGURES, draw
from fedvitals_studies.reproduce.page import STUDIED, write_page
from fedvitals_studies.reproduce.plot import POINTS, Line, Panel, data_of, svg_of
from fedvitals_studies.reproduce.results import KNOWN_GTSRB, Results
from support import invented_results as invented
from support.conditions import holds_for_each

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
ALL = (*FIGURES, *BEYOND_FIGURES)


@pytest.fixture(scope="module")
def results():
    return Results(invented.all_results(3))


@pytest.fixture(scope="module")
def folder(results, tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    write_page(place, results)
    return place


def test_the_papers_figures_are_all_there():
    assert [figure.number for figure in FIGURES] == list(range(6, 30))
    assert holds_for_each(condition in BY_NAME for figure in ALL for condition in figure.conditions)


@pytest.mark.parametrize("figure", ALL, ids=lambda figure: figure.name)
def test_a_figure_is_small_whole_and_carries_its_facts(figure, folder):
    text = (folder / "figures" / f"{figure.name}.svg").read_text(encoding="utf-8")
    assert len(text.encode()) < 150_000
    root = ET.fromstring(text)
    assert root.tag.endswith("svg")
    assert root[0].text == figure.title
    assert "nothing measured" not in text
    facts = json.loads((folder / "figures" / f"{figure.name}.json").read_text(encoding="utf-8"))
    assert set(facts["repeats"]) == set(figure.conditions)
    assert set(facts["repeats"].values()) == {3}
    assert (facts["datasets"], facts["digests"], facts["commits"]) == (["synthetic"], ["invented"], [invented.COMMIT])
    assert facts["clients"]
    assert facts["rounds"]
    assert facts["objections"]
    assert holds_for_each(line["mean"] for panel in facts["panels"] for line in panel["lines"])
    assert holds_for_each(panel["lines"] for panel in facts["panels"])


def few(results, *names):
    return Results(run for name in names for run in results.of(name))


@pytest.mark.thorough
def test_the_same_results_give_the_same_bytes(results, tmp_path):
    some = few(results, "extended-hierarchical-exploding", "extended-hierarchical-vanishing", "sensitivity-slope")
    for name in ("first", "second"):
        write_page(tmp_path / name, some)
    files = sorted(path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*.*"))
    assert len(files) > 15
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file


def test_figures_show_the_plotted_numbers(results):
    facts = draw(FIGURES[0], results).facts
    (line,) = [line for line in facts["panels"][0]["lines"] if line["label"] == "rings"]
    runs = results.stack("initial-rings-unclipped", "server.accuracy")
    np.testing.assert_allclose(line["mean"], runs.mean(0))
    np.testing.assert_allclose(line["low"], runs.min(0))
    assert list(line["x"]) == list(range(1, 26))


def test_gsc_has_0_as_its_own_level(results):
    """All of vanishing lies on one height, below every power of ten, and the tick there says 0."""
    figure = next(figure for figure in FIGURES if figure.number == 18)
    svg = draw(figure, results).svg
    assert re.search(r">0</text>", svg)
    assert re.search(r">10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+</text>", svg)
    names = [panel["title"] for panel in draw(figure, results).facts["panels"]]
    assert ["scale.gsc" in names[0], "scale.sensitivity" in names[1]] == [True, True]


def test_a_long_line_keeps_its_lowest_and_highest_points():
    values = np.sin(np.arange(5000.0))
    values[1234], values[4321] = 50, -50
    (panel,) = data_of([Panel("long", (Line("a", values[None], "#000000"),), "y")])
    line = panel["lines"][0]
    assert len(line["x"]) <= POINTS
    assert (max(line["mean"]), min(line["mean"])) == (50, -50)
    assert line["points"] == 5000


@pytest.mark.parametrize("scale", ["linear", "share", "log", "auto"])
@pytest.mark.parametrize(
    "values", [[np.nan] * 4, [0.0] * 4, [1.0, np.nan, 1e12, np.nan], [np.inf, -1.0, 2.0, 0.0], [3.0]], ids=str
)
def test_whatever_was_measured_can_be_drawn(scale, values):
    line = Line("a & b", np.array([values, values]), "#0072B2")
    ET.fromstring(svg_of([Panel("odd <values>", (line,), "y", scale=scale, runs=True)], "odd <values> & more"))


def test_on_a_page_ink_is_the_readers(results):
    svg = draw(FIGURES[0], results).svg
    assert 'fill="#fff"' in svg
    shown = for_page(svg)
    assert 'class="paper"' not in shown
    assert "currentColor" in shown
    assert "#222222" not in shown


class Checker(HTMLParser):
    """Every tag closed in order, nothing fetched, no script; counts pictures."""

    VOID = ("meta", "br", "use", "path", "rect")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.fetched = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.fetched += [v for k, v in attributes if k in {"src", "href", "xlink:href"} and v and not v.startswith("#")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_html_page_needs_nothing_else(folder):
    text = (folder / "index.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.fetched == []
    assert checker.seen.count("figure") == len(ALL)
    assert "script" not in checker.seen
    assert "prefers-color-scheme:dark" in text
    anchors = re.findall(r'<a href="#([^"]+)"', text)
    assert anchors
    assert set(anchors) <= set(re.findall(r'id="([^"]+)"', text))


def test_the_pages_say_first_what_they_are(folder):
    for name in ("README.md", "index.html"):
        text = (folder / name).read_text(encoding="utf-8")
        contents, heading = text.index("Figure 6: "), text.rindex("Figure 6: ")  # the table of contents comes first
        assert text.index("rehearsal, not a reproduction") < contents
        assert text.index("would be reproduced") < heading
        assert "the data set is synthetic, not GTSRB" in text
    markdown = (folder / "README.md").read_text(encoding="utf-8")
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", markdown):
        assert (folder / picture).exists()
    assert markdown.count("![") == len(ALL)
    assert "3 repeats · 100 clients · 50 rounds" in markdown
    for title in ("Where the paper is silent", "What each metric costs", "Bytes to and from the server", "All runs"):
        assert title in markdown


def as_gtsrb(result):
    return {**result, "dataset": "gtsrb", "digest": KNOWN_GTSRB[0]}


@pytest.mark.thorough
def test_only_gtsrb_with_100_clients_is_called_a_reproduction(tmp_path):
    studied = [condition for condition in CONDITIONS if condition.name in STUDIED]
    runs = [as_gtsrb(invented.measure(condition, 0)) for condition in studied]
    outcome = write_page(tmp_path, Results(runs))
    assert outcome.standing == "A reproduction"
    assert "rehearsal" not in (tmp_path / "README.md").read_text(encoding="utf-8").split("## How to run it again")[0]
    assert outcome.counts["reproduced"] > 20
    assert outcome.counts["not run"] == 3  # what needs two repeats


@pytest.mark.parametrize("changed", [{"dataset": "digits"}, {"clients": 20}, {"digest": "beef"}], ids=str)
def test_one_run_that_is_not_makes_the_page_a_rehearsal(tmp_path, changed):
    names = ("initial-clustered-unclipped", "initial-centralized-unclipped")
    first, second = (as_gtsrb(invented.measure(BY_NAME[name], 0)) for name in names)
    outcome = write_page(tmp_path, Results([{**first, **changed}, second]))
    assert outcome.standing == "A rehearsal, not a reproduction"
    assert "# Gradient scale monitoring: a rehearsal" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert {verdict.word for verdict in outcome.verdicts} <= set(REHEARSED.values())


def test_a_page_of_part_of_the_study_says_what_is_missing(tmp_path):
    names = ("extended-centralized-baseline", "extended-centralized-exploding")
    runs = [as_gtsrb(invented.measure(BY_NAME[name], 0)) for name in names]
    outcome = write_page(tmp_path, Results(runs))
    assert outcome.standing == "A reproduction, 2 of 14 conditions so far"
    markdown = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "1 repeat · 100 clients · 50 rounds · gtsrb · not run: extended-centralized-vanishing" in markdown
    assert "Not run: initial-hierarchical-unclipped." in markdown
    assert not (tmp_path / "figures" / "fig07.svg").exists()
    assert (tmp_path / "figures" / "fig18.svg").exists()


def test_a_sensitivity_run_says_which_conclusions_change(results, tmp_path):
    jagged = invented.measure(invented.synthetic(BY_NAME["sensitivity-slope"]), 0)
    jagged["series"]["server.accuracy"] = [0.1 * (place % 5) for place in range(25)]
    wanted = [name for name in results.conditions if name.startswith("sensitivity-channels")]
    others = few(results, "initial-centralized-clipped", *wanted).all()
    write_page(tmp_path, Results([*others, jagged]))
    rows = (tmp_path / "README.md").read_text(encoding="utf-8").splitlines()
    (changed,) = [row for row in rows if row.startswith("| slope of LeakyReLU")]
    assert "accuracy lower by" in changed
    assert "smooth no more" in changed
    (same,) = [row for row in rows if row.startswith("| channels of the convolutions")]
    assert same.endswith("| unchanged |")


def test_numbers_are_worded_with_their_range():
    assert over_repeats([0.5]) == "0.5"
    assert over_repeats([0.5, 0.7]) == "0.6 (0.5 to 0.7)"
    assert over_repeats([]) == "–"
    assert over_repeats([np.nan]) == "none"
    assert over_repeats([np.inf, np.inf]) == "∞"
    assert over_repeats([-1e-8]) == "−1e−8"
