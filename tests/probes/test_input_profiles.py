# SPDX-License-Identifier: Apache-2.0
"""Which inputs a client's updates move, compared with its peers over the rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedvitals.probes.input_profiles import ALIKE, APART, InputProfiles
from fedvitals.probes.numpy_updates import ArrayUpdates
from fedvitals.probes.numpy_updates import flatten_and_sum as flatten_arrays
from fedvitals.probes.updates import UpdateTracker, flatten_and_sum
from fedvitals.records import Layer, LayerTable

NODES = [f"c{i}" for i in range(10)]
TABLE = LayerTable(
    "parameter",
    (
        Layer("embedding.weight", (50, 6), "float32"),
        Layer("dense.weight", (8, 40), "float32"),
        Layer("dense.bias", (8,), "float32"),
    ),
)


def rounds_of(raised, rounds=6, seed=1):
    """Squared changes of all clients, [clients, 64] per round; what `raised` names is twenty times as large."""
    stream = np.random.default_rng(seed)
    for _ in range(rounds):
        squares = stream.gamma(4.0, size=(len(NODES), 64))
        for client, inputs in raised.items():
            squares[client, inputs] *= 20
        yield squares


def measure(raised, **settings):
    profiles = InputProfiles()
    for squares in rounds_of(raised, **settings):
        measured = profiles.compare(NODES, squares)
    return {name: [measured[node][name] for node in NODES] for name in (ALIKE, APART)}


def test_clients_that_raise_the_same_inputs_are_alike_and_apart_from_the_others():
    measured = measure({3: slice(0, 4), 7: slice(0, 4)})
    others = [i for i in range(10) if i not in (3, 7)]
    for name, high, low in ((ALIKE, 0.8, 0.6), (APART, 1.4, 1.0)):
        assert min(measured[name][i] for i in (3, 7)) > high
        assert max(measured[name][i] for i in others) < low


def test_a_single_client_is_apart_and_like_nobody():
    measured = measure({5: slice(10, 13)})
    assert measured[APART][5] > 1.4
    assert measured[ALIKE][5] < 0.6


def test_equal_clients_are_like_each_other_and_none_is_apart():
    profiles = InputProfiles()
    measured = profiles.compare(NODES, np.ones((10, 64)))
    assert {node: (own[ALIKE], own[APART]) for node, own in measured.items()} == dict.fromkeys(NODES, (0.0, 0.0))


@pytest.mark.parametrize(("clients", "inputs"), [(3, 64), (10, 8), (0, 64)])
def test_too_few_clients_or_inputs_say_nothing(clients, inputs):
    assert InputProfiles().compare(NODES[:clients], np.ones((clients, inputs))) == {}


def test_who_does_not_move_the_layer_is_not_compared():
    squares = next(rounds_of({}))
    squares[4] = 0.0
    squares[6] *= 1e-6
    squares[8] = np.inf
    assert InputProfiles().compare(NODES, squares).keys() == {*NODES} - {"c4", "c6", "c8"}


def test_many_inputs_are_taken_together_and_find_the_same():
    wide = next(rounds_of({3: slice(0, 4), 7: slice(0, 4)})).repeat(200, axis=1)
    measured = InputProfiles().compare(NODES, wide)
    assert sorted(NODES, key=lambda node: -measured[node][APART])[:2] in (["c3", "c7"], ["c7", "c3"])


def test_torch_and_numpy_measure_the_same_of_the_first_dense_layer():
    stream = np.random.default_rng(0)
    trackers = UpdateTracker(), ArrayUpdates(brief=False, memory=1 << 20)
    measured = []
    for tracker in trackers:
        tracker.know([TABLE])
    for _ in range(2):
        updates = {
            node: [stream.normal(size=layer.shape).astype(np.float32) for layer in TABLE.layers] for node in NODES
        }
        for node, vector, rows in flatten_and_sum({n: [torch.tensor(a) for a in u] for n, u in updates.items()}):
            trackers[0].add(node, vector, rows)
        for node, vector, rows in flatten_arrays(updates):
            trackers[1].add(node, vector, rows)
        measured = [{own.node: own.metrics for own in tracker.close_round()} for tracker in trackers]
    squares = np.stack([(updates[node][1].astype(float) ** 2).sum(axis=0) for node in NODES])
    assert squares.shape == (10, 40)
    for name in (ALIKE, APART):
        by_torch, by_numpy = ([own[node][name] for node in NODES] for own in measured)
        np.testing.assert_allclose(by_torch, by_numpy, rtol=1e-4)
    assert measured[0]["c0"][APART] > 0
