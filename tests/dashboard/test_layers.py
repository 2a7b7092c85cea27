# SPDX-License-Identifier: Apache-2.0
"""The page of layers: statistics through the depth and over the rounds, against numbers that are known beforehand."""

import base64
from typing import get_args

import numpy as np
import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.pages.ridges import distribution
from fedvitals.dashboard.routes.layers import Family, Statistic
from fedvitals.errors import ConfigError
from fedvitals.records import Layer, LayerStats, LayerTable, Metric, Where
from fedvitals.stats import EXPONENTS, LOWEST_EXPONENT
from fedvitals.store import open_reader
from fedvitals.store.read import layer_history as history_module
from fedvitals.store.read.layer_history import layer_history
from fedvitals.views.layers import FAMILIES, WORDS, chosen_rounds, layers_page
from support.dashboard_server import judge, ready, serve
from support.timed_run import STARTED, begin, stored

HOME = "http://127.0.0.1:8321"
HOSTILE = "<img src=x onerror=alert(1)>"
NAMES = ("conv.weight", "conv.bias", "mid.weight", "head.weight")
TABLE = LayerTable("parameter", tuple(Layer(name, (4, 4) if "weight" in name else (4,), "float32") for name in NAMES))
MODULES = LayerTable("module", (Layer("conv", (4,), "float32"), Layer("relu", (4,), "float32")))


def sums(values):
    """The nine sums of each layer's values."""
    rows = []
    for one in values:
        v = np.asarray(one, float)
        fine = v[np.isfinite(v)]
        ends = (fine.min(), fine.max()) if len(fine) else (np.inf, -np.inf)
        rows.append(
            [
                len(v),
                fine.sum(),
                (fine**2).sum(),
                np.abs(fine).sum(),
                *ends,
                (v == 0).sum(),
                np.isnan(v).sum(),
                np.isinf(v).sum(),
            ]
        )
    return np.array(rows)


def gradients(number, node):
    """The head has the largest, the first layer the smallest; a client's are twice the federation's."""
    factor = (1.0 + number) * (1.0 if node is None else 2.0)
    return [[factor * size, -factor * size / 2] for size in (0.001, 0.5, 0.01, 0.1)]


def layered(name="deep", rounds=20, deep=True, table=TABLE, change=None):
    run = begin(name, name)
    object.__setattr__(run.run, "tables", (table, MODULES))
    for number in range(rounds):
        run.round({"c0": (1.0, 1.0, 1.0), "c1": (1.0, 1.0, 1.0)})
        for node in (None, "c0", "c1"):
            where = Where(name, number, node)
            values = gradients(number, node)
            if change:
                values = change(number, node, values)
            run.add(LayerStats(where, run.at, "gradient", sums(values), table.digest))
            if node:
                run.add(Metric(where, run.at, "scale.gsc", 0.1 * (number + 1)))
            if deep:
                counts = np.zeros((len(table.layers), 2 * EXPONENTS))
                counts[:, EXPONENTS - LOWEST_EXPONENT - 60 + number % 2] = 3.0  # positive
                counts[:, -LOWEST_EXPONENT - 3] = 1.0  # negative, 2^-3
                run.add(LayerStats(where, run.at, "gradient.histogram", counts, table.digest))
                health = np.array([[10.0, 1.0 + number % 3, 2.0, 5.0], [10.0, 5.0, 0.0, 5.0]])
                run.add(LayerStats(where, run.at, "activation.health", health, MODULES.digest))
    return run


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("layers") / "runs.db", layered(), layered("plain", deep=False))


@pytest.fixture
def reader(store):
    with open_reader(store) as reader:
        yield reader


def values_of(grid):
    return np.frombuffer(base64.b64decode(grid.values), "<f4").reshape(len(grid.rows), len(grid.columns))


def test_the_profile_goes_from_the_first_weight_to_the_last(reader):
    page = layers_page(reader, "deep", statistic="absmax")
    assert page.profile.layers == ("conv.weight", "mid.weight", "head.weight")
    assert page.weights_only
    assert (page.profile.lines[0].round, page.profile.lines[-1].round) == (0, 19)
    assert len(page.profile.lines) == 12
    assert page.profile.lines[0].values == pytest.approx([0.001, 0.01, 0.1])
    assert page.profile.lines[-1].values == pytest.approx([0.02, 0.2, 2.0])
    assert layers_page(reader, "deep", every_layer=True).profile.layers == NAMES


def test_one_client_has_its_own_numbers(reader):
    page = layers_page(reader, "deep", statistic="absmax", node="c1")
    assert page.profile.lines[0].values == pytest.approx([0.002, 0.02, 0.2])
    with pytest.raises(ConfigError, match="node"):
        layers_page(reader, "deep", node="nobody")


def test_the_heat_map_is_layers_by_rounds(reader):
    grid = layers_page(reader, "deep", statistic="absmax").grid
    assert grid.rows == NAMES
    assert grid.columns == tuple(range(20))
    assert values_of(grid)[:, 4] == pytest.approx([0.005, 2.5, 0.05, 0.5])
    part = layers_page(reader, "deep", statistic="absmax", first=3, last=5).grid
    assert part.columns == (3, 4, 5)


def test_average_gradients_are_signed_and_not(reader):
    found = layers_page(reader, "deep").averages
    first = found.layers[0]
    assert first.layer == "conv.weight"
    assert first.mean[0] == pytest.approx(0.00025)
    assert first.magnitude[0] == pytest.approx(0.00075)
    assert found.total == 3


def test_dead_and_saturated_units(reader):
    dead, saturated = layers_page(reader, "deep").health
    assert (dead.title, dead.grid.rows) == ("dead units", ("conv", "relu"))
    assert values_of(dead.grid)[:, 2] == pytest.approx([0.3, 0.5])
    assert values_of(saturated.grid)[:, 0] == pytest.approx([0.2, 0.0])


def test_what_was_not_measured_is_said(reader):
    deep, plain = layers_page(reader, "deep"), layers_page(reader, "plain")
    assert deep.missing == ()
    assert any("Dead and saturated" in text for text in plain.missing)
    assert plain.health == ()
    measured = {one.name: one.measured for one in plain.scales}
    assert measured == {"scale.gsc": True, "scale.sensitivity": False, "nonlinearity.nlc": False}


def test_the_headline_says_how_the_gradient_flows(reader):
    headline = layers_page(reader, "deep").headline
    assert "In round 19" in headline
    assert "100 times the smallest, in conv.weight" in headline
    assert "In round 3 " in layers_page(reader, "deep", selected=3).headline


def dying(number, node, values):
    return [[0.0, 0.0], *values[1:]] if number > 2 else values


def breaking(number, node, values):
    return [*values[:-1], [np.nan, 1.0]] if number > 2 else values


@pytest.mark.parametrize(
    ("change", "words"),
    [(dying, "does not reach 1 of 3 weights (conv.weight)"), (breaking, "not finite in 1 of 3 weights (head.weight)")],
)
def test_a_dead_or_broken_gradient_is_the_headline(tmp_path, change, words):
    with open_reader(stored(tmp_path / "ill.db", layered("ill", rounds=5, change=change))) as reader:
        assert words in layers_page(reader, "ill").headline


def test_a_layer_without_any_finite_value_is_not_hidden(tmp_path):
    def change(number, node, values):
        return [*values[:-1], [np.nan, np.nan]] if number == 3 else values

    with open_reader(stored(tmp_path / "nan.db", layered("nan", rounds=5, change=change))) as reader:
        grid = layers_page(reader, "nan").grid
    state = np.frombuffer(base64.b64decode(grid.state), np.uint8).reshape(4, 5)
    assert state[3].tolist() == [0, 0, 0, 3, 0]


def test_the_selected_round_is_among_the_lines():
    rounds = list(range(100))
    assert 37 in chosen_rounds(rounds, 37)
    assert len(chosen_rounds(rounds, 37)) == 12
    assert chosen_rounds(rounds, 37)[0] == 0
    assert chosen_rounds(rounds, 37)[-1] == 99
    assert chosen_rounds([3, 4], 9) == [3, 4]


def test_ridges_where_the_shape_is_known(reader):
    found = distribution(reader, "deep", "head.weight")
    assert found.measured
    assert found.layer == "head.weight"
    assert len(found.ridges) == 12
    assert len(found.bins) == len(found.labels) == len(found.ridges[0].heights)
    assert sum(found.ridges[0].heights) == pytest.approx(1.0)
    shares = dict(zip(found.labels, found.ridges[0].heights, strict=True))
    assert shares["−2⁻³"] == pytest.approx(0.25)
    assert list(found.bins) == sorted(found.bins)


def test_no_shape_is_made_up(reader):
    found = distribution(reader, "plain")
    assert (found.measured, found.ridges) == (False, ())
    assert 'probes="deep"' in found.note
    assert found.spread.mean[0] == pytest.approx(0.00025)
    assert found.spread.largest[0] == pytest.approx(0.001)
    nowhere = distribution(reader, "plain", "relu")
    assert "'relu' has no gradient of its own" in nowhere.note
    assert nowhere.spread is None
    assert "privacy level 3" in distribution(reader, "plain", node="server").note


def test_a_large_history_is_thinned_and_says_so(reader, monkeypatch):
    whole = layer_history(reader, "deep", "gradient")
    assert (len(whole.rounds), whole.thinned) == (20, False)
    few = layer_history(reader, "deep", "gradient", "c1", most=2000)
    assert few.thinned
    assert len(few.rounds) < 20
    assert {0, 19} <= set(few.rounds)
    assert few.total == 20
    monkeypatch.setattr(history_module, "AT_ONCE", 3)
    assert np.array_equal(layer_history(reader, "deep", "gradient").matrix, whole.matrix)


def test_the_routes_offer_what_the_view_knows():
    assert set(get_args(Family)) == set(FAMILIES)
    assert set(get_args(Statistic)) == set(WORDS)


def test_steps_and_edges_are_not_the_whole(tmp_path):
    run = layered("mixed", rounds=3)
    odd = sums([[9.0, 9.0]] * 4)
    run.add(LayerStats(Where("mixed", 1, None, 5), STARTED + 1e6, "gradient", odd, TABLE.digest))
    run.add(LayerStats(Where("mixed", 1, None, group="edge-0"), STARTED + 1e6, "gradient", odd, TABLE.digest))
    with open_reader(stored(tmp_path / "mixed.db", run)) as reader:
        page = layers_page(reader, "mixed", statistic="absmax")
    assert page.profile.lines[1].values == pytest.approx([0.002, 0.02, 0.2])


def test_answers_and_says_when_nothing_changed(store):
    with TestClient(create_app(store), base_url=HOME) as client:
        for path in ("layers", "layers/distribution", "layers?node=c1&statistic=mean&all=true&round=3"):
            first = client.get(f"/api/runs/deep/{path}")
            assert first.status_code == 200, path
            again = client.get(f"/api/runs/deep/{path}", headers={"If-None-Match": first.headers["ETag"]})
            assert again.status_code == 304, path
        for bad, status in (("statistic=beauty", 422), ("family=noble", 422), ("node=x", 404)):
            assert client.get(f"/api/runs/deep/layers?{bad}").status_code == status


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path):
    table = LayerTable("parameter", tuple(Layer(HOSTILE + name, (4, 4), "float32") for name in NAMES))
    runs = layered(), layered("plain", deep=False), layered("bad", rounds=3, table=table)
    with serve(stored(tmp_path / "runs.db", *runs)) as url:
        yield url


@pytest.mark.browser
def test_the_page_speaks_and_keeps_its_choices_in_the_address(site, page):
    ready(page, f"{site}/runs/deep/layers", "layers")
    assert "In round 19 the gradient" in page.locator(".said").inner_text()
    page.get_by_label("show").select_option("mean")
    page.wait_for_url("**statistic=mean**")
    node = page.get_by_label("node", exact=True)
    node.fill("c1")
    node.press("Enter")
    page.wait_for_url("**node=c1**")
    page.reload()
    page.wait_for_selector("html[data-ready='layers']")
    assert page.get_by_label("show").input_value() == "mean"
    assert node.input_value() == "c1"
    assert judge(page) == []


@pytest.mark.browser
def test_what_was_not_measured_is_said_on_the_page(site, page):
    ready(page, f"{site}/runs/plain/layers", "layers")
    text = page.locator("main").inner_text()
    assert "Shape not measured" in text
    assert 'Monitor(probes="deep") counts them' in text


@pytest.mark.browser
def test_a_cell_chooses_layer_and_round(site, page):
    ready(page, f"{site}/runs/deep/layers", "layers")
    page.locator("figure[data-chart='heatmap'] .chart-plot").first.click(position={"x": 300, "y": 8})
    page.wait_for_url("**layer=conv.weight**")
    assert "round=" in page.url


@pytest.mark.browser
def test_a_hostile_layer_is_text(site, page):
    ready(page, f"{site}/runs/bad/layers", "layers")
    page.wait_for_timeout(300)
    assert HOSTILE in page.locator(".said").inner_text()
    assert page.locator("main img").count() == 0
