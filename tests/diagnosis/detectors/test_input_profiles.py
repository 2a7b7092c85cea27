# SPDX-License-Identifier: Apache-2.0
"""Triggers that are trained in, found by the inputs that updates move; and federations in which there are none."""

from __future__ import annotations

import functools
import statistics

import pytest

from fedvitals import lab
from fedvitals.diagnosis.detectors.input_profiles import MIXED, STREAK, _outstanding, trained_in_triggers
from fedvitals.diagnosis.evidence.equal_updates import peer_statistic
from fedvitals.diagnosis.examine import examine
from fedvitals.monitor.monitor import Monitor
from fedvitals.store import MemoryStore

PARTITIONS = {
    "dirichlet": {"kind": "dirichlet", "alpha": 0.5},
    "strongly skewed": {"kind": "dirichlet", "alpha": 0.1},
    "two classes": {"kind": "classes_per_client", "classes": 2},
    "hardly two": {"kind": "dirichlet", "alpha": 0.05},
}
TRIGGER = {"nodes": ["c2", "c6"], "share": 0.7, "target": 3, "size": 4}


@functools.cache
def history_of(kind, partition="dirichlet", clients=10, seed=3, learning_rate=0.2, momentum=0.0, local=None, **more):
    """A federation on the digits whose clients c2 and c6 have a fault of this kind, or none."""
    faults = [] if kind is None else [{"kind": kind, **TRIGGER, **more}]
    experiment = lab.Experiment(
        dataset="digits",
        model={"kind": "mlp", "hidden": [32]},
        local=local or lab.Local(iterations=10, optimizer=lab.SGD(learning_rate=learning_rate, momentum=momentum)),
        faults=faults,
        clients=clients,
        rounds=12,
        partition=PARTITIONS[partition],
        seed=seed,
    )
    store = MemoryStore()
    monitor = Monitor(None, host="lab", detectors=(), sinks=[store], machine=False)
    lab.run(experiment, monitor.host, engine="stacked", workers=1)
    monitor.close()
    return store.history(monitor.run.id)


@pytest.mark.parametrize("kind", ["backdoor", "distributed_backdoor"])
def test_attackers_are_named_by_their_updates_alone(kind):
    findings = examine(history_of(kind), detectors=[trained_in_triggers])
    assert {finding.where.node for finding in findings} == {"c2", "c6"}
    assert {finding.issue for finding in findings} == {"BYZANTINE"}
    assert min(finding.where.round for finding in findings) >= 5  # nobody before the sixth participation


def test_nobody_is_named_where_nothing_is_trained_in():
    assert examine(history_of(None), detectors=[trained_in_triggers]) == []


def test_clients_with_nearly_the_same_few_classes_are_no_accomplices():
    """c2 and c6 were accused from the sixth round on, as the only pair that is alike."""
    history = history_of(None, "strongly skewed", clients=16, seed=303, learning_rate=0.1, momentum=0.9)
    assert history.latest("update.inputs_alike", 5)["c2"] > 0.75
    assert examine(history, detectors=[trained_in_triggers]) == []


@pytest.mark.parametrize(("clients", "seed", "pair"), [(10, 25, {"c1", "c2"}), (8, 50, {"c1", "c7"})])
def test_clients_that_are_alike_without_a_common_class_are_no_accomplices(clients, seed, pair):
    history = history_of(None, clients=clients, seed=seed)
    outstanding = [{*_outstanding(history, r)} for r in history.rounds()]
    assert sum(nodes == pair for nodes in outstanding) >= STREAK  # alike enough, and nobody else is
    assert examine(history, detectors=[trained_in_triggers]) == []


def test_clients_with_the_same_two_classes_are_alike_for_that_reason():
    history = history_of(None, "two classes", clients=12, seed=5)
    alike = history.latest("update.inputs_alike", history.rounds()[-1])
    assert max(alike.values()) > 0.75  # as accomplices are
    assert examine(history, detectors=[trained_in_triggers]) == []


def test_with_adam_all_rows_of_the_head_move_so_the_reported_labels_count():
    """Four of 14 healthy clients were accused, who have one class in common."""
    local = lab.Local(epochs=2, optimizer=lab.Adam(learning_rate=1e-3))
    history = history_of(None, "hardly two", clients=14, seed=5, local=local)
    assert statistics.median(peer_statistic(history, 8, "class_entropy").values()) > MIXED
    assert examine(history, detectors=[trained_in_triggers]) == []
