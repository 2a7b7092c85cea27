# SPDX-License-Identifier: Apache-2.0
"""What is found in a plain loop, as the README shows it, where little is known: no data, or no fault that data show."""

import contextlib
import copy

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import fedvitals as fv

ROUNDS, CLIENTS, CULPRIT = 11, 8, "c4"


def federate(path, *, with_data=True, noise=0.0, negated_since=None):
    """Train on digits, with one client of noisy inputs, or one that turns its model round before its scope ends."""
    torch.manual_seed(3)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    data = {f"c{i}": (x[i::CLIENTS], y[i::CLIENTS]) for i in range(CLIENTS)}
    data[CULPRIT] = (data[CULPRIT][0] + noise * torch.randn_like(data[CULPRIT][0]), data[CULPRIT][1])
    norm = torch.nn.BatchNorm1d
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), norm(48), torch.nn.ReLU(), torch.nn.Linear(48, 10))
    with fv.Monitor(path, run="plain", strict=True) as monitor:
        for round_index in range(ROUNDS):
            locals_ = []
            with monitor.round(round_index, model):
                for name, (inputs, labels) in data.items():
                    local = copy.deepcopy(model)
                    optimizer = torch.optim.Adam(local.parameters(), 0.003)
                    known = {"data": (inputs, labels), "loss": cross_entropy} if with_data else {}
                    with monitor.client(name, local, **known):
                        for batch in torch.randperm(len(labels)).split(20):
                            optimizer.zero_grad()
                            cross_entropy(local(inputs[batch]), labels[batch]).backward()
                            optimizer.step()
                        if negated_since is not None and round_index >= negated_since and name == CULPRIT:
                            pairs = zip(local.parameters(), model.parameters(), strict=True)
                            vectors = [2 * start.detach() - own.detach() for own, start in pairs]
                            torch.nn.utils.vector_to_parameters(
                                torch.cat([v.flatten() for v in vectors]), local.parameters()
                            )
                    locals_.append(local.state_dict())
                means = {n: torch.stack([own[n].float() for own in locals_]).mean(0) for n in locals_[0]}
                model.load_state_dict({n: mean.to(locals_[0][n].dtype) for n, mean in means.items()})
    return {finding.where.node for finding in monitor.findings() if finding.severity != "note"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "culprits"),
    [
        ({"with_data": False, "noise": 0.5}, {CULPRIT}),
        ({"negated_since": 4}, {CULPRIT}),
        ({"with_data": False}, set()),
        ({}, set()),
    ],
    ids=["noisy inputs, no data given", "turned round, data like the others'", "healthy, no data given", "healthy"],
)
def test_who_is_named(tmp_path, changes, culprits):
    assert federate(tmp_path / "runs.db", **changes) == culprits


@pytest.mark.parametrize("caught", [True, False])
def test_a_client_that_raises_before_it_trains_is_no_free_rider(caught):
    """It sent nothing. Where its exception ends the round, that is one problem, and it has the client's name."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    inputs, labels = torch.randn(6, 16, 4), torch.randint(0, 2, (6, 16))
    outside = pytest.raises(RuntimeError, match="no disk") if not caught else contextlib.nullcontext()
    with fv.Monitor(None, run="plain", strict=True) as monitor, outside:
        for round_index in range(4):
            with monitor.round(round_index, model):
                for i in range(6):
                    local = copy.deepcopy(model)
                    optimizer = torch.optim.SGD(local.parameters(), 0.1)
                    inside = contextlib.suppress(RuntimeError) if caught else contextlib.nullcontext()
                    with inside, monitor.client(f"c{i}", local):
                        if (round_index, i) == (3, 5):
                            raise RuntimeError("no disk")
                        cross_entropy(local(inputs[i]), labels[i]).backward()
                        optimizer.step()
    (finding,) = [finding for finding in monitor.findings() if finding.severity != "note"]
    assert (finding.issue, finding.where.node) == ("CRASH", "c5")
    assert ("which ended the round" in finding.message, finding.severity == "critical") == (not caught, not caught)
