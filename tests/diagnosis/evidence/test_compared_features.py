# SPDX-License-Identifier: Apache-2.0
"""Which features of a client's table are in another unit or out of range, compared with peers and its own past."""

import numpy as np
import pytest
import torch

from fedvitals.data_change import change_of_data, read_sketch
from fedvitals.diagnosis.evidence.compared_data import compare_data
from fedvitals.diagnosis.evidence.suspect_data import _kind_of
from fedvitals.probes.data_sketch import describe

FEATURES, CLASSES = 8, 3
CENTRES = np.random.default_rng(5).normal(size=(CLASSES, FEATURES))


def table(node, samples=300, shares=None):
    stream = np.random.default_rng(100 + node)
    y = stream.choice(CLASSES, samples, p=shares)
    return CENTRES[y] + stream.normal(size=(samples, FEATURES)) + 4.0, y


def told(x, y, round_index=0):
    event = describe(torch.tensor(x).float(), torch.tensor(y), len(y)).event
    sketch = read_sketch(round_index, event)
    assert sketch is not None
    return sketch


def column(change, *places):
    """What a change of these columns makes of a table."""

    def changed(x, y):
        x = x.copy()
        for place in places:
            x[:, place] = change(x[:, place])
        return x, y

    return changed


def features_by_client(clients=8, **changes):
    sketches = {
        f"c{node}": told(*changes.get(f"c{node}", lambda x, y: (x, y))(*table(node))) for node in range(clients)
    }
    return {node: own.features for node, own in compare_data(sketches).items() if own.features}


@pytest.mark.parametrize("factor", [1000.0, 12.0, 0.05])
def test_a_feature_in_another_unit_is_found_among_peers(factor):
    found = features_by_client(c3=column(lambda x: factor * x, 2))
    assert found.keys() == {"c3"}
    assert found["c3"].keys() == {2}
    assert found["c3"][2] == pytest.approx(factor, rel=0.3)


def test_a_feature_of_many_is_found_among_peers():
    """Beyond sixteen columns, inputs are projected, and each column is described beside that."""

    def wide(node):
        x, y = table(node)
        return np.concatenate([x, x[:, ::-1] ** 2, x * 3, x + 5, x - 2], axis=1), y

    sketches = {f"c{node}": told(*wide(node)) for node in range(7)}
    sketches["c7"] = told(*column(lambda x: 0.01 * x, 33)(*wide(7)))
    found = {node: own.features for node, own in compare_data(sketches).items() if own.features}
    assert found.keys() == {"c7"}
    assert found["c7"].keys() == {33}


def test_a_feature_with_another_origin_is_found_among_peers():
    assert features_by_client(c3=column(lambda x: x + 273.15, 5)) == {"c3": {5: pytest.approx(1.0, abs=0.3)}}


def test_nothing_is_found_in_healthy_tables():
    assert features_by_client() == {}
    assert features_by_client(c3=column(lambda x: 2.5 * x + 3, 2)) == {}  # another population
    outliers = column(lambda x: np.where(np.arange(len(x)) < 6, 1e6, x), 2)
    assert features_by_client(c3=outliers) == {}  # raise the spread, and not the quartiles


def test_all_inputs_on_another_scale_are_no_matter_of_single_features():
    everything = column(lambda x: 20 * x, *range(FEATURES))
    sketches = {f"c{node}": told(*table(node)) for node in range(7)} | {"c7": told(*everything(*table(7)))}
    own = compare_data(sketches)["c7"]
    assert (own.features, _kind_of(own)) == ({}, "input_scale")


def test_clients_with_other_labels_are_not_compared():
    """Of a class that all others hardly have, a feature may well have a narrower distribution elsewhere."""
    others = {f"c{node}": told(*table(node, shares=[0.5, 0.5, 0.0])) for node in range(7)}
    x, y = column(lambda x: 0.02 * x + 3, 2)(*table(7, shares=[0.0, 0.0, 1.0]))
    assert not compare_data({**others, "c7": told(x, y)})["c7"].features


def test_one_client_that_makes_up_its_description_makes_nobody_else_stand_out():
    sketches = {f"c{node}": told(*table(node)) for node in range(5)}
    event = describe(*map(torch.tensor, (table(5)[0].astype(np.float32), table(5)[1])), 300).event
    lie = read_sketch(0, event | {"columns": (np.array(event["columns"]) * 1e6).tolist()})
    assert lie is not None
    assert {node for node, own in compare_data({**sketches, "c5": lie}).items() if own.features} <= {"c5"}


@pytest.mark.parametrize(
    "columns", [[[1.0]] * 3, [[3.0] * 8, [2.0] * 8, [1.0] * 8, [1.0] * 8], [[1e99] * 8] * 4, [[1.0] * 65] * 4, "?"]
)
def test_columns_that_no_table_has_are_not_read(columns):
    event = describe(*map(torch.tensor, (table(5)[0].astype(np.float32), table(5)[1])), 300).event
    assert read_sketch(0, event | {"columns": columns}) is None


NOISE = np.random.default_rng(9).normal(size=300)
CHANGES = {
    "unit": (column(lambda x: 10 * x, 2), "input_scale", (2,)),
    "two units": (column(lambda x: 0.01 * x, 2, 6), "input_scale", (2, 6)),
    "origin": (column(lambda x: x + 273.15, 2), "input_scale", (2,)),
    "unit and origin": (column(lambda x: 1.8 * x + 32, 2), "input_scale", (2,)),
    "rather small": (column(lambda x: 1.3 * x, 2), "inputs", (2,)),
    "noise": (column(lambda x: x + 3 * NOISE, 2), "input_noise", (2,)),
    "dead": (column(lambda x: 0 * x + 7.0, 2), "input_constant", (2,)),
    "sentinels": (column(lambda x: np.where(np.arange(len(x)) % 10 == 0, -999.0, x), 2), "inputs", (2,)),
    "all": (column(lambda x: 10 * x, *range(FEATURES)), "input_scale", ()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_in_single_columns_of_the_same_samples(name):
    change, kind, features = CHANGES[name]
    found = change_of_data(told(*table(0)), told(*change(*table(0)), round_index=3))
    assert (found.kind, found.features, found.since) == (kind, features, 3)


def test_a_regression_has_one_class():
    x, _ = table(0)
    before, after = (told(own, np.zeros(len(own))) for own in (x, column(lambda x: 10 * x, 2)(x, None)[0]))
    found = change_of_data(before, after)
    assert (found.kind, found.features, found.moved) == ("input_scale", (2,), pytest.approx(10, rel=0.01))


def test_columns_that_did_not_vary_before():
    x, y = column(lambda x: 0 * x, 1)(*table(0))
    found = change_of_data(told(x, y), told(*column(lambda x: x + NOISE, 1)(x, y)))
    assert (found.kind, found.features) == ("inputs", (1,))
