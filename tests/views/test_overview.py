# SPDX-License-Identifier: Apache-2.0
"""What the overview shows, as data: buckets that keep spikes, bands, rows in order of trouble, phases, suspects."""

import base64
import math
from dataclasses import replace

import numpy as np
import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard.app import create_app
from fedvitals.errors import ConfigError
from fedvitals.records import Metric, Suspect, Where
from fedvitals.store import open_reader
from fedvitals.store.marks import set_mark
from fedvitals.views.cases import case_key, cases_of
from fedvitals.views.clients import severities
from fedvitals.views.cohort import matrix_of
from fedvitals.views.heat import client_grid, in_trouble, layer_grid, ordered
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.overview import _for_clients, _for_learning, overview
from fedvitals.views.phases import phases
from fedvitals.views.series import band, bucketed, median_series, series
from support import overview_run as charted


@pytest.fixture
def reader(tmp_path):
    path = charted.written(tmp_path / "s.db", findings=[charted.finding()], more=[charted.failed("c1", 2)])
    with open_reader(path) as reader:
        yield reader


def test_a_spike_survives_the_buckets():
    values = np.ones(1000)
    values[503] = 99.0
    found = bucketed("loss", None, "federation", list(range(1000)), values, 100)
    assert len(found.rounds) == 100
    assert max(found.high) == 99.0
    assert found.values[50] == 1.0
    assert (found.rounds[50], found.last[50], found.total) == (500, 509, 1000)


def test_a_rhythm_is_no_gap_and_a_hole_is_one():
    every_fifth = bucketed("accuracy", None, "federation", [0, 5, 10, 15], np.arange(4.0), 100)
    assert every_fifth.values == [0.0, 1.0, 2.0, 3.0]
    hole = bucketed("accuracy", None, "federation", [0, 1, 2, 7, 8], np.arange(5.0), 100)
    assert hole.values == [0.0, 1.0, 2.0, None, 3.0, 4.0]
    assert (hole.rounds[3], hole.last[3]) == (3, 6)


def test_what_is_not_finite_is_told_as_such():
    found = bucketed("loss", None, "federation", [0, 1, 2], np.array([1.0, math.nan, math.inf]), 100)
    assert found.values == [1.0, None, None]
    assert found.odd == [1, 2]


def test_nothing_measured_is_an_empty_series(reader):
    found = series(reader, charted.RUN, "nonsense", None, 10)
    assert (found.rounds, found.total) == ([], 0)
    assert phases(reader, charted.RUN, 10, first=500).rounds == []


def test_without_a_value_of_the_federation_the_median_client_stands_for_it(reader):
    matrix = metric_matrix(reader, charted.RUN, "loss")
    found = median_series("loss", matrix, 100)
    assert found.of == "median client"
    assert found.values[0] == pytest.approx(np.median(matrix.values[:, 0]), rel=1e-6)


def test_a_band_is_the_cohorts_quantiles_and_its_buckets_keep_the_extremes(reader):
    matrix = metric_matrix(reader, charted.RUN, "loss")
    found = band("loss", matrix, 100)
    column = matrix.values[:, 6][np.isfinite(matrix.values[:, 6])]
    assert found.p95[6] == pytest.approx(np.quantile(column, 0.95), rel=1e-5)
    assert found.clients == [6, 5] * 5
    joined = band("loss", matrix, 2)
    assert joined.max == pytest.approx([max(found.max[:5]), max(found.max[5:])])
    assert joined.total == 10


def test_whoever_is_in_trouble_comes_first_then_who_is_furthest_from_the_others(reader):
    grid = client_grid(reader, charted.RUN, "update.norm")
    assert grid.rows[0] == "c3"  # no outlier in this sign, but in trouble
    assert set(grid.rows[1:3]) == {"c0", "c5"}
    assert client_grid(reader, charted.RUN, "update.norm", sort="name").rows == tuple(f"c{i}" for i in range(6))
    assert client_grid(reader, charted.RUN, "update.norm", sort="value").rows[0] == "c5"


def test_who_is_in_trouble_now_comes_before_who_was(tmp_path):
    past = charted.finding("c0", number=1, severity="critical", confidence=1.0)
    now = charted.finding("c2", number=15)
    with open_reader(charted.written(tmp_path / "s.db", rounds=16, findings=[past, now])) as reader:
        assert client_grid(reader, charted.RUN, "loss").rows[:2] == ("c2", "c0")
        assert [line.node for line in overview(reader, charted.RUN).cases] == ["c2", "c0"]


def test_muted_troubles_lead_no_row_and_suspects_lead_theirs(tmp_path):
    """Rows stand as the table of clients has them: by the cases, not by single findings."""
    path = charted.written(tmp_path / "s.db", rounds=4, findings=[charted.finding("c0", number=3)])
    with open_reader(path) as reader:
        assert in_trouble(reader, charted.RUN) == ["c0"]
        set_mark(path, charted.RUN, "muted", case_key(cases_of(reader, charted.RUN)[0]), "known")
        assert in_trouble(reader, charted.RUN) == []
    of_all = replace(charted.finding("c4", number=3), where=Where(charted.RUN, 3))
    path = charted.written(tmp_path / "t.db", rounds=4, findings=[of_all])
    with open_reader(path) as reader:
        assert in_trouble(reader, charted.RUN) == ["c4"] == [*severities(reader, charted.RUN)]


def test_a_cell_says_why_it_is_empty(reader):
    grid = client_grid(reader, charted.RUN, "loss", sort="name")
    state = np.frombuffer(base64.b64decode(grid.state), np.uint8).reshape(6, 10)
    assert state[5].tolist() == [0, 1] * 5
    assert client_grid(reader, charted.RUN, "loss", offset=1, limit=2).total_rows == 6


def test_rows_without_any_value_come_last():
    matrix = matrix_of(("a", "b", "c", "d"), (0, 1), [[1, 1], [np.nan, np.nan], [1, 1.1], [9, 9]])
    assert ordered(matrix, "value")[0] == "d"
    assert ordered(matrix, "value")[-1] == "b"
    assert ordered(matrix, "worst", ["c"])[0] == "c"


def test_layers_stand_in_the_order_of_the_model(reader):
    grid = layer_grid(reader, charted.RUN, "gradient", "l2")
    assert grid.rows == ("conv.weight", "head.weight")
    values = np.frombuffer(base64.b64decode(grid.values), np.float32).reshape(2, 10)
    assert values[0] == pytest.approx(np.full(10, 2.0))
    assert values[1, 3] == pytest.approx(10.0)
    with pytest.raises(ConfigError, match="statistic"):
        layer_grid(reader, charted.RUN, "gradient", "nonsense")


def test_phases_fill_the_round_and_a_bucket_shows_its_slowest(reader):
    found = phases(reader, charted.RUN, 100)
    parts = {part.name: part.values for part in found.parts}
    assert list(parts) == ["download", "compute", "upload", "unaccounted"]
    assert [sum(parts[name][2] for name in parts)] == pytest.approx([4.0])
    assert found.sent[0] == 6000
    assert found.received[1] == 10_000  # c5 was not there
    joined = phases(reader, charted.RUN, 2)
    assert joined.rounds == [2, 5]
    assert (joined.first, joined.last) == ([0, 5], [4, 9])


def test_a_round_without_shares_is_not_told_apart(tmp_path):
    late = Metric(Where(charted.RUN, 10), charted.STARTED, "time.round", 3.0)
    with open_reader(charted.written(tmp_path / "s.db", more=[late])) as reader:
        found = phases(reader, charted.RUN, 100)
    assert {part.name: part.values[10] for part in found.parts}["not told apart"] == 3.0


def test_the_overview_tells_verdict_cases_suspects_and_what_can_be_shown(reader):
    found = overview(reader, charted.RUN)
    assert found.verdict.state == "ill"
    assert [line.key for line in found.cases] == [found.verdict.key]
    assert [(line.node, line.reason, line.sure) for line in found.suspects] == [("c3", "random wrong labels", "90 %")]
    assert (found.sign, found.learning, found.scale) == ("loss", "loss", "scale.gsc")
    assert found.outcomes == ["accuracy"]
    names = [line.name for line in found.signs]
    assert names[0] == "loss"
    assert "time.round" not in names  # of no client
    assert [family.name for family in found.families] == ["gradient"]


def test_a_client_is_as_suspect_as_the_finding_about_it_is_sure(tmp_path):
    """One probability of one client on a page; others that the finding suspects have their own."""
    suspects = (Suspect("c3", 0.9, "another α/r"), Suspect("c4", 0.4, "another α/r"))
    found = replace(charted.finding("c3", confidence=0.97), suspects=suspects)
    with open_reader(charted.written(tmp_path / "s.db", findings=[found])) as reader:
        shown = overview(reader, charted.RUN)
    assert [(line.node, line.sure) for line in shown.suspects] == [("c3", "97 %"), ("c4", "40 %")]
    assert "97 %" in shown.verdict.headline


def test_what_is_muted_is_counted_and_suspects_nobody(reader, tmp_path):
    key = overview(reader, charted.RUN).cases[0].key
    set_mark(tmp_path / "s.db", charted.RUN, "muted", key)
    found = overview(reader, charted.RUN)
    assert (found.muted, found.suspects) == (1, [])
    assert found.cases[0].muted
    assert found.verdict.state != "ill"


def test_a_sign_that_few_clients_tell_does_not_open_the_map():
    counts = {"loss": [1, 0, 2, 1, 1], "update.norm": [20] * 5}
    assert _for_clients(counts, ["loss", "update.norm"]) == "update.norm"
    assert _for_clients({**counts, "loss": [10] * 5}, ["loss", "update.norm"]) == "update.norm"  # half of it empty
    assert _for_learning(counts, ["loss", "update.norm"]) == "loss"  # a few tell how the others learn
    assert _for_learning({**counts, "loss": [0, 0, 0, 0, 1]}, ["loss", "update.norm"]) == "update.norm"
    assert _for_clients({}, []) is None


@pytest.mark.thorough
def test_the_answers_over_http_are_bounded_and_not_sent_twice(tmp_path):
    home, own = "http://127.0.0.1:8321", f"/api/runs/{charted.RUN}"
    store = charted.written(tmp_path / "s.db", findings=[charted.finding()])
    with TestClient(create_app(store), base_url=home) as client:
        both = client.get(f"{own}/series", params={"names": ["loss"], "nodes": ["c3", "c0"]}).json()
        assert [(one["node"], one["total"]) for one in both] == [("c3", 10), ("c0", 10)]
        whole = client.get(f"{own}/series", params={"names": ["accuracy", "loss"], "from": 2, "to": 4}).json()
        assert [one["of"] for one in whole] == ["federation", "median client"]
        assert whole[0]["rounds"] == [2, 3, 4]
        told = client.get(f"{own}/overview")
        assert told.json()["verdict"]["node"] == "c3"
        again = client.get(f"{own}/overview", headers={"If-None-Match": told.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for asked in ("grid?sign=loss&rows=99999", "band", "series?names=loss&points=0"):
            refused = client.get(f"{own}/{asked}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "bad_request"), asked
        assert client.get("/api/runs/nobody/overview").status_code == 404
        assert client.get(f"{own}/layer-grid?family=nonsense").status_code == 404
