# SPDX-License-Identifier: Apache-2.0
"""Federations whose clients hold one class each: those that share a class are twins, and that is no fault."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedvitals as fv
from fedvitals import lab
from fedvitals.diagnosis.abstentions import NOT_JUDGED
from fedvitals.diagnosis.evidence.different_classes import trains_different_classes
from fedvitals.diagnosis.evidence.label_counts import clients_with_rare_labels
from fedvitals.store import MemoryStore
from support.plain_federation import train_rounds

CULPRITS = ("c2", "c5", "c7")


def train(clients, partition, classes=8, seed=1, faults=(), rounds=16):
    """Train on synthetic classes, and return the history and the findings."""
    experiment = lab.Experiment(
        dataset=lab.Synthetic(samples=1500, features=24, classes=classes, separation=3.0),
        model=lab.MLP(hidden=(64,)),
        clients=clients,
        rounds=rounds,
        seed=seed,
        partition=partition,
        local=lab.Local(epochs=3, optimizer=lab.SGD(learning_rate=0.1)),
        faults=faults,
    )
    store = MemoryStore()
    with fv.Monitor(None, sinks=[store], strict=True) as monitor:
        lab.run(experiment, monitor)
        return store.history(monitor.run.id), monitor.findings()


def accused(findings):
    return {finding.where.node for finding in findings if finding.severity != "note" and finding.where.node}


@pytest.mark.thorough
def test_nobody_is_accused_of_sharing_a_class_and_the_verdict_says_what_was_not_judged():
    history, findings = train(9, lab.ClassesPerClient(1))  # c3 and c4 share one of eight classes
    assert trains_different_classes(history, 0)
    assert accused(findings) == set()
    assert NOT_JUDGED["different_classes"] in str(findings)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [lab.little_is_enough, lab.gaussian, lab.free_rider])
def test_attackers_are_found_all_the_same(fault):
    _, findings = train(12, lab.ClassesPerClient(1), seed=3, faults=(fault(nodes=CULPRITS, since=4),))
    assert accused(findings) == set(CULPRITS)
    named = {finding.issue for finding in findings if finding.where.node}
    assert named == ({"FREE_RIDER"} if fault is lab.free_rider else {"BYZANTINE"})


@pytest.mark.parametrize(
    ("clients", "partition", "classes"),
    [(10, lab.IID(), 8), (10, lab.Dirichlet(0.3), 8), (6, lab.IID(), 4), (6, lab.IID(), 3), (6, lab.IID(), 2)],
    ids=["eight classes", "skewed", "four classes", "three classes", "two classes"],
)
def test_clients_with_several_classes_are_compared(clients, partition, classes):
    history, _ = train(clients, partition, classes, rounds=6)
    assert not any(trains_different_classes(history, round_index) for round_index in history.rounds())


@pytest.mark.parametrize(
    ("clients", "classes"), [(7, 3), (5, 4), (9, 8)], ids=["three groups", "a pair of four", "a pair of eight"]
)
def test_clients_with_one_class_each_are_not(clients, classes):
    history, _ = train(clients, lab.ClassesPerClient(1), classes, rounds=4)
    assert all(trains_different_classes(history, round_index) for round_index in history.rounds())


@pytest.mark.thorough
def test_clients_whose_classes_hardly_anyone_else_has_are_not_accused_of_their_losses():
    """14 clients of two neighbouring classes of eight: c7, without a twin, was called LABEL_NOISE."""
    torch.manual_seed(3)
    centres = 1.2 * torch.randn(8, 24)
    data = []
    for client in range(14):
        labels = (client + torch.randint(0, 2, (60,))) % 8
        data.append((centres[labels] + torch.randn(60, 24), labels))
    model = torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    store = MemoryStore()
    with fv.Monitor(None, sinks=[store], strict=True) as monitor:
        adam = partial(torch.optim.Adam, lr=1e-3)
        train_rounds(monitor, model, data, rounds=14, loss=cross_entropy, optimizer=adam, batch=16, passes=2)
        findings = monitor.findings()
    assert clients_with_rare_labels(store.history(monitor.run.id), 13) >= {"c6", "c7"}
    assert accused(findings) == set()
