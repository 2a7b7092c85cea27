# SPDX-License-Identifier: Apache-2.0
"""A language model's losses by bands: on the client's page, in a picture and in the report."""

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import fedvitals as fv
from fedvitals import lab, plot
from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.pages.loss_bands import MOST, loss_bands
from fedvitals.report.write import report
from fedvitals.store import open_reader
from fedvitals.store.read.queries import layer_round, list_runs
from support.dashboard_server import judge, needs_browser, ready, serve
from support.text_training import Language, make_texts, steps
from support.trained_losses import Twin

CLIENTS = ("c0", "c1", "c2")


@pytest.fixture(scope="module")
def store(session_folder):
    path = session_folder / "texts.db"
    with fv.Monitor(path, "texts", probes="deep", strict=True) as monitor:
        for number in range(2):
            with monitor.round(number):
                for seed, name in enumerate(CLIENTS):
                    model = Language()
                    with monitor.client(name, model):
                        steps(make_texts(seed=seed))(model, Twin())
                model = Language(300)
                with monitor.client("short", model):
                    steps(make_texts(2, vocabulary=300))(model, Twin())
    return path


def test_bands_beside_the_other_clients(store):
    with open_reader(store) as reader:
        run = list_runs(reader)[0].id
        tokens, lengths = loss_bands(reader, run, "c1")
        measured = [layer_round(reader, run, part.family, 1) for part in (tokens, lengths)]
    assert (tokens.round, tokens.counted, lengths.counted) == (1, "samples", "texts")
    for part, own in zip((tokens, lengths), measured, strict=True):
        mine, others = own.nodes.index("c1"), [own.nodes.index(name) for name in (*CLIENTS, "short") if name != "c1"]
        assert part.bands
        for band in part.bands:
            row = own.layers.index(band.name)
            assert band.count == own.get(part.counted)[mine, row] > 0
            assert band.loss == pytest.approx(own.get("loss_mean")[mine, row])
            assert band.right == pytest.approx(own.get("accuracy")[mine, row])
            assert band.median == pytest.approx(np.nanmedian(own.get("loss_mean")[others, row]))


def test_a_client_without_any_band_has_no_table(store):
    with open_reader(store) as reader:
        run = list_runs(reader)[0].id
        tokens, *rest = loss_bands(reader, run, "short")
        assert loss_bands(reader, run, "nobody") == []
    assert tokens.family == "training.tokens"
    assert not rest  # two texts are too few


def test_of_many_classes_those_that_are_harder_than_for_others(tmp_path):
    """One client's labels of a class are wrong: of twenty classes this one is among those that are shown."""
    store = tmp_path / "classes.db"
    experiment = lab.Experiment(
        dataset=lab.synthetic(classes=20, features=40, samples=3000, separation=6.0),
        model=lab.mlp(hidden=(32,)),
        local=lab.Local(epochs=2, batch=16, optimizer=lab.sgd(0.1)),
        clients=4,
        rounds=10,
        faults=(lab.label_flip(nodes=["c1"], source=7, target=3),),
    )
    with fv.Monitor(store, "classes", probes="deep") as monitor:
        lab.run(experiment, monitor)
    with open_reader(store) as reader:
        (classes,) = loss_bands(reader, list_runs(reader)[0].id, "c1")
    assert (classes.family, classes.counted, classes.total) == ("training.classes", "samples", 19)  # no 7
    assert len(classes.bands) == MOST
    by_name = {band.name: band for band in classes.bands}
    assert by_name["3"].loss > 5 * by_name["3"].median  # what was a 7 does not look like a 3


def test_a_client_with_other_classes_hides_nobody(tmp_path):
    """Its table comes last, and has other rows than those of the others."""
    store = tmp_path / "classes.db"
    with fv.Monitor(store, "classes", probes="deep", strict=True) as monitor, monitor.round(0):
        for name, classes in (("c0", 3), ("c1", 3), ("z", 5)):
            model = torch.nn.Linear(4, classes)
            data = torch.randn(40, 4), torch.arange(40) % classes
            with monitor.client(name, model, data=data, loss=torch.nn.functional.cross_entropy):
                torch.nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    with open_reader(store) as reader:
        run = list_runs(reader)[0].id
        shown = {name: loss_bands(reader, run, name) for name in ("c0", "c1", "z")}
    assert {name: len(classes.bands) for name, (classes,) in shown.items()} == {"c0": 3, "c1": 3, "z": 5}
    assert shown["c0"][0].bands[0].median == pytest.approx(shown["c1"][0].bands[0].loss)
    assert shown["z"][0].bands[0].median is None  # nobody else has these classes


@pytest.mark.browser
@needs_browser
def test_the_client_page_shows_them(store, page):
    with open_reader(store) as reader:
        run = list_runs(reader)[0].id
    with serve(store) as url:
        ready(page, f"{url}/runs/{run}/clients/c1", "client")
        panel = page.get_by_role("region", name="training losses")
        assert panel.locator("caption").all_inner_texts() == [
            "by number of the token in the vocabulary, r1", "by number of targets in the text, r1",
        ]  # fmt: skip
        cells = panel.locator("tr", has_text="1,024–4,095").locator("td").all_inner_texts()
        assert len(cells) == 4
        assert all(cells)
        assert "training loss, rare tokens" in page.get_by_role("region", name="reported values").inner_text()
        assert judge(page) == []
        page.goto("about:blank")


def test_they_are_on_the_page_in_the_picture_and_in_the_report(store, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra plots")
    with open_reader(store) as reader:
        run = list_runs(reader)[0].id
        report(reader, [run], tmp_path / "page.html")
        figure = plot.client((reader, run), "c1")
    client = TestClient(create_app(store), base_url="http://127.0.0.1:8321")
    page = client.get(f"/api/runs/{run}/client", params={"node": "c1"}).json()
    assert [part["family"] for part in page["losses"]] == ["training.tokens", "training.lengths"]
    titles = {fact["title"] for fact in page["facts"]}
    drawn = " ".join(text.get_text() for axes in figure.axes for text in axes.findobj() if hasattr(text, "get_text"))
    written = (tmp_path / "page.html").read_text(encoding="utf-8")
    for title in ("training loss, common tokens", "training loss, rare tokens", "training loss, short texts"):
        assert title in titles
        assert title in drawn
        assert title in written
