# SPDX-License-Identifier: Apache-2.0
"""The optimiser's settings, as they are when a client's training begins."""

import pytest
import torch
from torch.nn import functional

from support.models import batches, make, make_data
from support.trained_losses import plain, trained


def test_settings_of_the_optimiser_are_those_of_the_first_step():
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def run(model, _twin):
        for x, y in batches(make_data(), 3):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()

    for probes in ("light", "standard"):
        optimizer.param_groups[0]["lr"] = 0.1
        sink, _ = trained(model, run, probes=probes)
        names = ("learning_rate", "momentum", "weight_decay")
        assert [sink.value(f"optimizer.{name}", node="c0") for name in names] == [0.1, 0.9, 0.01]
    sink, _ = trained(model, plain(optimizer=lambda p: torch.optim.Adam(p, torch.tensor(0.25))))
    assert sink.value("optimizer.learning_rate", node="c0") == 0.25
    assert sink.value("optimizer.momentum", node="c0") == pytest.approx(0.9)
