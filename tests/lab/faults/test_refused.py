# SPDX-License-Identifier: Apache-2.0
"""Faults that cannot be meant are refused: where they are made, or before the run that they do not fit."""

from __future__ import annotations

import math

import pytest
from torch import nn

from fedvitals.errors import ConfigError
from fedvitals.lab.faults import table as ill
from fedvitals.lab.faults.fault import Fault, require_within
from fedvitals.lab.state import StateLayout
from support.lab.faulty_training import CLASSES, KINDS, LAYOUT, NODES, STEPS, fault_of, first_model

IMPOSSIBLE = [
    ("label_noise", {"rate": 0}, "rate of label_noise cannot be 0: it must be a number, above 0 up to 1"),
    ("label_noise", {"rate": 1.5}, "1.5"),
    ("label_noise", {"rate": "much"}, "a number"),
    ("label_noise", {"rate": float("nan")}, "nan"),
    ("label_flip", {"source": 1}, "another class than its source"),
    ("missing_classes", {"missing": []}, "a list of classes"),
    ("input_scale", {"factor": 1}, "another number than 1"),
    ("dominant_client", {"factor": 1}, "2 or more"),
    ("not_finite", {"value": "NaN"}, '"nan", "inf" or "-inf"'),
    ("not_finite", {"at_step": -1}, "0 or more"),
    ("wrong_learning_rate", {"factor": -1}, "above 0"),
    ("vanishing_initialisation", {"factor": 2.0}, "below 1"),
    ("exploding_initialisation", {"factor": 0.5}, "above 1"),
    ("dead_units", {"share": 2}, "from 0|above 0 up to 1"),
    ("stale_update", {"rounds": 0}, "1 or more"),
    ("duplicate", {"of": "c1"}, "another node"),
    ("dtype_mismatch", {"dtype": "int3"}, "float16"),
    ("straggler", {"factor": 0.5}, "above 1"),
    ("server_rate_too_high", {"factor": 0.5}, "above 1"),
    ("server_rate_too_low", {"factor": 1.5}, "below 1"),
    ("server_rate_too_low", {"nodes": ["c1"]}, r"\[\"server\"\], or left out"),
    ("overfitting", {"since": 2}, "a setting of the whole run"),
    ("overfitting", {"until": 2}, "lasts the whole run"),
    ("zero_weight", {"nodes": ["c1"]}, "a setting of the whole run"),
    ("crash", {"since": -1}, "0 or more"),
    ("crash", {"since": 5, "until": 4}, r"5 \(since\) or more"),
    ("crash", {"since": 1.5}, "0 or more"),
]


@pytest.mark.parametrize(("kind", "settings", "words"), IMPOSSIBLE, ids=lambda value: str(value)[:40])
def test_impossible_strengths_are_refused(kind, settings, words):
    with pytest.raises(ConfigError, match=words):
        fault_of(kind, **settings)


def test_nodes_are_a_list_of_names():
    with pytest.raises(ConfigError, match=r'list of names; got \'c1\'\. Write \["c1"\] for this one node, or "all"'):
        KINDS["crash"](nodes="c1")
    with pytest.raises(ConfigError, match="at least one name"):
        KINDS["crash"](nodes=[])
    with pytest.raises(TypeError, match="nodes"):
        KINDS["crash"]()  # nobody is struck by accident
    assert KINDS["crash"](nodes=["c1"]).nodes == ("c1",)


def checked(fault, **more):
    ill.check_fault(
        fault, **{"nodes": NODES, "layout": LAYOUT, "iterations": STEPS, "rounds": 5, "classes": CLASSES, **more}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_exists_is_accepted(kind):
    checked(fault_of(kind))


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("crash", {"nodes": ["c11"]}, r"no node 'c11' for the fault crash\. Known: c0, c1, .*c5\. Did you mean 'c1'"),
        ("duplicate", {"of": "c9"}, "no node 'c9'"),
        ("crash", {"since": 5}, "begins in round 5; the run has the rounds 0 to 4"),
        ("crash", {"at_step": 3}, "waits for step 3; a client-round has steps 0 to 2"),
        ("frozen_layer", {"layer": 3}, "no layer 3 .*0 = 0.weight, 1 = 1.weight, 2 = 3.weight"),
        ("frozen_layer", {"layer": -4}, "no layer -4"),
        ("not_finite", {"layer": "0.weigth"}, r"Known: 0.weight, 0.bias, .*Did you mean '0.weight'"),
        ("frozen_layer", {"layer": "1.running_mean"}, "no layer '1.running_mean'"),
        ("dead_units", {"layer": "3.bias"}, "'3.bias' has no bias .*With one: 0.weight, 1.weight, 3.weight"),
        ("label_flip", {"target": 5}, "no class 5 for label_flip: the data set has the classes 0 to 4"),
        ("missing_classes", {"missing": [7]}, "no class 7"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(kind, settings, words):
    fault = KINDS[kind](**{"nodes": ["c1"], **settings}) if kind != "dead_units" else fault_of(kind, **settings)
    with pytest.raises(ConfigError, match=words):
        checked(fault)


def test_many_nodes_are_not_listed_and_epochs_have_no_known_steps():
    with pytest.raises(ConfigError, match=r"Known: c0 to c99\."):
        checked(fault_of("crash", since=0), nodes=[f"c{i}" for i in range(100) if i != 1] + ["c99"])
    checked(fault_of("crash", at_step=1000), iterations=None)


def test_a_model_without_batch_norm_or_bias_is_named():
    plain = StateLayout.of(nn.Sequential(nn.Linear(8, 4, bias=False)))
    with pytest.raises(ConfigError, match=r"no batch norm.*ResNet-18"):
        checked(fault_of("broken_batch_norm"), layout=plain)
    with pytest.raises(ConfigError, match=r"'0.weight' has no bias.*With one: none"):
        checked(fault_of("dead_units"), layout=plain)
    with pytest.raises(ConfigError, match="no layer 5"):  # also where nobody has checked before
        first_model(fault_of("dead_units", layer=5))


def test_the_range_is_told_as_it_is():
    class Odd(Fault, frozen=True):
        strength: float = 1.0

    for limits, words in (
        (((2,), {}), "2 or more"),
        (((2,), {"above": True}), "above 2"),
        (((2, 3), {}), "from 2 up to 3"),
        (((1, 3), {"above": True}), "above 1 up to 3"),
    ):
        with pytest.raises(ConfigError, match=f"it must be a number, {words}"):
            require_within(Odd(nodes="all"), "strength", *limits[0], **limits[1])
    with pytest.raises(ConfigError, match="inf"):
        require_within(Odd(nodes="all", strength=math.inf), "strength", 0)
