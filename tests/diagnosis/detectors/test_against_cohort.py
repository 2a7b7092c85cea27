# SPDX-License-Identifier: Apache-2.0
"""Updates that point against all others, or became many times as large: found whatever clients report."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals.diagnosis.detectors.against_cohort import _places
from fedvitals.store import MemoryStore
from support.plain_federation import train_rounds


def federate(factor, rounds=10, rate=0.1, steps=5):
    """Six clients that train alike; what c2 trained is multiplied from round 5 on, inside of its scope.

    `rate`, `steps`: with which c2 trains from round 5 on.
    """
    torch.manual_seed(0)
    x = torch.randn(240, 12)
    y = (x @ torch.randn(12, 4)).argmax(1)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    with fv.Monitor(None, machine=False, strict=True) as monitor:
        for number in range(rounds):
            locals_ = []
            with monitor.round(number, model):
                for index in range(6):
                    local = copy.deepcopy(model)
                    is_odd = index == 2 and number >= 5
                    optimizer = torch.optim.SGD(local.parameters(), rate if is_odd else 0.1)
                    with monitor.client(f"c{index}", local, optimizer):
                        for _ in range(steps if is_odd else 5):
                            optimizer.zero_grad()
                            nn.functional.cross_entropy(local(x[index::6]), y[index::6]).backward()
                            optimizer.step()
                        if is_odd:
                            multiply(local, model, factor)
                    locals_.append(local)
                with torch.no_grad():
                    for shared, *own in zip(*(m.parameters() for m in (model, *locals_)), strict=True):
                        shared.copy_(torch.stack(own).mean(0))
        return monitor.findings()


@torch.no_grad()
def multiply(local, model, factor):
    for own, start in zip(local.parameters(), model.parameters(), strict=True):
        own.copy_(start + factor * (own - start))


@pytest.mark.parametrize(("factor", "words"), [(-1.0, "against those of all others"), (10.0, "times as large")])
def test_what_a_client_does_inside_of_its_scope_is_found(factor, words):
    findings = federate(factor)
    assert {finding.where.node for finding in findings} == {"c2"}
    assert any(words in finding.message or "unlike its peers" in finding.message for finding in findings)
    assert min(finding.where.round for finding in findings) <= 7


def test_nobody_is_named_where_all_train_alike():
    assert list(federate(1.0)) == []


def test_a_growth_that_training_does_not_explain_is_no_learning_rate():
    assert {finding.issue for finding in federate(10.0)} == {"BYZANTINE"}


@pytest.mark.parametrize("odd", [{"rate": 1.0}, {"steps": 60}])
def test_a_growth_that_training_explains_is_no_manipulation(odd):
    assert "BYZANTINE" not in {finding.issue for finding in federate(1.0, **odd)}


def test_labels_that_were_inverted_from_the_start_are_found_where_there_is_no_accuracy():
    """Several labels per sample: no class that a sample could be right in, and labels that never changed."""
    torch.manual_seed(0)
    x, teacher = torch.randn(480, 12), torch.randn(12, 5)
    y = (x @ teacher + torch.randn(480, 5) > 1).float()
    y[2::6] = 1 - y[2::6]
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    data = [(x[index::6], y[index::6]) for index in range(6)]
    loss, sgd = nn.functional.binary_cross_entropy_with_logits, partial(torch.optim.SGD, lr=0.2, momentum=0.9)
    with fv.Monitor(None, machine=False, strict=True) as monitor:
        train_rounds(monitor, model, data, rounds=6, loss=loss, optimizer=sgd, passes=5)
        found = monitor.findings()
    assert {(finding.issue, finding.where.node) for finding in found} == {("LABEL_NOISE", "c2")}
    assert "points against those of all others" in found[0].message


def test_a_client_with_classes_of_its_own_pulls_against_the_others_for_that_reason():
    """It was said to have wrong labels since its first round, because they had never changed."""
    torch.manual_seed(0)
    centres, model = 0.3 * torch.randn(8, 20), nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))
    data = []
    for index in range(5):
        labels = torch.randint(0, 4, (120,)) + (0 if index == 1 else 4)
        data.append((centres[labels] + torch.randn(120, 20), labels))
    store = MemoryStore()
    loss, sgd = nn.functional.cross_entropy, partial(torch.optim.SGD, lr=0.05)
    with fv.Monitor(None, machine=False, strict=True, sinks=[store]) as monitor:
        train_rounds(monitor, model, data, rounds=6, loss=loss, optimizer=sgd, passes=5)
        found = monitor.findings()
    history = store.history(monitor.run.id)
    assert _places(history, 5)["c1"].is_reversed
    assert [finding for finding in found if finding.where.node and finding.issue == "LABEL_NOISE"] == []
