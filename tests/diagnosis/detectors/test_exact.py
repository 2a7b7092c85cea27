# SPDX-License-Identifier: Apache-2.0
"""Exact relations: what an update is, where it is not what was trained, comes before every likeness."""

import pytest
import torch

from fedvitals import lab
from fedvitals.diagnosis.detectors.exact import DETECTORS
from fedvitals.diagnosis.evidence.exact_relations import exact_relations
from fedvitals.diagnosis.examine import examine
from fedvitals.records import Metric, Where
from fedvitals.store import MemoryStore
from support.lab.examined import CULPRIT, HEALTHY, ONSET, findings_by, first_rounds, watched

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

ILL = {"nodes": CULPRIT, "since": ONSET}
BAND = {"nodes": ["c2", "c3", "c5"], "since": ONSET}
TOPOLOGIES = {
    "centralized": {},
    "hierarchical": {"topology": lab.Hierarchical(edges=2)},
    "rings": {"topology": lab.Rings(rings=2)},
}


def names_of(history):
    """(issue, node) of all alarms about clients, by all detectors."""
    return {(f.issue, f.where.node) for f in examine(history) if f.severity != "note" and f.where.node}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    ("fault", "issue", "words"),
    [
        (lab.sign_flip(**ILL), "BYZANTINE", "with its sign flipped"),
        (lab.sign_flip(strength=3.0, **ILL), "BYZANTINE", "with its sign flipped, 3 times as long"),
        (lab.scaling(factor=10.0, **ILL), "BYZANTINE", "scaled by 10"),
        (lab.scaling(factor=0.2, **ILL), "BYZANTINE", "scaled by 0.2"),
        (lab.stale_update(rounds=2, **ILL), "STALE_UPDATE", "to the model of 2 rounds ago"),
    ],
)
def test_one_client_has_one_name_from_the_first_round(fault, issue, words, topology):
    history = watched(fault, **TOPOLOGIES[topology])
    assert names_of(history) == {(issue, "c3")}
    findings = [f for f in findings_by(history, DETECTORS) if f.severity != "note"]
    assert findings[-1].evidence["since"] == ONSET + (fault == lab.scaling(factor=0.2, **ILL))
    assert all(words in f.message and f.confidence > 0.9 for f in findings)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    "fault", [lab.inner_product(**BAND), lab.little_is_enough(deviations=1.5, **BAND), lab.sybils(**BAND)]
)
def test_equal_updates_that_nobody_trained_are_no_copies(fault, topology):
    history = watched(fault, clients=10, **TOPOLOGIES[topology])
    assert names_of(history) == {("BYZANTINE", node) for node in BAND["nodes"]}
    assert first_rounds(findings_by(history, DETECTORS))["BYZANTINE", "c3"] == ONSET


COMPRESSIONS = [lab.fp16(), lab.int8()]


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda compression: type(compression).__name__)
def test_the_same_where_updates_are_compressed(compression):
    colluding = watched(lab.inner_product(**BAND), clients=10, compression=compression)
    assert names_of(colluding) == {("BYZANTINE", node) for node in BAND["nodes"]}
    copied = watched(lab.duplicate(of="c1", **ILL), compression=compression)
    assert {issue for issue, _ in names_of(copied)} == {"DUPLICATE_UPDATE"}


def test_a_copy_of_what_a_peer_trained_stays_a_copy():
    assert names_of(watched(lab.duplicate(of="c1", **ILL))) == {("DUPLICATE_UPDATE", "c3")}


@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize(
    ("fault", "issue"),
    [
        (lab.sign_flip(nodes=["c1"], since=ONSET), "BYZANTINE"),
        (lab.scaling(nodes=["c1"], since=ONSET), "BYZANTINE"),
        (lab.stale_update(nodes=["c1"], since=ONSET), "STALE_UPDATE"),
        (lab.free_rider(nodes=["c1"], since=ONSET), "FREE_RIDER"),
        (lab.gaussian(nodes=["c1"], since=ONSET), "BYZANTINE"),
        (lab.frozen_layer(nodes=["c1"], since=ONSET), "FROZEN_LAYER"),
        (lab.not_finite(nodes=["c1"], since=ONSET), "NAN_GRADIENT"),
        (lab.duplicate(nodes=["c1"], since=ONSET), "DUPLICATE_UPDATE"),
        (lab.scaling(nodes=["c1"], factor=0.0, since=ONSET), "FREE_RIDER"),
    ],
)
def test_two_or_three_clients_are_enough(fault, issue, clients):
    history = watched(fault, clients=clients)
    assert names_of(history) == {(issue, "c1")}
    first = first_rounds(examine(history))
    assert first[issue, "c1"] == ONSET


def test_what_everybody_does_says_nothing_about_one():
    everybody = lab.scaling(nodes=[f"c{i}" for i in range(6)], factor=3.0, since=ONSET)
    assert all(not exact_relations(watched(everybody), number) for number in range(8))


class Clipped(lab.scaling(nodes=["c3"]).__class__, frozen=True):
    """An honest client that clips its own update to a length."""

    def update(self, update, past, stream):
        change = update.state[: past.weights] - update.start[: past.weights]
        short = change * min(1.0, 0.1 / float(change.norm()))
        update.state = torch.cat((update.start[: past.weights] + short, update.state[past.weights :]))


class Sparse(Clipped, frozen=True):
    """An honest client that sends the largest tenth of its update."""

    def update(self, update, past, stream):
        change = update.state[: past.weights] - update.start[: past.weights]
        limit = change.abs().quantile(0.9)
        kept = torch.where(change.abs() >= limit, change, 0.0)
        update.state = torch.cat((update.start[: past.weights] + kept, update.state[past.weights :]))


class Checkpoint(Clipped, frozen=True):
    """An honest client that sends the best model of its epochs, not the last: nearly what it trained at the end."""

    def update(self, update, past, stream):
        change = update.state[: past.weights] - update.start[: past.weights]
        best = change * (0.8 + 0.1 * torch.randn(change.shape, generator=stream))
        update.state = torch.cat((update.start[: past.weights] + best, update.state[past.weights :]))


def test_who_sends_its_best_checkpoint_is_not_critical():
    findings = examine(watched(Checkpoint(nodes=("c3",), every=2), rounds=12))
    assert {f.severity for f in findings if f.where.node} <= {"warning", "note"}


@pytest.mark.parametrize(("habit", "words"), [(Clipped, "as clipping does"), (Sparse, "as sparsification does")])
def test_who_clips_or_sparsifies_alone_is_noted_and_not_accused(habit, words):
    findings = examine(watched(habit(nodes=("c3",)), rounds=10))
    about = [f for f in findings if f.where.node == "c3"]
    assert {f.severity for f in about} == {"note"}
    assert any(words in f.message for f in about)


@pytest.mark.parametrize("name", [*HEALTHY, "int8", "sign", "clipped"])
def test_nothing_healthy_has_a_relation(name):
    more = {"int8": {"compression": lab.int8()}, "sign": {"compression": lab.sign()}}
    more["clipped"] = {"privacy": lab.client_dp(clip=0.1, noise=0.0)}
    history = watched(**(HEALTHY | more)[name])
    assert not [f for f in findings_by(history, DETECTORS) if f.severity != "note"]


def test_the_previous_update_sent_again_is_recognised_by_its_direction_alone():
    store = MemoryStore()
    told = []
    for number in range(3):
        for node in ("c1", "c2", "c3", "c4"):
            same = node == "c2" and number == 2
            told.append(("update.norm", node, number, 2.0 if node == "c2" and number else 2.0 + number))
            if number:
                told.append(("update.cosine_previous", node, number, 1.0 if same else 0.6))
    store.write([Metric(Where("r", n, node), 1.0, name, v, "s", i) for i, (name, node, n, v) in enumerate(told)])
    findings = findings_by(store.history("r"), DETECTORS)
    assert [(f.issue, f.where.node, f.where.round) for f in findings] == [("STALE_UPDATE", "c2", 2)]
    assert "its update of the round before" in findings[0].message


NOISY = {"privacy": lab.client_dp(clip=1.0, noise=0.003)}  # of which telemetry cannot tell who sent what it trained


def test_the_others_turned_round_are_nobodys_copy():
    pair = {"nodes": ["c2", "c5"], "since": ONSET}
    assert names_of(watched(lab.inner_product(**pair), clients=8, **NOISY)) == {
        ("BYZANTINE", "c2"),
        ("BYZANTINE", "c5"),
    }


def test_inverted_labels_of_two_classes_are_no_manipulation():
    """A linear model of two classes trains the others' update turned round: its client reports to have trained it."""
    history = watched(
        lab.label_noise(rate=1.0, **ILL),
        dataset=lab.tabular("breast_cancer"),
        model="logistic",
        clients=6,
        local=lab.Local(iterations=10),
        seed=3,
    )
    assert not [f for f in findings_by(history, DETECTORS) if f.severity != "note"]
    names = names_of(history)
    assert {node for _, node in names} == {"c3"}
    assert "BYZANTINE" not in {issue for issue, _ in names}


def test_a_crowd_shows_itself_pair_by_pair():
    """Of four colluding clients, two or three take part in a round: none of them is the original of the others."""
    band = ["c1", "c4", "c6", "c9"]
    fault = lab.little_is_enough(nodes=band, deviations=1.5)
    history = watched(fault, clients=12, participation=0.5, rounds=14, **NOISY)
    colluding = {node for number in range(14) for node, r in exact_relations(history, number).items() if r.others}
    assert colluding == {*band}
