# SPDX-License-Identifier: Apache-2.0
"""`fedvitals profile --devices` and `--try` on runs that `lab.run` made with a plain monitor, by any engine."""

import pytest

import fedvitals as fv
from fedvitals import lab
from fedvitals.lab.rerun import experiment_of
from fedvitals.store import open_reader
from fedvitals.store.read.queries import get_run
from support.verbs import result, run

EXPERIMENT = lab.Experiment(
    dataset="digits", model="mlp", clients=4, rounds=2, seed=3, network=lab.Network(),
    local=lab.Local(iterations=2), faults=[lab.label_noise(nodes=["c1"], rate=0.8)],
)  # fmt: skip


def stored(folder, engine, experiment=EXPERIMENT, **settings):
    with fv.Monitor(folder / "runs.db", strict=True, machine=False, **settings) as monitor:
        lab.run(experiment, monitor, engine=engine)
    return folder / "runs.db", monitor.run.id


@pytest.mark.parametrize("engine", ["auto", "sequential", "stacked"])
def test_devices_and_remedies_of_a_run_of_any_engine(engine, tmp_path, capsys):
    store, name = stored(tmp_path, engine)
    profile = result(capsys, "profile", name, "--devices", "--try", "1", "--store", store)
    assert {row["device"] for row in profile["devices"]} >= {"server", "phone"}
    assert all(row["peak_bytes"] > 0 for row in profile["devices"])
    assert len(profile["tried"]) == 1
    code, out, _ = run(capsys, "profile", name, "--devices", "--store", store)
    assert code == 0
    assert "at its predicted peak, batches of" in out


def test_the_experiment_is_kept_without_its_faults(tmp_path):
    store, name = stored(tmp_path, "stacked", config={"own": 1})
    with open_reader(store) as reader:
        described = get_run(reader, name)
    again = experiment_of(described)
    assert (again.clients, again.seed, again.faults) == (4, 3, ())
    assert (described.host, described.config["own"]) == ("lab", 1)
    assert "label_noise" not in described.config["experiment"]


def test_a_monitor_that_was_used_before_is_left_as_it_is(tmp_path):
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor:
        with monitor.round(0):
            monitor.log(loss=1.0)
        lab.run(EXPERIMENT, monitor, engine="stacked")
    assert monitor.run.host == "torch"
    assert "experiment" not in monitor.run.config
