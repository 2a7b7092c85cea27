# SPDX-License-Identifier: Apache-2.0
"""Samples listed to the owner of a client's data: the wrong labels come first, and nothing is changed or sent."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv
from fedvitals.errors import ConfigError

WRONG = 0.3  # of the client's labels


@pytest.fixture(scope="module")
def client():
    """A model that learnt from others, and a client's data, of which some labels are wrong: (model, x, y, places)."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(100):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[600:]), y[600:]).backward()
        optimizer.step()
    own, generator = y[:600].clone(), torch.Generator().manual_seed(1)
    wrong = torch.rand(600, generator=generator) < WRONG
    own[wrong] = (own[wrong] + torch.randint(1, 10, (int(wrong.sum()),), generator=generator)) % 10
    return model, x[:600], own, {*wrong.nonzero()[:, 0].tolist()}


def test_wrong_labels_come_first(client):
    model, x, y, wrong = client
    listed = fv.suspect_samples(model, (x, y), k=len(wrong))
    assert {sample.index for sample in listed[:20]} <= wrong
    assert len({sample.index for sample in listed} & wrong) >= 0.9 * len(wrong)
    assert [sample.margin for sample in listed] == sorted((sample.margin for sample in listed), reverse=True)
    assert all(sample.label == y[sample.index] != sample.guess for sample in listed)


def test_a_model_that_agrees_lists_little(client):
    model, x, _, _ = client
    with torch.no_grad():
        guesses = copy.deepcopy(model).eval()(x).argmax(1)
    assert fv.suspect_samples(model, (x, guesses)) == []


def test_inputs_that_are_not_finite_come_before_all(client):
    model, x, y, _ = client
    broken = x.clone()
    broken[7, 3] = torch.nan
    first, second = fv.suspect_samples(model, DataLoader(TensorDataset(broken, y), 16, shuffle=True), k=2)
    assert (first.index, first.margin) == (7, float("inf"))
    assert second.margin <= 1


def test_model_data_and_random_streams_stay_as_they_are(client):
    model, x, y, _ = client
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    state, before = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    fv.suspect_samples(model, loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_no_classifier_is_refused(client):
    _, x, _, _ = client
    with pytest.raises(ConfigError, match="needs a classifier"):
        fv.suspect_samples(nn.Linear(64, 1), (x, torch.rand(600)))
    with pytest.raises(ConfigError, match="at least 1 sample"):
        fv.suspect_samples(nn.Linear(64, 10), (x, torch.zeros(600, dtype=torch.long)), k=0)
