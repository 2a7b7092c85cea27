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


def described(node, round_index, renamed=()):
    """The event by which a client describes its data; `renamed`: pairs of a class and the label that it gets."""
    stream = np.random.default_rng(node)
    centres = np.random.default_rng(99).normal(size=(CLASSES, 12)) * 1.5
    y = stream.integers(0, CLASSES, 400)
    x = centres[y] + stream.normal(size=(400, 12))
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
