# SPDX-License-Identifier: Apache-2.0
"""What is said of tables with missing values and columns in another unit, in plain loops."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv

FEATURES, CLASSES = 10, 3
CENTRES = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(9))


class Tolerant(nn.Module):
    """Takes missing values for 0."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.net(torch.nan_to_num(x))


def table(seed, count=160):
    stream = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (count,), generator=stream)
    return CENTRES[y] + torch.randn(count, FEATURES, generator=stream), y


def holes(x):
    return torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.3, torch.nan, x)


def unit(x):
    return torch.cat([x[:, :2], 100 * x[:, 2:3], x[:, 3:]], 1)


def sentinels(x):
    return torch.where((torch.arange(len(x)) % 8 == 0)[:, None] & (torch.arange(FEATURES) == 2), -999.0, x)


def stuck(x):
    return torch.cat([torch.full_like(x[:, :4], 7.0), x[:, 4:]], 1)


def findings(change, onset, model=Tolerant, **settings):
    """The newest finding about each client by issue, where the inputs of c2 change at a round."""
    torch.manual_seed(0)
    net, data = model(), {f"c{i}": table(i) for i in range(6)}
    with fv.Monitor(None, strict=True, **settings) as monitor:
        for r in range(onset + 3):
            if r == onset:
                data["c2"] = change(data["c2"][0]), data["c2"][1]
            states = []
            with monitor.round(r, net):
                for name, own in data.items():
                    local = copy.deepcopy(net)
                    optimizer = torch.optim.SGD(local.parameters(), 0.01)
                    with monitor.client(name, local, data=own, loss=functional.cross_entropy):
                        for x, y in zip(own[0].split(32), own[1].split(32), strict=True):
                            optimizer.zero_grad()
                            functional.cross_entropy(local(x), y).backward()
                            optimizer.step()
                    states.append(local.state_dict())
                net.load_state_dict({key: sum(own[key] for own in states) / len(states) for key in states[0]})
    return {(own.issue, own.where.node): own for own in monitor.findings() if own.severity != "note"}


@pytest.mark.parametrize("privacy", [2, 3])
@pytest.mark.parametrize("onset", [0, 3])
def test_missing_values_are_named(onset, privacy):
    found = findings(holes, onset, privacy=privacy)
    assert found.keys() == {("MISSING_VALUES", "c2")}
    told = found["MISSING_VALUES", "c2"]
    compared = "than before" if onset else "than of the other clients"
    assert told.message == f"30 % of the inputs of c2 are NaN or infinite, far more {compared}."
    assert told.evidence["since"] == onset
    assert told.evidence["levels"]["family"][0] == "inputs"


CHANGES = {
    "unit, at first": (unit, 0, "Feature 2 of c2 is on another scale: .* times the spread that others have."),
    "unit": (unit, 3, "Since round 3, feature 2 of c2 is in another unit, or out of range: 100 times the spread"),
    "sentinels": (sentinels, 3, "The inputs of c2 are on another scale: .* This is so since round 3."),
}


@pytest.mark.parametrize("name", CHANGES)
def test_columns_on_another_scale_are_named(name):
    change, onset, words = CHANGES[name]
    told = findings(change, onset)["INPUT_SCALE", "c2"]
    assert re.match(words, told.message), told.message
    assert "labels changed" not in told.message


def test_at_level_two_a_client_says_that_its_columns_changed():
    assert ("INPUT_SCALE", "c2") in findings(unit, 3, privacy=2)


def test_columns_that_do_not_vary_any_more_are_named():
    told = findings(stuck, 3)["UNUSUAL_CLIENT", "c2"]
    assert told.message.startswith("Since round 3, features 0, 1, 2 and 3 of c2 always have the same value")


@pytest.mark.parametrize("onset", [0, 3])
def test_a_gradient_that_is_nan_because_of_the_data_says_so(onset):
    told = findings(holes, onset, model=lambda: nn.Linear(FEATURES, CLASSES))["NAN_GRADIENT", "c2"]
    assert "The likely origin is its data: 30 % of its inputs are NaN or infinite." in told.message


def test_nothing_is_said_of_healthy_tables():
    assert findings(lambda x: x, 3) == {}
