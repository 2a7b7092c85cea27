# SPDX-License-Identifier: Apache-2.0
"""`fv.open`: stored runs as objects, their numbers as DataFrames, Arrow tables or columns."""

import gc
import hashlib
import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import fedvitals as fv
from fedvitals.errors import ConfigError, StoreError
from fedvitals.notebook.tables import TYPES
from fedvitals.records import Finding, Metric, Where
from fedvitals.stats import FAMILIES, statistics_of
from support.postgres_server import running
from support.runs_by_hand import course, find
from support.store_contract import RUN, TABLE, stats
from support.timed_run import STARTED, stored


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two runs of one name and a third; in the newest, c1 has wrong labels from round 1 on, and c2 a norm of NaN."""
    ill = course("r3", "ill", started=STARTED + 200, clients=11)
    find(ill, "c1")
    ill.add(Finding(Where("r3", 2), ill.at, "PLATEAU", "note", 0.6, "Nothing moves."))
    ill.add(Metric(Where("r3", 3, "c2"), ill.at, "update.norm", math.nan))
    ill.add(Metric(Where("r3", 3, "c0"), ill.at, "update.norm", 7.0))
    ill.add(Metric(Where("r3", 3, "c0"), ill.at + 1, "update.norm", 8.0))  # told again: the newest counts
    runs = course("r1", "quiet"), course("r2", "quiet", started=STARTED + 100), ill
    return stored(tmp_path_factory.mktemp("notebook") / "runs.db", *runs)


def test_runs_by_name_id_place_and_newest(store):
    runs = fv.open(store)
    assert [run.id for run in runs] == ["r3", "r2", "r1"]
    assert len(runs) == 3
    assert (runs["quiet"].id, runs["r1"].id, runs[0].id, runs[-1].id, runs.newest.id) == ("r2", "r1", "r3", "r1", "r3")
    assert (runs.newest.name, runs.newest.summary.rounds) == ("ill", 4)
    assert repr(runs) == f"<3 runs in {store}>"
    assert repr(runs["r1"]) == "<run 'quiet', r1: 4 rounds, 3 clients>"
    assert runs.table(as_="columns")["id"] == ["r3", "r2", "r1"]
    with pytest.raises(ConfigError, match=r"Did you mean 'quiet'\?"):
        runs["quite"]
    with pytest.raises(ConfigError, match="got float"):
        runs[1.0]
    for place in (5, -4):
        with pytest.raises(
            ConfigError, match=rf"There is no run {place}: the store has 3 runs.*by its place, its name"
        ):
            runs[place]


def test_a_store_is_found_as_everywhere(store, tmp_path, monkeypatch):
    """By default and by FEDVITALS_STORE; what is there when it is opened stays, wherever the notebook goes then."""
    monkeypatch.chdir(store.parent)
    monkeypatch.delenv("FEDVITALS_STORE", raising=False)
    runs = fv.open()
    monkeypatch.chdir(tmp_path)
    assert len(runs) == 3
    with pytest.raises(StoreError, match="There is no store"):
        fv.open("runs.db")
    monkeypatch.setenv("FEDVITALS_STORE", str(store))
    assert len(fv.open("runs.db")) == 3


def test_a_store_without_runs_says_what_to_do(tmp_path):
    path = stored(tmp_path / "runs.db", course("r1"))
    runs = fv.open(path)
    subprocess.run([sys.executable, "-m", "fedvitals", "runs", "delete", "r1", "--yes", "--store", path], check=True)
    assert [*runs] == []
    with pytest.raises(ConfigError, match="no runs yet"):
        _ = runs.newest


def descriptors_of(store):
    """How many descriptors of the store's file and its log this process has, where the system tells."""
    files = [file for file in Path("/proc/self/fd").glob("*") if file.exists()]
    return sum(file.resolve().name.startswith(store.name) for file in files)


def test_no_connection_is_kept_and_nothing_is_written(store):
    """The one descriptor that stays is that of the page checksums, which POSIX does not let us close."""
    before, opened = hashlib.sha256(store.read_bytes()).hexdigest(), descriptors_of(store)
    with warnings.catch_warnings(), fv.open(store) as runs:
        warnings.simplefilter("error")  # of a connection that was never closed
        run = runs.newest
        for table in (run.metrics, run.findings, run.rounds, run.clients, runs.table):
            table(as_="columns")
        gc.collect()
    assert descriptors_of(store) <= max(opened, 1)
    assert hashlib.sha256(store.read_bytes()).hexdigest() == before


def test_metrics_by_name_node_and_round(store):
    run = fv.open(store).newest
    table = run.metrics("update.norm", nodes=["c0", "c2"], rounds=range(2, 4), as_="columns")
    assert table["round"] == [2, 3, 2, 3]
    assert table["node"] == ["c0", "c0", "c2", "c2"]
    assert table["name"] == ["update.norm"] * 4
    assert table["value"][:3] == [1.0, 8.0, 1.0]
    assert math.isnan(table["value"][3])
    whole = run.metrics("accuracy", nodes=[None], as_="columns")
    assert (whole["node"], whole["round"]) == ([None] * 4, [0, 1, 2, 3])
    assert run.metrics("accuracy", "loss", rounds=1, as_="columns")["value"] == pytest.approx([0.45, 0.55])
    assert set(run.metrics(as_="columns")["name"]) <= set(run.metric_names())
    nodes = run.metrics("update.norm", rounds=0, as_="columns")["node"]
    assert nodes == [f"c{i}" for i in range(11)]  # c2 before c10


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda run: run.metrics("update.nrom"), "Did you mean 'update.norm'"),
        (lambda run: run.metrics(nodes="c77"), "Unknown node of this run 'c77'"),
        (lambda run: run.metrics(rounds=(1, 2)), r"range\(3, 10\); got \(1, 2\)"),
        (lambda run: run.layers("gradeint"), "Unknown family of layer statistics of this run 'gradeint'"),
        (lambda run: run.findings(as_="panda"), "Did you mean 'pandas'"),
    ],
)
def test_wrong_names_are_answered_with_what_exists(store, ask, words):
    with pytest.raises(ConfigError, match=words):
        ask(fv.open(store).newest)


def recorded_layers(target):
    """Gradients of two clients in two rounds, those of c1 in round 1 told again, and once of a single step."""
    records = [
        stats(at, node, seed, 1 + seed) for seed, (at, node) in enumerate([(0, "c0"), (0, "c1"), (1, "c0"), (1, "c1")])
    ]
    records += [stats(1, "c1", 4, 5, at=9.0), stats(1, "c1", 5, 6, at=10.0, step=3)]
    sink = fv.open_store(target)
    sink.write([RUN, *records])
    sink.close()
    return records


def check_layers(target):
    records = recorded_layers(target)
    run = fv.open(target)["r-1"]
    table = run.layers("gradient", "l2", "mean", nodes="c1", rounds=1, as_="columns")
    assert table["layer"] == list(TABLE.names)
    assert table["node"] == ["c1"] * len(TABLE.names)
    assert table["l2"] == pytest.approx(records[4].get("l2").tolist(), rel=1e-6)  # kept in 32 bits
    assert [*table] == ["round", "node", "layer", "l2", "mean"]
    every = run.layers("gradient", rounds=range(2), as_="columns")
    assert every["round"] == [0] * 2 * len(TABLE.names) + [1] * 2 * len(TABLE.names)
    assert "sparsity" in every
    with pytest.raises(ConfigError, match="Unknown statistic of family 'gradient' 'l3'"):
        run.layers("gradient", "l3")


def test_layers_by_family_and_statistic(tmp_path):
    check_layers(tmp_path / "layers.db")


@pytest.mark.postgres
@pytest.mark.thorough
def test_a_store_in_postgresql():
    with running() as server:
        check_layers(server.database())


def test_findings_rounds_and_clients(store):
    run = fv.open(store).newest
    (finding,) = zip(*run.findings(as_="columns").values(), strict=True)
    assert finding[:7] == ("warning", "LABEL_NOISE", "Labels are wrong at random", "c1", None, None, 1)
    assert finding[7:] == (3, True, 0.96, "c1 has it.", None)
    assert run.findings(notes=True, as_="columns")["issue"] == ["LABEL_NOISE", "PLATEAU"]
    rounds = run.rounds(as_="columns")
    assert rounds["round"] == [0, 1, 2, 3]
    assert rounds["accuracy"] == pytest.approx([0.225, 0.45, 0.675, 0.9])
    assert rounds["seconds"] == [0.25] * 4
    clients = run.clients(as_="columns")
    assert clients["node"] == [f"c{i}" for i in range(11)]
    assert (clients["findings"][:3], clients["rounds"][0], clients["last"][0]) == ([0, 1, 0], 4, 3)
    assert run.verdict.startswith("c1 ")
    quiet = fv.open(store)["quiet"].findings(as_="columns")
    assert quiet["issue"] == []


def test_arrow_tables_have_types_also_without_rows(store):
    arrow = pytest.importorskip("pyarrow")
    runs = fv.open(store)
    types = {name: str(runs["quiet"].findings(as_="arrow").schema.field(name).type) for name in ("node", "since")}
    assert types == {"node": "string", "since": "int64"}
    table = runs.newest.metrics("update.norm", as_="arrow")
    assert isinstance(table, arrow.Table)
    assert table.schema.field("round").type == arrow.int64()
    assert table.num_rows == 44


def test_dataframes(store):
    pandas = pytest.importorskip("pandas")
    runs = fv.open(store)
    frame = runs.newest.metrics("update.norm")
    assert isinstance(frame, pandas.DataFrame)
    assert str(frame.dtypes["round"]) == "int64"
    wide = frame.pivot(index="round", columns="node", values="value")
    assert wide.loc[3, "c0"] == 8.0
    assert isinstance(runs["quiet"].findings(), pandas.DataFrame)
    assert list(runs.table()["name"]) == ["ill", "quiet", "quiet"]
    assert isinstance(runs.newest.clients(), pandas.DataFrame)


WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pandas", "pyarrow"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in ("pandas", "pyarrow") else real(name, package)
sys.meta_path.insert(0, Absent())
import fedvitals as fv
run = fv.open(sys.argv[1]).newest
print(type(run.metrics("accuracy")).__name__, "torch" in sys.modules)
for form in ("pandas", "arrow"):
    try:
        run.metrics("accuracy", as_=form)
    except fv.errors.FedvitalsError as error:
        print(error)
"""


def test_without_pandas_and_arrow_there_are_columns_and_errors_that_teach(store):
    """And nothing of it needs torch."""
    done = subprocess.run([sys.executable, "-c", WITHOUT, store], capture_output=True, text=True, check=True)
    first, pandas, arrow = done.stdout.splitlines()
    assert first == "dict False"
    assert "pip install pandas" in pandas
    assert "pip install 'fedvitals[parquet]'" in arrow


def test_no_statistic_has_the_name_of_a_typed_column():
    assert not {statistic for family in FAMILIES for statistic in statistics_of(family)} & set(TYPES)
