# SPDX-License-Identifier: Apache-2.0
"""Wrong data are found in the round in which they appear, by whatever engine clients train."""

import copy

import pytest
import torch
from torch.nn.functional import mse_loss

import fedvitals as fv
from fedvitals import lab

FEDERATION = """
dataset = "digits"
model = {kind = "mlp", hidden = [16]}
clients = 10
rounds = 5
seed = 3
"""
FAULTS = {
    "LABEL_FLIP": '{kind = "label_flip", nodes = ["c3"], source = 1, target = 2, since = 2}',
    "LABEL_NOISE": '{kind = "label_noise", nodes = ["c3"], rate = 0.6}',
    "INPUT_NOISE": '{kind = "input_noise", nodes = ["c3"], deviation = 1.5, since = 2}',
    "INPUT_SCALE": '{kind = "input_scale", nodes = ["c3"], factor = 10.0}',
}


def findings(engine, fault=None, **settings):
    experiment = lab.read(FEDERATION + ("" if fault is None else f"faults = [{fault}]"))
    with fv.Monitor(None, strict=True, **settings) as monitor:
        lab.run(experiment, monitor, engine=engine)
    return [(own.issue, own.where.node, own.where.round) for own in monitor.findings() if own.severity != "note"]


@pytest.mark.parametrize("issue", FAULTS)
def test_it_is_named_at_once(issue):
    since = 2 if "since" in FAULTS[issue] else 0
    told = findings("stacked", FAULTS[issue])
    assert told[0] == (issue, "c3", since)
    assert {(name, node) for name, node, _ in told} == {(issue, "c3")}


def test_every_engine_tells_the_same():
    expected = findings("stacked", FAULTS["LABEL_NOISE"])
    assert findings("sequential", FAULTS["LABEL_NOISE"]) == findings("reuse", FAULTS["LABEL_NOISE"]) == expected


def test_nothing_is_said_of_healthy_data():
    assert findings("stacked") == []


def test_another_scale_is_found_where_only_scalars_may_leave_a_client():
    assert ("INPUT_SCALE", "c3", 0) in findings("stacked", FAULTS["INPUT_SCALE"], privacy=2)


@pytest.mark.parametrize("engine", ["stacked", "reuse"])
@pytest.mark.parametrize(
    ("issue", "fault"),
    [
        ("LABEL_FLIP", FAULTS["LABEL_FLIP"]),
        ("INPUT_NOISE", FAULTS["INPUT_NOISE"]),
        ("MISSING_CLASSES", '{kind = "missing_classes", nodes = ["c3"], missing = [4], since = 2}'),
        ("DISK_FULL", '{kind = "disk_full", nodes = ["c3"], since = 2}'),
    ],
)
def test_what_changed_is_found_where_only_scalars_may_leave_a_client(engine, issue, fault):
    told = findings(engine, fault, privacy=2)
    assert told[0] == (issue, "c3", 2)
    assert {(name, node) for name, node, _ in told} == {(issue, "c3")}


def test_targets_without_classes_are_not_said_to_change_in_classes():
    """Only their checksums are compared, so less is known of how they changed, too."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    data = {f"c{i}": (torch.randn(40, 6), torch.randn(40, 1)) for i in range(5)}
    with fv.Monitor(None, strict=True) as monitor:
        for number in range(6):
            if number == 4:
                data["c3"] = (data["c3"][0], data["c3"][1].flip(0))
            with monitor.round(number, model):
                for name, (x, y) in data.items():
                    local = copy.deepcopy(model)
                    optimizer = torch.optim.SGD(local.parameters(), 0.01)
                    with monitor.client(name, local, data=(x, y), loss=mse_loss):
                        mse_loss(local(x), y).backward()
                        optimizer.step()
    (case,) = [case for case in monitor.findings().cases if case.issue != "NOTHING_AGGREGATED"]  # nobody averages here
    assert (case.node, case.issue) == ("c3", "LABEL_NOISE")
    assert "c3 labels the same inputs differently." in case.newest.message
    assert case.newest.evidence["causes"] == [["label_noise", 0.7], ["label_flip", 0.3]]
