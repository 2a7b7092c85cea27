# SPDX-License-Identifier: Apache-2.0
"""Probes of a user's own: whatever they draw or return, the training and the other probes do not notice."""

import random

import numpy as np
import pytest
import torch

from fedvitals.schedule import every
from support.models import make, make_data, train, watched


def draws(view):
    """Draws from every generator that a training may use."""
    return {"drawn": torch.rand(()) + random.random() + np.random.rand()}  # noqa: NPY002


def one_client(probes):
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    monitor, sink = watched(probes, strict=False)
    model = make("cnn")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with monitor, monitor.round(0, model), monitor.client("c0", model):
        train(model, optimizer, make_data(), 4, lambda _: torch.rand(1))
    state = [torch.get_rng_state(), torch.tensor(random.getstate()[1]), torch.tensor(np.random.get_state()[2])]  # noqa: NPY002
    return [*(p.detach() for p in model.parameters()), *state], sink


@pytest.mark.parametrize("own", [draws, (draws, every(2))])
def test_a_probe_that_draws_random_numbers_leaves_the_generators_as_they_were(own):
    plain, _ = one_client(["standard"])
    probed, sink = one_client(["standard", own])
    assert sink.metrics("user.drawn")
    assert all(torch.equal(a, b) for a, b in zip(plain, probed, strict=True))


@pytest.mark.parametrize("own", [lambda _: 3, (lambda _: 3, every(1))])
def test_a_probe_that_returns_no_mapping_costs_only_itself(own):
    _, sink = one_client(["standard", own])
    (event,) = sink.events("monitor.error")
    assert "A probe returns numbers by name" in event.message
    assert sink.value("update.norm", node="c0") > 0
    assert sink.value("steps", node="c0") == 4
