# SPDX-License-Identifier: Apache-2.0
"""Pictures of runs: each draws, says what is missing, and takes names for what they are."""

import re
import subprocess
import sys
import warnings
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")

from fedvitals import plot
from fedvitals.errors import ConfigError, FedvitalsError
from fedvitals.measurements import stamped
from fedvitals.plot.style import words
from fedvitals.plot.svg import for_page, svg_of
from fedvitals.records import Metric, Run, Where
from fedvitals.store import open_reader, open_store
from fedvitals.views.cases import case_key, cases_of
from support import overview_run
from support import plotted_runs as pictured

SVG = "{http://www.w3.org/2000/svg}"
OF_A_RUN = (
    "learning", "gsc", "layers", "gradient_flow", "clients", "cohort", "waterfall", "phases", "traffic", "update_map",
    "similarity", "topology",
)  # fmt: skip


@pytest.fixture(scope="session")
def store(session_folder):
    return pictured.write(session_folder / "pictured.db")


def texts(figure, key="x"):
    """What stands in a picture, letter for letter."""
    svg = svg_of(figure, "a picture", key)
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")], svg


def test_every_picture_of_the_package_is_tested():
    others = {"client", "finding", "compare", "adapters"}  # the last in tests/dashboard/test_adapters.py
    assert {*OF_A_RUN, *others} == set(plot.__all__)


def test_only_pictures_are_listed():
    assert set(dir(plot)) == set(plot.__all__)


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_picture_shows_the_run(name, store):
    figure = getattr(plot, name)(pictured.FULL, store=store)
    said, svg = texts(figure)
    assert len(said) > 3
    assert not any("No " in text or "not measured" in text for text in said)
    assert len(svg) < 150_000
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook asks for


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*OF_A_RUN, "adapters"])
def test_an_empty_run_gives_a_figure_that_says_so(name, store):
    said, _ = texts(getattr(plot, name)(pictured.EMPTY, store=store))
    assert re.search(r"No |not |no |Neither", " ".join(said))


@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_A_RUN)
def test_hostile_names_are_only_text(name, store):
    """Neither markup, nor mathematics, nor control characters; and no warning but about letters that a font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph|.*glyph")
        figure = getattr(plot, name)(pictured.HOSTILE, store=store)
        figure._repr_png_()
    said, svg = texts(figure)
    assert "<script" not in svg
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", svg)
    if name in {"clients", "similarity", "topology", "waterfall"}:
        joined = " ".join(said)
        assert r"$\frac{" in joined  # letter for letter: neither parsed nor with our backslash
        assert r"\$" not in joined
        assert "<scrip" in joined  # a long name is cut in its middle


@pytest.mark.thorough
def test_a_client_against_its_cohort(store):
    said, _ = texts(plot.client(pictured.FULL, "c3", store=store))
    assert {"loss", "update norm", "gradient scale (GSC)", "c3"} <= set(said)
    plot.client(pictured.HOSTILE, pictured.NAMES[1], store=store)


@pytest.mark.thorough
def test_a_findings_evidence_by_key_and_by_case(store):
    with open_reader(store) as reader:
        found = cases_of(reader, pictured.FULL)
        for case in (*found, *cases_of(reader, pictured.HOSTILE)):
            run = case.newest.where.run
            by_case, by_key = (texts(plot.finding((reader, run), which))[1] for which in (case, case_key(case)))
            assert by_case == by_key
        worst = texts(plot.finding((reader, pictured.FULL)))[1]
        assert worst == texts(plot.finding((reader, pictured.FULL), found[0]))[1]  # for want of a key
    assert found
    said, _ = texts(plot.finding(pictured.EMPTY, store=store))
    assert "Nothing was found in this run." in said


@pytest.mark.thorough
def test_runs_on_one_axis(store):
    said, _ = texts(plot.compare([pictured.FULL, pictured.HOSTILE], store=store))
    assert any(text.startswith("A synthetic") for text in said)
    several, _ = texts(plot.gsc(pictured.FULL, pictured.HOSTILE, store=store))
    assert "synthetic" in several
    assert "0" in several  # the level of its own


def test_zero_lies_below_every_power_of_ten(store):
    """0 on the log axis of the gradient scale is a level, not a gap; and the reading is named."""
    figure = plot.gsc(pictured.FULL, store=store)
    axes = figure.axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "0"
    assert labels[1].startswith("10")
    assert axes.get_title(loc="left").startswith("gradient scale (GSC) = ")


def test_one_client_is_no_median(tmp_path):
    """Where fewer than three clients told, the line breaks and points stand for them; the note counts who told."""
    told = {0: [2.0, 2.1, 2.2, 2.3], 1: [1.5, 1.6, 1.7], 2: [9.0], 3: [1.0, 1.1, 1.2]}
    records = [Run("r", "few", started=1.0)]
    records += [
        Metric(Where("r", number, f"c{client}"), 2.0 + number, "loss", value)
        for number, values in told.items()
        for client, value in enumerate(values)
    ]
    sink = open_store(tmp_path / "few.db")
    sink.write([stamped(record, "test", place + 1) for place, record in enumerate(records)])
    sink.close()
    figure = plot.learning("few", store=tmp_path / "few.db")
    (axes,) = figure.axes
    lines = [[float(y) for y in one.get_ydata()] for one in axes.lines]
    assert [9.0] in lines  # a point of its own
    assert not any(9.0 in heights and len(heights) > 1 for heights in lines)
    said, _ = texts(figure)
    assert "median client" in said  # at the line itself
    assert "band: loss, measured on 1 to 4 of 4 clients" in said


def test_cells_tell_not_there_from_nan(store):
    """A client that took no part is hatched, one that told NaN is black with a mark."""
    figure = plot.clients(pictured.HOSTILE, "loss", store=store)
    cells = figure.axes[1]
    (image,) = cells.get_images()
    pixels = image.get_array()
    assert (pixels[..., :3].max(axis=-1) == 0).sum() == 1  # the one NaN
    assert cells.patch.get_hatch()
    sparse = plot.clients(pictured.FULL, "scale.gsc", store=store).axes[1].get_images()[0].get_array()
    assert (sparse[..., 3] == 255).all()


@pytest.mark.thorough
def test_the_same_run_gives_the_same_bytes(store):
    one, two = (svg_of(plot.learning(pictured.FULL, store=store), "t", "k") for _ in range(2))
    assert one == two
    other = svg_of(plot.learning(pictured.FULL, store=store), "t", "other")
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for name in re.findall(r'(?:href="|url\()#([^")]+)', one):
        assert name in ids[0]  # whatever is referred to is there
    assert "currentColor" in for_page(one)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: plot.learning("nobody", store=s), "Unknown run 'nobody'"),
        (lambda s: plot.learning(7, store=s), "A run is a name"),
        (lambda s: plot.clients(pictured.FULL, "los", store=s), "Did you mean 'loss'"),
        (lambda s: plot.cohort(pictured.FULL, "los", store=s), "Unknown vital sign"),
        (lambda s: plot.client(pictured.FULL, "c99", store=s), "Unknown client"),
        (lambda s: plot.layers(pictured.FULL, "grad", store=s), "Unknown family"),
        (lambda s: plot.layers(pictured.FULL, "gradient", "l3", store=s), "Unknown statistic"),
        (lambda s: plot.waterfall(pictured.FULL, 99, store=s), "no round 99"),
        (lambda s: plot.topology(pictured.FULL, 99, store=s), "no round 99"),
        (lambda s: plot.finding(pictured.FULL, "X~~~", store=s), "no finding"),
        (lambda s: plot.gsc(store=s), "needs a run"),
        (lambda s: plot.gsc(pictured.FULL, reading="gsc", store=s), "Unknown reading"),
        (lambda s: plot.compare(pictured.FULL, store=s), "at least two"),
        (lambda s: plot.compare([pictured.FULL, pictured.FULL], store=s), "needs two runs"),
        (lambda s: plot.learning(pictured.FULL, store=f"{s}.gone"), "There is no store"),
    ],
)
def test_a_wrong_name_is_answered_with_what_there_is(call, words, store):
    with pytest.raises(FedvitalsError, match=re.escape(words)) as raised:
        call(store)
    assert isinstance(raised.value, ConfigError) or "store" in str(raised.value)


WITHOUT = """
import sys
sys.modules["matplotlib"] = None
import fedvitals as fv
try:
    fv.plot.learning("synthetic", store=sys.argv[1])
except fv.plot.canvas.MissingExtraError as error:
    print(error)
"""


@pytest.mark.thorough
def test_without_matplotlib_the_error_names_the_extra(store):
    done = subprocess.run([sys.executable, "-c", WITHOUT, store], capture_output=True, text=True, check=True)
    assert "pip install 'fedvitals[plots]'" in done.stdout


@pytest.mark.thorough
def test_nothing_of_pyplot_is_touched(store):
    code = (
        "import sys, fedvitals as fv\n"
        "fv.plot.clients('synthetic', store=sys.argv[1])._repr_png_()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, store], check=True)


def uneven(path):
    """A run whose clients are measured now and then, whose accuracy hardly moves, and whose loss ends in NaN."""
    told = [Run("uneven", "uneven", started=1.7e9)]
    for number in range(12):
        told.append(Metric(Where("uneven", number), 1.7e9 + number, "accuracy", 0.103 if number < 6 else 0.095))
        told.append(Metric(Where("uneven", number), 1.7e9 + number, "loss", 2.0 if number < 8 else float("nan")))
        asked = ("c0", "c1", "c2", "c3") if number in (0, 4) else ()
        told += [Metric(Where("uneven", number, node), 1.7e9 + number, "fit.loss_before", 2.0) for node in asked]
    with open_store(path) as sink:
        sink.write([stamped(record, "test", place + 1) for place, record in enumerate(told)])
    return path


def test_axes_are_wide_and_no_line_crosses_empty_rounds(tmp_path):
    path = uneven(tmp_path / "runs.db")
    accuracy, loss = plot.learning("uneven", store=path).axes
    low, high = accuracy.get_ylim()
    assert low >= 0
    assert high - low >= 0.1
    assert high <= 1  # 10.3 → 9.5 % is no cliff, and nothing reaches 110 %
    marks = [line for line in loss.lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in marks] == [[8, 9, 10, 11]]
    assert all(height > 0.9 for line in marks for height in line.get_ydata())  # NaN at the top, never at 0
    for axes in (*plot.cohort("uneven", "fit.loss_before", nodes=["c1"], store=path).axes, loss):
        dotted = [line for line in axes.lines if line.get_linestyle() not in ("None", "-")]
        assert dotted == []
    early = [text for text in loss.texts if text.get_text() in ("median client", "global model")]
    assert len(early) == 2
    assert all(text.arrow_patch is None for text in early)  # no leader across rounds that have no value


def test_a_long_name_keeps_its_end():
    assert words("hospital-heidelberg-radiology-node-07", 20) == "hospital-h…y-node-07"
    assert words("18418001853788474769") == "…474769"


def test_the_name_of_a_sign_is_whole_and_a_finding_begins_where_its_sentence_says(tmp_path):
    found = overview_run.finding("c3", since=4, number=7)
    cosines = [Metric(Where(overview_run.RUN, 3, f"c{i}"), 1.0, "update.cosine_mean", 0.5) for i in range(6)]
    path = overview_run.written(tmp_path / "s.db", findings=[found], more=cosines)
    axes = plot.cohort(overview_run.RUN, "update.cosine_mean", store=path).axes[0]
    assert axes.get_ylabel().split() == ["cosine", "to", "the", "other", "clients'", "updates"]
    upright = [line.get_xdata()[0] for line in axes.lines if list(line.get_ydata()) == [0, 1]]
    assert upright == [4]  # «since round 4», though it was seen in round 7 first
