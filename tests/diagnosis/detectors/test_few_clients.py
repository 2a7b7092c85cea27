# SPDX-License-Identifier: Apache-2.0
"""Federations of two and three clients: a client is compared with its own past, and healthy ones are left alone."""

import pytest

from fedvitals import lab
from fedvitals.diagnosis.evidence.scores import too_few_peers
from fedvitals.diagnosis.examine import examine
from support.lab.examined import watched

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

SMALL = {"rounds": 20, "local": lab.Local(iterations=20, optimizer=lab.sgd(learning_rate=0.3))}


def alarms(history):
    return {(f.issue, f.where.node) for f in examine(history) if f.severity != "note" and f.where.node}


@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_wrong_labels_since_the_middle_of_a_run_are_found(clients, seed):
    noise = lab.label_noise(nodes=["c1"], since=10, rate=0.8)
    history = watched(noise, clients=clients, seed=seed, **SMALL)
    assert alarms(history) == {("LABEL_NOISE", "c1")}
    assert min(f.where.round for f in examine(history) if f.issue == "LABEL_NOISE") >= 10


@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize("partition", [lab.dirichlet(0.1), lab.dirichlet(1.0)])
def test_healthy_clients_are_left_alone_and_it_is_known_that_peers_are_too_few(clients, partition):
    history = watched(clients=clients, partition=partition, **SMALL)
    assert alarms(history) == set()
    assert too_few_peers(history, 5)
