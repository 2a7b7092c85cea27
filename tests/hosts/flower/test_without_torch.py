# SPDX-License-Identifier: Apache-2.0
"""Flower apps of NumPy, scikit-learn or XGBoost: watched where torch is not installed, and not made to import it."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from fedvitals.kernels import sums
from fedvitals.probes import numpy_updates
from fedvitals.probes.peer_columns import NEAREST
from fedvitals.probes.presets import preset
from fedvitals.probes.updates import UpdateTracker, flatten_and_sum
from fedvitals.records import Layer, LayerTable
from fedvitals.stats import INFS, PEER_COLUMNS
from fedvitals.store import open_reader
from fedvitals.store.read.ask import query
from support.flower.processes import deployed
from support.flower.without_torch import BROKEN, COPY, NODES, ROUNDS, SCALED
from support.paths import TESTS

pytestmark = pytest.mark.thorough

PROGRAM = TESTS / "support" / "flower" / "without_torch.py"
FINITE = NODES - 1  # clients, without the one that sends NaN


def run(store, mode):
    words = [sys.executable, str(PROGRAM), str(store), mode]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same federation where torch cannot be imported, and where it can; and what the first wrote to its log."""
    folder = tmp_path_factory.mktemp("torch")
    absent, log = run(folder / "absent.db", "absent")
    return absent, run(folder / "present.db", "present")[0], log


@pytest.mark.thorough
def test_an_app_without_torch_is_watched_and_its_ill_clients_are_found(runs):
    absent, _, log = runs
    assert absent["torch"] is False
    assert absent["versions"] == ["fedvitals", "numpy", "python"]
    assert len(absent["clients"]) == NODES
    found = {(issue, node) for issue, node in absent["findings"]}
    assert {("NAN_UPDATE", BROKEN), ("DUPLICATE_UPDATE", COPY)} <= found
    assert SCALED in {node for _, node in found}
    assert {node for _, node in found} <= {BROKEN, SCALED, COPY, str(int(COPY) + 1), None}
    assert ["monitor.error"] not in absent["events"]
    assert ["updates.numpy"] in absent["events"]
    assert log.count("pip install 'fedvitals[torch]'") == 1


def test_numpy_measures_what_torch_measures(runs):
    absent, present, _ = runs
    assert present["torch"] is True
    for kind, keys in (("metrics", 3), ("layers", 4)):
        by_numpy, by_torch = ({tuple(row[:keys]): row[keys:] for row in found[kind]} for found in (absent, present))
        assert by_numpy.keys() == by_torch.keys()
        for key, values in by_torch.items():
            wanted, got = (np.array([np.nan if v is None else v for v in own]) for own in (values, by_numpy[key]))
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=str(key))
    counted = [row[0] for row in absent["metrics"]]
    assert counted.count("update.norm") == NODES * ROUNDS
    assert counted.count("update.cosine_mean") == FINITE * ROUNDS
    assert counted.count("update.cosine_previous") == FINITE * (ROUNDS - 1)
    assert ["updates.numpy"] not in present["events"]


@pytest.mark.thorough
def test_the_client_mod_does_not_import_torch_where_the_app_does_not(tmp_path):
    found, _ = run(tmp_path / "none.db", "unused")
    assert found["torch"] is False
    assert "time.client" in found["metrics"]


@pytest.mark.thorough
def test_a_model_of_torch_is_measured_where_the_app_imports_it_as_it_trains(tmp_path):
    found, _ = run(tmp_path / "none.db", "late")
    assert found["torch"] is True
    assert {"gradient.norm", "steps", "weight.drift"} <= {*found["metrics"]}


MISSING = """
import sys
sys.modules["torch"] = None
import fedvitals as fv
from fedvitals.errors import MissingExtraError
for name, extra in (("watch", "torch"), ("lab", "lab"), ("Tape", "replay"), ("open_replay", "replay")):
    try:
        getattr(fv, name)
    except MissingExtraError as error:
        assert f"pip install 'fedvitals[{extra}]'" in str(error), error
    else:
        raise AssertionError(name)
for ask in (lambda: fv.preset("standard"), lambda: fv.flower.client_mod(tape="somewhere")):
    try:
        ask()
    except MissingExtraError:
        pass
    else:
        raise AssertionError(ask)
assert fv.flower.client_mod(probes="light") is not None
fv.Monitor(None).close()
"""


@pytest.mark.thorough
def test_what_needs_torch_is_answered_with_the_install_line():
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


CLIENT = """
import sys
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
import fedvitals as fv

app = ClientApp(mods=[fv.flower.client_mod()])


@app.train()
def train(message, context):
    arrays = {name: Array(array.numpy() + 1) for name, array in message.content["arrays"].items()}
    metrics = MetricRecord({"num-examples": 3, "torch": float("torch" in sys.modules)})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)
"""
SERVER = """
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
import fedvitals as fv

app = ServerApp()


@app.main()
def main(grid, context):
    with fv.Monitor(context.run_config["store"], run="arrays", machine=False) as monitor:
        strategy = fv.flower.attach(FedAvg(fraction_evaluate=0.0), monitor)
        strategy.start(grid, ArrayRecord({"w": Array(np.zeros(3, np.float32))}), num_rounds=2)
"""
PROJECT = """
[project]
name = "arrays"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "fedvitals"
[tool.flwr.app.components]
serverapp = "arrays.server_app:app"
clientapp = "arrays.client_app:app"
[tool.flwr.app.config]
store = ""
"""


@pytest.mark.flower
@pytest.mark.thorough
def test_in_a_deployment_the_process_of_a_message_does_not_import_torch(tmp_path):
    app, store = tmp_path / "app", tmp_path / "runs.db"
    (app / "arrays").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT)
    for name, content in (("__init__", ""), ("client_app", CLIENT), ("server_app", SERVER)):
        (app / "arrays" / f"{name}.py").write_text(content)
    with deployed(tmp_path) as federation:
        federation.add_nodes(2)
        run_of_it = federation.submit(app, store=store)
        assert run_of_it.wait(300) == 0, run_of_it.log()[-3000:]
    with open_reader(store) as reader:
        loaded = query(reader, "SELECT node, value FROM metrics WHERE name = 'user.torch'").rows
        watched = query(reader, "SELECT DISTINCT node FROM spans WHERE name = 'client'").rows
    assert [value for _, value in loaded] == [0.0] * 4
    assert {node for (node,) in watched} == {node for node, _ in loaded}


def test_nine_sums_are_those_of_the_kernel():
    drawn = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    drawn[0, 0], drawn[1, 1], drawn[2, 2], drawn[3, 3] = np.nan, np.inf, -np.inf, 0
    arrays = [drawn, np.zeros(3, np.float32), np.full(2, np.nan, np.float32), np.zeros((0, 2), np.float32)]
    wanted = np.asarray(sums([torch.from_numpy(array) for array in arrays]))
    np.testing.assert_allclose(numpy_updates.sums(arrays), wanted, rtol=1e-6)


@pytest.mark.parametrize("memory", [1 << 20, 0], ids=["exact", "no memory"])
def test_updates_of_several_rounds_have_the_metrics_of_torch(memory):
    stream = np.random.default_rng(1)
    shapes = [(5, 4), (5,), (3, 5), (3,)]
    ours, theirs = numpy_updates.ArrayUpdates(brief=False, memory=memory), UpdateTracker(memory=memory)
    table = LayerTable("parameter", tuple(Layer(str(i), shape, "float32") for i, shape in enumerate(shapes)))
    for updates in (ours, theirs):
        updates.know([table])
    for number in range(3):
        model = [stream.normal(size=shape).astype(np.float32) for shape in shapes]
        ours.begin_round(number, model)
        theirs.begin_round(number, [torch.from_numpy(values) for values in model])
        sent = {f"c{i}": [stream.normal(size=shape).astype(np.float32) for shape in shapes] for i in range(5)}
        sent["c1"] = sent["c0"]
        sent["c2"] = [np.zeros(shape, np.float32) for shape in shapes]
        sent["c3"][0][0, 0] = np.nan
        for node, vector, rows in numpy_updates.flatten_and_sum(sent):
            ours.add(node, vector, rows)
        for node, vector, rows in flatten_and_sum(
            {n: [torch.from_numpy(a) for a in update] for n, update in sent.items()}
        ):
            theirs.add(node, vector, rows)
        for got, wanted in zip(ours.close_round(), theirs.close_round(), strict=True):
            names = wanted.metrics if memory else ("update.norm",)  # sketches estimate the rest, and NumPy has none
            for name in names:
                assert got.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-5, abs=1e-7), name
            if memory:
                assert got.metrics.keys() == wanted.metrics.keys()
                np.testing.assert_allclose(got.alignment, wanted.alignment, rtol=1e-5, atol=1e-6)
                exact = [
                    column for column in range(len(PEER_COLUMNS)) if column != NEAREST or got.peers[0, NEAREST] > 0.8
                ]
                np.testing.assert_allclose(got.peers[0, exact], wanted.peers[0, exact], rtol=1e-4, atol=1e-6)
    assert (ours.held_bytes > 0) == (memory > 0)


def test_updates_beyond_all_numbers_are_measured_without_a_warning():
    updates = numpy_updates.ArrayUpdates(brief=False, memory=1 << 20)
    huge = {"c0": [np.full(3, 1e200)], "c1": [np.full(3, np.inf)], "c2": [np.full(3, -1e300)], "c3": [np.ones(3)]}
    for node, vector, rows in numpy_updates.flatten_and_sum(huge):
        updates.add(node, vector, rows)
    found = {update.node: update for update in updates.close_round()}
    assert [node for node, update in found.items() if update.finite] == ["c3"]
    assert found["c1"].rows[0, INFS] == 3


def test_a_preset_is_known_by_its_name_before_torch_is():
    for name in ("light", "standard", "deep"):
        assert numpy_updates.ArrayInstruments(preset(name), 0).preset.name == name
