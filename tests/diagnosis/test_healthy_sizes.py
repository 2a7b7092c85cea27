# SPDX-License-Identifier: Apache-2.0
"""Healthy federations whose clients differ in size by far: nobody is accused of having few samples, or many."""

import contextlib
import copy

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import fedvitals as fv

ROUNDS = 12


def train(path, sizes, *, watched, change=lambda round_index, client, update: update):
    """Train on digits, with so many samples of each client, and return what is found."""
    torch.manual_seed(1)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    shards = torch.randperm(len(x))[: sum(sizes)].split(list(sizes))
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    with fv.Monitor(path, run="sizes", strict=True) as monitor:
        for round_index in range(ROUNDS):
            updates = {}
            with monitor.round(round_index, model):
                for client, shard in enumerate(shards):
                    local = copy.deepcopy(model)
                    optimizer = torch.optim.SGD(local.parameters(), 0.1)
                    data = (x[shard], y[shard])
                    scope = monitor.client(f"c{client}", local, data=data, loss=cross_entropy)
                    with scope if watched else contextlib.nullcontext():
                        for batch in shard[torch.randperm(len(shard))].split(10):
                            optimizer.zero_grad()
                            cross_entropy(local(x[batch]), y[batch]).backward()
                            optimizer.step()
                    pairs = zip(local.parameters(), model.parameters(), strict=True)
                    update = [own.detach() - start.detach() for own, start in pairs]
                    updates[f"c{client}"] = change(round_index, client, update)
                monitor.updates(round_index, updates)
                weights = [len(shard) / sum(sizes) for shard in shards]
                with torch.no_grad():
                    for place, parameter in enumerate(model.parameters()):
                        parameter.add_(sum(u[place] * w for u, w in zip(updates.values(), weights, strict=True)))
    return [case for case in monitor.findings() if case.severity != "note"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sizes", "watched"),
    [([150] * 7 + [12], True), ([40, 50, 60, 50, 80, 1200], False)],
    ids=["few samples", "many samples, unwatched"],
)
def test_a_client_of_another_size_is_not_accused(tmp_path, sizes, watched):
    findings = train(tmp_path / "runs.db", sizes, watched=watched)
    assert [str(finding) for finding in findings if finding.issue != "STRAGGLER"] == []  # which a busy machine may be


@pytest.mark.thorough
def test_a_client_with_few_samples_cannot_hide_a_large_update(tmp_path):
    def scaled(round_index, client, update):
        return [20 * tensor for tensor in update] if client == 7 and round_index >= 5 else update

    findings = train(tmp_path / "runs.db", [150] * 7 + [12], watched=True, change=scaled)
    assert ("BYZANTINE", "c7") in {(finding.issue, finding.where.node) for finding in findings}
