# SPDX-License-Identifier: Apache-2.0
"""Findings rest on what was measured: a run robbed of truth, faults, configuration and name has the very same ones."""

import sqlite3

import pytest

from fedvitals import lab
from fedvitals.diagnosis.compare import compare_findings
from fedvitals.diagnosis.examine import examine
from fedvitals.monitor.monitor import Monitor
from fedvitals.store import MemoryStore, open_reader
from fedvitals.store.read import queries
from fedvitals_studies.faultbank.recording import Recording
from fedvitals_studies.faultbank.run import bank_preset

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

FAULTS = {
    "clean": [],
    "guards": [lab.NotFinite(nodes=["c1"], since=3, layer=0), lab.FrozenLayer(nodes=["c4"], since=2, layer=-1)],
    "updates": [lab.SignFlip(nodes=["c2"], since=2, strength=2.0), lab.Duplicate(nodes=["c5"], since=1)],
    "clients": [lab.LabelNoise(nodes=["c3"], rate=1.0), lab.WrongSampleCount(nodes=["c6"], since=2, factor=9.0)],
    "run": [lab.ServerRateTooLow(factor=0.01, since=1)],
    "start": [lab.ExplodingInitialisation(factor=20.0)],
}


def watched(folder, faults):
    """A run that lies in a file and in memory, with all that the lab knows of it."""
    experiment = lab.Experiment(
        name="tells-all", dataset="digits", model=lab.mlp(hidden=[16]), clients=8, rounds=9, faults=faults, seed=3,
        local=lab.Local(iterations=6, optimizer=lab.sgd(learning_rate=0.1)),
    )  # fmt: skip
    memory = MemoryStore()
    with Monitor(
        folder / "runs.db", "tells-all", host="lab", sinks=[memory], probes=bank_preset(), detectors=()
    ) as one:
        lab.run(experiment, one, engine="stacked", workers=1)
        run = one.run.id
    return run, memory


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_that_is_robbed_of_all_that_tells_has_the_same_findings(tmp_path, name):
    run, memory = watched(tmp_path, FAULTS[name])
    with open_reader(tmp_path / "runs.db") as reader:
        whole = examine(reader.history(run))
        assert len(queries.truth_of(reader, run)) == len(FAULTS[name])
    with sqlite3.connect(tmp_path / "runs.db") as robber:
        before = robber.execute("SELECT config FROM run").fetchone()[0]
        robber.execute("DELETE FROM truth")
        robber.execute("UPDATE run SET config = '{}', name = 'x', topology = NULL, seed = NULL, host = 'torch'")
    robber.close()
    assert len(before) > 2  # there was something to take away
    with open_reader(tmp_path / "runs.db") as reader:
        assert queries.truth_of(reader, run) == []
        robbed = examine(reader.history(run))
    difference = compare_findings(whole, robbed)
    assert not difference
    assert difference.same == len(whole)
    if FAULTS[name]:
        assert whole
    # And a recording of the bank, which keeps less of it and that rounded, says the same of the same.
    recording = Recording.of(memory.history(run), sorted(memory.memory(run).metrics))
    recording.save(tmp_path / "case.npz")
    assert facts_of(examine(Recording.load(tmp_path / "case.npz"))) == facts_of(whole)


def facts_of(findings):
    return [(f.where.round, f.issue, f.where.node, f.where.group, f.where.layer, f.severity) for f in findings]
