# SPDX-License-Identifier: Apache-2.0
"""What is concluded from clients' data over the rounds of a run, with data made by hand."""

import numpy as np
import torch
from tests.support.histories import history_of

from fedvitals.diagnosis.evidence.suspect_data import examine_data
from fedvitals.diagnosis.history_cutoff import CutoffRound, HistoryCutoff
from fedvitals.probes.data_sketch import describe
from fedvitals.records import Event, Where

CLASSES, CLIENTS = 5, 10


def described(node, round_index, renamed=(), stuck=0, samples=400, shift=0.0, missing=0.0):
    """The event by which a client describes its data; `renamed`: pairs of a class and the label that it gets; `stuck`:
    how many of its twelve features have one value; `shift`: what is added to all of them; `missing`: share of NaN.
    """
    stream = np.random.default_rng(node)
    centres = np.random.default_rng(99).normal(size=(CLASSES, 12)) * 1.5
    y = stream.integers(0, CLASSES, samples)
    x = centres[y] + stream.normal(size=(samples, 12)) + shift
    x[:, :stuck] = 2.0
    x[stream.random(x.shape) < missing] = np.nan
    y = np.select([y == old for old, _ in renamed], [new for _, new in renamed], y) if renamed else y
    name, text, data = describe(torch.tensor(x).float(), torch.tensor(y), len(y)).remark(0)
    return Event(Where("by hand", round_index, f"c{node}"), float(round_index), "info", name, text, data)


def suspects(events, last):
    """The suspects of the last round, as a live run finds them."""
    nodes = [f"c{node}" for node in range(CLIENTS)]
    horizon = CutoffRound()
    history = HistoryCutoff(history_of({("update.norm", n): [1.0] * (last + 1) for n in nodes}, events), horizon)
    found = {}
    for round_index in range(last + 1):
        horizon.move_to(round_index)
        found = {node: own.kind for node, own in examine_data(history, round_index).suspects.items()}
    return found


def test_data_that_were_usual_are_not_suspect_because_others_changed():
    """Most clients mix up two classes, which makes the one that does not look wrong: it is not."""
    healthy = [described(node, 0) for node in range(CLIENTS)]
    at_once, later = ([described(node, n, ((1, 3), (3, 1))) for node in range(1, CLIENTS)] for n in (0, 2))
    assert suspects([healthy[0], *at_once], 1).keys() == {"c0"}  # nothing else can be known by peers alone
    assert suspects([*healthy, *later], 3) == {}


def test_a_client_that_changes_its_own_labels_is_suspect_although_it_was_usual():
    events = [*(described(node, 0) for node in range(CLIENTS)), described(4, 2, ((3, 1),))]
    assert suspects(events, 3) == {"c4": "label_flip"}


def test_features_that_do_not_vary_are_found_at_the_beginning_and_later():
    others = [described(node, 0) for node in range(CLIENTS) if node != 4]
    assert suspects([*others, described(4, 0, stuck=4)], 1) == {"c4": "input_constant"}
    assert suspects([*others, described(4, 0), described(4, 2, stuck=4)], 3) == {"c4": "input_constant"}
    assert suspects([*others, described(4, 0, stuck=2)], 1) == {}  # a sixth of the features
    assert suspects([*others, described(4, 0, shift=3.0)], 1) == {}  # other inputs, which vary as the others' do


def test_clients_whose_features_do_not_vary_are_no_fault_where_they_are_many_or_have_few_samples():
    many = [described(node, 0, stuck=4 if node < 4 else 0) for node in range(CLIENTS)]
    assert suspects(many, 1) == {}
    others = [described(node, 0) for node in range(CLIENTS) if node != 4]
    assert suspects([*others, described(4, 0, stuck=4, samples=100)], 1) == {}


def test_missing_inputs_are_found_at_the_beginning_and_later():
    others = [described(node, 0) for node in range(CLIENTS) if node != 4]
    assert suspects([*others, described(4, 0, missing=0.3)], 1) == {"c4": "input_missing"}
    assert suspects([*others, described(4, 0, missing=0.6)], 1) == {"c4": "input_missing"}  # and no wrong labels
    assert suspects([*others, described(4, 0), described(4, 2, missing=0.1)], 3) == {"c4": "input_missing"}
    assert suspects([*others, described(4, 0), described(4, 2, missing=0.1), described(4, 4)], 5) == {}
    assert suspects([*others, described(4, 0, missing=0.04)], 1) == {}


def test_missing_inputs_are_no_fault_where_others_have_them_too():
    shares = [0.0, 0.0, 0.1, 0.3, 0.2, 0.05, 0.0, 0.15, 0.0, 0.25]
    assert suspects([described(node, 0, missing=share) for node, share in enumerate(shares)], 1) == {}


def test_labels_changed_at_the_same_inputs_are_wrong_labels_although_some_are_missing():
    events = [*(described(node, 0, missing=0.2 * (node == 4)) for node in range(CLIENTS))]
    assert suspects([*events, described(4, 2, ((3, 1),), missing=0.2)], 3) == {"c4": "label_flip"}
