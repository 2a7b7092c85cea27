# SPDX-License-Identifier: Apache-2.0
"""The page of adapters: as the store has them, in the browser, in a report and as a picture."""

import pytest
from starlette.testclient import TestClient
from torch import nn

from fedvitals import plot
from fedvitals.dashboard.app import create_app
from fedvitals.errors import ConfigError
from fedvitals.lab.adapters import LoraLinear
from fedvitals.monitor.monitor import Monitor
from fedvitals.report.write import report
from fedvitals.store import open_reader
from fedvitals.store.read.queries import list_runs
from fedvitals.views.adapters import adapters_page
from support.adapter_runs import federate, lora_model, only_trains
from support.dashboard_server import judge, needs_browser, ready, serve

HOME = "http://127.0.0.1:8321"


@pytest.fixture(scope="module")
def store(session_folder):
    path = session_folder / "adapters.db"
    with Monitor(str(path), "padded", strict=True) as monitor:
        forgotten = iter((2.0, 2.1, 2.2))
        federate(
            monitor,
            lora_model(),
            rounds=3,
            ranks=(2, 2, 2, 4),
            aggregate=lambda *_: monitor.log({"held_back.loss": next(forgotten)}),
        )
    return path


def test_the_page_has_spectrum_errors_and_the_clients_parts(store):
    with open_reader(store) as reader:
        run = list_runs(reader)[0].id
        page = adapters_page(reader, run)
        one = adapters_page(reader, run, "2", 0)
        with pytest.raises(ConfigError):
            adapters_page(reader, run, "no such layer")
    assert (page.layers, page.layer, page.round) == (("0", "2"), None, 2)
    assert (page.effective_rank.rows, page.effective_rank.columns) == (("0", "2"), (0, 1, 2))
    assert page.spectrum.rows == ("1", "2", "3", "4")  # no rank is above four: the other directions hold nothing
    assert page.contributions.rows == ("c0", "c1", "c2", "c3")
    assert page.contributions.columns == (1, 2, 3, 4)
    assert [curve.name for curve in page.errors] == ["adapter.product_error", "adapter.product_error_by_rank"]
    assert [curve.rounds for curve in page.energies] == [(0, 1, 2), (0, 1, 2)]
    assert (one.layer, one.round) == ("2", 0)
    assert [curve.name for curve in page.moves] == ["adapter.change", "adapter.drift"]
    assert page.held_back[0].values == (2.0, 2.1, 2.2)
    assert page.clients["adapter.scale"].rows == ("c0", "c1", "c2", "c3")


def test_a_run_without_adapters_has_an_empty_page(tmp_path):
    with Monitor(str(tmp_path / "runs.db"), "plain") as monitor, monitor.round(0):
        monitor.log(loss=1.0)
    with open_reader(tmp_path / "runs.db") as reader:
        page = adapters_page(reader, list_runs(reader)[0].id)
    assert (page.layers, page.spectrum, page.contributions, page.errors) == ((), None, None, ())


def test_the_route_the_picture_and_the_report_show_them(store, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra plots")
    with TestClient(create_app(store, token="right"), base_url=HOME) as client:
        client.headers["Authorization"] = "Bearer right"
        answer = client.get("/api/runs/padded/adapters")
        assert answer.status_code == 200
        assert answer.json()["layers"] == ["0", "2"]
        assert client.get("/api/runs/padded/adapters?layer=nowhere").status_code >= 400
    figure = plot.adapters("padded", store=str(store))
    assert len(figure.axes) == 4
    with open_reader(store) as reader:
        report(reader, ["padded"], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Adapters and texts" in text
    assert "Adapters of higher rank are averaged away" in text


@pytest.mark.browser
@needs_browser
def test_the_page_is_drawn(store, page):
    with open_reader(store) as reader:
        run = list_runs(reader)[0].id
    with serve(store) as url:
        ready(page, f"{url}/runs/{run}/adapters", "adapters")
        assert "energy by singular direction" in page.locator("main").inner_text()
        parts = page.locator("figure", has_text="each client\u2019s part in a direction")
        strip = parts.locator(".chart-strip span")
        assert all(text.endswith("%") for text in strip.all_inner_texts() if text)
        parts.locator("[role=application]").focus()
        page.keyboard.press("ArrowRight")
        assert "directions 1 to 4" in parts.locator("[role=application]").get_attribute("aria-label")
        assert page.locator("nav.pages a[aria-current]").inner_text() == "adapters"
        assert judge(page) == []
        page.goto("about:blank")


def test_of_many_directions_the_first_are_shown_and_said_to_be(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra plots")
    layers = [LoraLinear(nn.Linear(20, 200), 17, 2.0), nn.ReLU(), LoraLinear(nn.Linear(200, 16), 4, 2.0)]
    model = only_trains(nn.Sequential(*layers), "lora_A.weight", "lora_B.weight")
    nn.init.normal_(model[0].lora_B.weight)  # so that all 17 directions hold energy
    with Monitor(str(tmp_path / "runs.db"), "wide", strict=True) as monitor:
        federate(monitor, model, ranks=(17, 17))
    with open_reader(tmp_path / "runs.db") as reader:
        run = list_runs(reader)[0].id
        assert [adapters_page(reader, run, layer).beyond for layer in (None, "0", "2")] == [True, True, False]
    spectrum = plot.adapters("wide", store=str(tmp_path / "runs.db")).axes[0]
    assert "energy, first 16 directions" in (
        spectrum.get_title(loc="left"),
        *(own.get_text() for own in spectrum.texts),
    )
    assert [label.get_text() for label in spectrum.get_yticklabels()] == [f"{k}" for k in range(1, 17, 2)]
