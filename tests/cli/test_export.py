# SPDX-License-Identifier: Apache-2.0
"""`fedvitals export`: a stored run as files of every form, read back by who reads them."""

import csv
import importlib
import json

import pytest

from fedvitals.measurements import stamped
from fedvitals.records import Metric, Run, Sketch, Truth, Where
from fedvitals.sinks.parquet import write_table
from fedvitals.store import open_reader, open_store
from fedvitals.store.read.ask import query
from fedvitals.store.read.paging import layer_pages, records_in_order
from fedvitals.store.schema import TABLES
from fedvitals.testing import examples_of_records
from support.conditions import holds_for_each
from support.exported_runs import RUN, small
from support.verbs import run


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with a run of three rounds, and another beside it with awkward values."""
    path = tmp_path_factory.mktemp("export") / "runs.db"
    sink = open_store(path)
    sink.write(small(clients=4))
    sink.write([stamped(Sketch(Where(RUN, 0, "c0"), 1.0, (1.0, 2.0)), "s", 1)])
    sink.write([stamped(Truth(Where(RUN), 1.0, "label_noise", ("c1",)), "s", 2)])
    sink.write([stamped(Metric(Where(RUN, 2, "c3"), 1.0, "loss", float("nan")), "s", 3)])
    sink.write(examples_of_records())
    sink.close()
    return path


def exported(capsys, store, form, out, *more):
    code, text, err = run(capsys, "export", "digits", "--to", form, "--out", out, "--store", store, "--json", *more)
    assert code == 0, err
    return json.loads(text)["result"]


def read_arrow(form, path):
    if form == "parquet":
        return importlib.import_module("pyarrow.parquet").read_table(path)
    return importlib.import_module("pyarrow.feather").read_table(path)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_every_table_round_trips(store, tmp_path, capsys, form):
    """One file a view with the columns of docs/schema.md, and in it what SQL says."""
    pytest.importorskip("pyarrow")
    made = exported(capsys, store, form, tmp_path)
    files = {file["table"]: file for file in made["files"]}
    views = [table.view for table in TABLES if table.view]
    assert set(files) == {*views, "layer_statistics", "layer_gradient_histogram"}
    with open_reader(store) as reader:
        for view in [*views, "layer_statistics"]:
            key = {"runs": "id", "layers": "layer_table"}.get(view, "run")
            where = "" if key == "layer_table" else f" WHERE {key} = '{RUN}'"
            answer = query(reader, f"SELECT * FROM {view}{where}", 10_000)
            table = read_arrow(form, files[view]["path"])
            assert table.column_names == list(answer.columns)
            found = {tuple(row.values()) for row in table.to_pylist()}
            assert found == {tuple(row) for row in answer.rows}, view
            assert files[view]["rows"] == len(answer.rows)
    assert not list(tmp_path.glob(".*")), "unfinished files are left"


def test_layer_statistics_are_unpacked(store, tmp_path, capsys):
    """Layers by name, statistics as columns; a family without the nine sums has a file of its own."""
    pytest.importorskip("pyarrow")
    exported(capsys, store, "parquet", tmp_path)
    rows = read_arrow("parquet", tmp_path / "layer_statistics.parquet").to_pylist()
    first = next(row for row in rows if row["layer"] == "fc.weight" and row["round"] == 0)
    assert (first["family"], first["node"]) == ("gradient", None)
    assert first["mean"] == pytest.approx(0.5)
    bins = read_arrow("parquet", tmp_path / "layer_gradient_histogram.parquet").to_pylist()
    assert bins[0]["+2^-2"] == 2.0  # 0.25 and 0.3


def test_one_round_as_csv(store, tmp_path, capsys):
    """--round keeps to that round; csv needs no package; NaN is empty, as NULL is."""
    exported(capsys, store, "csv", tmp_path, "--round", 2)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["round"] for row in rows} == {"2"}
    assert {row["value"] for row in rows if row["name"] == "accuracy"} == {"0.7"}
    assert "" in {row["value"] for row in rows if row["node"] == "c3" and row["name"] == "loss"}


def test_a_run_is_read_in_order_and_in_pieces(store, monkeypatch):
    """The run first, then round after round, whatever the size of a page; and nothing twice or left out."""
    with open_reader(store) as reader:
        whole = list(records_in_order(reader, RUN))
        monkeypatch.setattr("fedvitals.store.read.paging.PAGE", 3)
        monkeypatch.setattr("fedvitals.store.read.paging.BLOCKS", 1)
        pieces = list(records_in_order(reader, RUN))
        assert [len(page) for page in layer_pages(reader, RUN, 1)]
        assert {stats.where.round for page in layer_pages(reader, RUN, 1) for stats in page} == {1}
    assert isinstance(whole[0], Run)
    identities = [(record.source, record.sequence) for record in pieces]
    assert identities == [(record.source, record.sequence) for record in whole]
    assert len(identities) == len(set(identities))
    rounds = [record.where.round for record in whole[1:] if record.source == "monitor"]
    assert rounds == sorted(rounds)


def test_perfetto_is_a_trace(store, tmp_path, capsys):
    """JSON that Perfetto loads, with the round's span and its parts; told where it is and how to open it."""
    path = tmp_path / "trace.json"
    code, out, _ = run(capsys, "export", "digits", "--to", "perfetto", "--out", path, "--store", store)
    assert code == 0
    assert "ui.perfetto.dev" in out
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"round 0", "wait"} <= names or {"round", "wait"} <= names


def test_tensorboard_from_a_store(store, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = exported(capsys, store, "tensorboard", tmp_path)
    found = EventAccumulator(made["where"]).Reload()
    assert [one.step for one in found.Scalars("accuracy")] == [0, 1, 2]
    assert found.Histograms("layers/gradient.histogram/fc.bias")
    text = found.Tensors("run")[0].tensor_proto.string_val[0].decode()
    assert str(store) in text
    assert "tensorboard --logdir" in made["open"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning:mlflow")
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_mlflow_from_a_store(store, tmp_path, capsys, monkeypatch):
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package)
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    made = exported(capsys, store, "mlflow", tmp_path / "ml.db")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'ml.db'}")
    found = client.get_run(made["where"].split()[-1])
    assert found.data.metrics["accuracy"] == pytest.approx(0.7)


@pytest.mark.thorough
def test_wandb_from_a_store(store, tmp_path, capsys, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    made = exported(capsys, store, "wandb", tmp_path)
    assert made["where"].endswith(RUN)
    assert made["where"].startswith(str(tmp_path))
    assert "wandb sync" in made["open"]


def test_a_receiver_that_is_away_is_said(store, capsys):
    pytest.importorskip("opentelemetry.proto")
    address = "http://127.0.0.1:9"
    code, _, err = run(capsys, "export", "digits", "--to", "otel", "--endpoint", address, "--store", store)
    assert code == 2
    assert address in err
    assert "taken nothing" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("form", ["csv", "perfetto", "tensorboard"])
def test_a_place_that_cannot_be_written_is_said(store, tmp_path, capsys, form):
    """A file stands where a folder is needed: no traceback, and what to do."""
    (tmp_path / "file").write_text("")
    code, out, err = run(capsys, "export", "digits", "--to", form, "--out", tmp_path / "file" / "x", "--store", store)
    assert (code, out) == (2, "")
    assert str(tmp_path / "file") in err
    assert "Traceback" not in err


def test_no_cell_of_a_csv_is_a_formula(tmp_path):
    """A client's words begin as they like; numbers stay numbers."""
    words = [
        "=HYPERLINK(1)",
        "+1",
        "-1",
        "@x",
        "\t=1",
        "\r=1",
        "\n=1",
        "it's = fine",
        "a\x1b[2J\x9b\x00b",
        "line\nbreak",
    ]
    rows = [[word, -1.5] for word in words]
    path = write_table(tmp_path, "events", {"message": "text", "value": "real"}, [rows], "csv")
    with path.open(newline="") as file:
        found = list(csv.reader(file))[1:]
    assert [cell for cell, _ in found] == [
        "'=HYPERLINK(1)", "'+1", "'-1", "'@x", "'\t=1", "'?=1", "'\n=1", "it's = fine", "a?[2J??b", "line\nbreak",
    ]  # fmt: skip
    assert {number for _, number in found} == {"-1.5"}


def test_names_in_errors_move_no_cursor(tmp_path, capsys):
    sink = open_store(tmp_path / "runs.db")
    sink.write([Run("r\x1b]0;owned\x07\x1b[2J", "evil\x1b[31m\r")])
    sink.close()
    code, _, err = run(capsys, "export", "digits", "--to", "csv", "--store", tmp_path / "runs.db")
    assert code == 2
    assert "evil" in err or "owned" in err
    assert holds_for_each(c.isprintable() or c == "\n" for c in err)


def test_wrong_use_is_answered(store, tmp_path, capsys):
    """A round that is not there, options that cannot be meant, a form that does not exist."""
    code, _, err = run(capsys, "export", "digits", "--to", "csv", "--round", 9, "--store", store)
    assert (code, "rounds 0 to 2" in err) == (2, True)
    code, _, err = run(capsys, "export", "digits", "--to", "otel", "--out", tmp_path, "--store", store)
    assert (code, "--endpoint" in err) == (2, True)
    code, _, err = run(capsys, "export", "digits", "--to", "csv", "--endpoint", "http://x", "--store", store)
    assert (code, "--out" in err) == (2, True)
    code, _, err = run(capsys, "export", "digits", "--to", "xls", "--store", store)
    assert (code, "parquet" in err) == (2, True)
    code, _, err = run(capsys, "export", "digts", "--to", "csv", "--store", store)
    assert (code, "Did you mean" in err) == (2, True)


def test_a_missing_package_is_said(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    code, _, err = run(capsys, "export", "digits", "--to", "parquet", "--out", tmp_path, "--store", store)
    assert (code, "fedvitals[parquet]" in err) == (2, True)
    assert not list(tmp_path.iterdir())
