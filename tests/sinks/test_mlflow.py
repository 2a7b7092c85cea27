# SPDX-License-Identifier: Apache-2.0
"""MLflow: what is logged to a local database is read back by MLflow's own client."""

import importlib.util
import json
import sys

import pytest

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.testing import check_sink
from support.exported_runs import RUN, round_of, run_of, small
from support.sinks import ending_queues

pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")
from fedvitals.sinks.mlflow import MLflow, _key
from support.waiting import PATIENCE

pytestmark = [
    pytest.mark.thorough,
    # What MLflow itself does with SQLAlchemy, and with connections that it leaves to the collector.
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning:mlflow"),
    pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def nothing_is_sent(monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """Made once: MLflow takes seconds for its tables."""
    return tmp_path_factory.mktemp("mlflow") / "ml.db"


def client_of(uri):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def test_a_run_is_read_back(database):
    """Metrics by round, settings, tags with the link, histograms as an artifact beside the database, and the end."""
    sink = MLflow(f"sqlite:///{database}", "one", store="/data/runs.db")
    sink.write(small())
    client, run = client_of(sink.uri), sink.run_of(RUN)
    history = client.get_metric_history(run, "accuracy")
    assert [(one.step, one.value) for one in history] == [(0, 0.5), (1, 0.6), (2, 0.7)]
    assert [one.value for one in client.get_metric_history(run, "c1/update.norm")] == [50.0] * 3
    assert client.get_metric_history(run, "layers/gradient.mean/fc.weight")[0].value == pytest.approx(0.5)
    found = client.get_run(run)
    assert found.info.run_name == "digits"
    assert found.info.status == "FINISHED"
    assert found.info.start_time == 1790000000000
    assert found.data.params["local.epochs"] == "2"
    assert found.data.tags["fedvitals.run"] == RUN
    assert f"fedvitals show {RUN} --store '/data/runs.db'" in found.data.tags["mlflow.note.content"]
    (path,) = (database.parent / "mlruns").rglob("round-00002.json")
    histogram = json.loads(path.read_text())["layers/gradient.histogram/fc.weight"]
    assert sum(histogram["counts"]) == 4
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1


def test_a_run_goes_on_where_it_was(database):
    """A second process, or a batch that is tried again, finds the run by its id; nothing is doubled."""
    first = MLflow(f"sqlite:///{database}", "two")
    first.write([run_of(), *round_of(0)])
    second = MLflow(f"sqlite:///{database}", "two")
    second.write([run_of(), *round_of(0), *round_of(1)])
    assert second.run_of(RUN) == first.run_of(RUN)
    history = client_of(first.uri).get_metric_history(first.run_of(RUN), "accuracy")
    assert [one.step for one in history] == [0, 1]


def test_a_server_that_is_gone_harms_nobody(monkeypatch, caplog):
    """The queue tells once and keeps what it has room for."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with ending_queues() as make:
        queue = make(MLflow("http://127.0.0.1:9"))
        queue.put_many(small())
        assert not queue.flush(timeout=PATIENCE)
        assert queue.pending == len(small())
    assert caplog.text.count("Sink 'mlflow': cannot be written to") >= 1


def test_the_sinks_contract(database):
    check_sink(lambda: MLflow(f"sqlite:///{database}", "three"))


def test_a_folder_is_refused_with_what_to_do(tmp_path, monkeypatch):
    """MLflow no longer takes folders, and says so when training has begun; we say it before."""
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(ConfigError, match=r"sqlite:///mlflow\.db"):
        MLflow(str(tmp_path / "mlruns"))


def test_keys_keep_to_what_mlflow_takes():
    assert _key("c7/update.norm") == "c7/update.norm"
    assert _key("../../c:7/«x»") == "c_7/_x_"
    assert _key("../..") == "_"


def test_missing_packages_are_said_at_once(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "alembic" else found(name))
    with pytest.raises(MissingExtraError, match=r"alembic.*fedvitals\[mlflow\]"):
        MLflow("sqlite:///mlflow.db")
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(MissingExtraError, match=r"mlflow-skinny.*fedvitals\[mlflow\]"):
        MLflow("http://127.0.0.1:9")
