# SPDX-License-Identifier: Apache-2.0
"""Shuffled targets, random labels of which samples have several, and repeated samples, from the first round on."""

from functools import partial

import pytest
import torch
from torch.nn import functional

import fedvitals as fv
from fedvitals import lab
from fedvitals.store import MemoryStore
from support.plain_federation import train_rounds

CULPRIT = "c5"


def numbers(fault):
    """Regression: clients of 60 to 270 samples; the culprit's targets are shuffled."""
    weights, data = torch.randn(12, 1), []
    for client in range(8):
        x = torch.randn(60 + 30 * client, 12)
        y = 50 + 3 * (x @ weights + torch.sin(2 * x[:, :1]) + 0.1 * torch.randn(len(x), 1))
        data.append((x, y[torch.randperm(len(y))] if fault and f"c{client}" == CULPRIT else y))
    return data, functional.smooth_l1_loss


def several_labels(fault):
    """Seven labels per sample; the culprit's are random."""
    weights, data = torch.randn(20, 7), []
    for client in range(8):
        x = torch.randn(80, 20)
        y = (x @ weights + torch.randn(80, 7) > 1).float()
        data.append((x, torch.randint(0, 2, y.shape).float() if fault and f"c{client}" == CULPRIT else y))
    return data, functional.binary_cross_entropy_with_logits


def repeated(fault):
    """Four classes; nine tenths of the culprit's samples are repeated."""
    centres, data = 2 * torch.randn(4, 10), []
    for client in range(8):
        y = torch.randint(0, 4, (100,))
        x = centres[y] + torch.randn(100, 10)
        place = torch.arange(100) % (10 if fault and f"c{client}" == CULPRIT else 100)
        data.append((x[place], y[place]))
    return data, functional.cross_entropy


def train(data, loss, privacy):
    """Train for four rounds, and return the findings."""
    x, y = data[0]
    outputs = y.shape[1] if y.dim() == 2 else 4
    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 32), torch.nn.ReLU(), torch.nn.Linear(32, outputs))
    with fv.Monitor(None, strict=True, privacy=privacy) as monitor:
        train_rounds(monitor, model, data, rounds=4, loss=loss, optimizer=partial(torch.optim.Adam, lr=1e-2), batch=16)
        return monitor.findings()


@pytest.mark.parametrize("privacy", [2, 3])
@pytest.mark.parametrize(
    ("task", "issue", "words"),
    [
        (numbers, "LABEL_NOISE", "has nothing to do with its inputs"),
        (several_labels, "LABEL_NOISE", "has nothing to do with its inputs"),
        (repeated, "UNUSUAL_CLIENT", "90 % of the samples of c5 repeat others"),
    ],
)
def test_they_are_named_in_the_first_round(task, issue, words, privacy):
    torch.manual_seed(1)
    findings = [finding for finding in train(*task(fault=True), privacy) if finding.where.node]
    assert {(finding.issue, finding.where.node, finding.severity) for finding in findings} == {
        (issue, CULPRIT, "warning")
    }
    assert min(finding.where.round for finding in findings) == 0
    assert words in findings[0].message


@pytest.mark.parametrize("task", [numbers, several_labels, repeated])
def test_healthy_clients_are_not_named(task):
    torch.manual_seed(2)
    assert [finding for finding in train(*task(fault=False), 3) if finding.where.node] == []


def test_repeated_samples_that_give_a_client_more_weight_are_one_case():
    experiment = lab.Experiment(
        dataset="digits",
        model=lab.MLP(hidden=(16,)),
        clients=8,
        rounds=4,
        seed=1,
        local=lab.Local(iterations=5),
        faults=(lab.dominant_client(nodes=[CULPRIT]),),
    )
    with fv.Monitor(None, sinks=[MemoryStore()], strict=True) as monitor:
        lab.run(experiment, monitor)
        named = {finding.issue for finding in monitor.findings() if finding.where.node == CULPRIT}
    assert named == {"DOMINANT_CLIENT"}
