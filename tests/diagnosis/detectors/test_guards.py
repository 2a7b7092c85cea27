# SPDX-License-Identifier: Apache-2.0
"""Guards: each fires in the round of its fault, and on the right client."""

import math

import pytest
import torch
from torch import nn

from fedvitals import lab
from fedvitals.diagnosis.detectors.guards import DETECTORS, misfits
from fedvitals.diagnosis.evidence.update_mismatch import clients_with_altered_updates
from fedvitals.lab.faults.updates import WrongSampleCount
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Event, Metric, Where
from fedvitals.store import MemoryStore
from support.lab.examined import CULPRIT, ONSET, findings_by, first_rounds, watched

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

ILL = {"nodes": CULPRIT, "since": ONSET}
GROUPS = {"hierarchical": lab.Hierarchical(edges=2), "rings": lab.Rings(rings=2)}


def at_once(*faults, within=0, **settings):
    """What is said of the culprit, with the delays in rounds; nobody else may be accused."""
    found = first_rounds(findings_by(watched(*faults, **settings), DETECTORS))
    accused = {node for _, node in found if node is not None}
    assert accused == set(CULPRIT), found
    delays = {issue: number - ONSET for (issue, _), number in found.items()}
    assert max(delays.values()) <= within, found
    return set(delays)


@pytest.mark.parametrize(
    ("fault", "issue"),
    [
        (lab.shape_mismatch(**ILL), "SHAPE_OR_DTYPE_MISMATCH"),
        (lab.dtype_mismatch(**ILL), "SHAPE_OR_DTYPE_MISMATCH"),
        (lab.wrong_sample_count(factor=4.0, **ILL), "WRONG_SAMPLE_COUNT"),
        (lab.wrong_sample_count(factor=0.1, **ILL), "WRONG_SAMPLE_COUNT"),
        (lab.frozen_layer(**ILL), "FROZEN_LAYER"),
        (lab.frozen_layer(layer=-1, **ILL), "FROZEN_LAYER"),
        (lab.duplicate(**ILL), "DUPLICATE_UPDATE"),
        (lab.duplicate(noise=0.1, **ILL), "DUPLICATE_UPDATE"),
        (lab.free_rider(noise=0.02, **ILL), "FREE_RIDER"),
        (lab.free_rider(noise=0.2, **ILL), "FREE_RIDER"),
    ],
)
def test_a_guard_answers_in_the_round_of_the_fault(fault, issue):
    assert at_once(fault, within=1 if issue == "DUPLICATE_UPDATE" else 0) == {issue}


def test_who_sends_back_what_it_got_is_a_free_rider_in_the_first_round():
    found = first_rounds(findings_by(watched(lab.free_rider(nodes=CULPRIT), rounds=2), DETECTORS))
    assert found["FREE_RIDER", "c3"] == 0


class ReportOfC3:
    """A history in which c3 reports that it trained what it sent."""

    def __init__(self, history):
        self._history = history

    def __getattr__(self, name):
        return getattr(self._history, name)

    def latest(self, name, round_index):
        values = dict(self._history.latest(name, round_index))
        if name == "weight.drift" and "c3" in values:
            return values | {"c3": self._history.latest("update.norm", round_index)["c3"]}
        return {n: v for n, v in values.items() if n != "c3" or name not in ("update.differs", "update.factor")}


def test_who_sends_the_servers_step_is_a_free_rider_whatever_it_reports():
    history = ReportOfC3(watched(lab.free_rider(noise=0.02, **ILL)))
    assert {(f.issue, f.where.node) for f in findings_by(history, DETECTORS)} == {("FREE_RIDER", "c3")}


@pytest.mark.parametrize("topology", GROUPS)
def test_a_layer_frozen_inside_a_group_is_seen_in_its_gradients(topology):
    assert at_once(lab.frozen_layer(**ILL), within=2, topology=GROUPS[topology]) == {"FROZEN_LAYER"}


# -- not a number -----------------------------------------------------------------------------------------------------


def test_the_first_nan_has_a_client_a_layer_and_a_step():
    findings = findings_by(watched(lab.not_finite(at_step=2, **ILL)), DETECTORS)
    first = next(f for f in findings if f.issue == "NAN_GRADIENT")
    assert (first.where.round, first.where.node, first.where.layer, first.where.step) == (3, "c3", "dense1.weight", 2)
    # All clients have NaN from the next round on; it is still the first one's.
    assert {f.where.node for f in findings if f.issue == "NAN_GRADIENT"} == {"c3"}
    assert {f.evidence["since"] for f in findings} == {ONSET}
    weights = [f for f in findings if f.issue == "NAN_WEIGHTS"]
    assert [f.where.round for f in weights] == [3, 4, 5, 6, 7]
    assert [s.node for s in weights[-1].suspects] == CULPRIT


@pytest.mark.parametrize("topology", GROUPS)
def test_a_nan_that_spreads_through_a_group_is_its_sources(topology):
    found = first_rounds(findings_by(watched(lab.not_finite(at_step=1, **ILL), topology=GROUPS[topology]), DETECTORS))
    assert found == {("NAN_GRADIENT", "c3"): ONSET, ("NAN_WEIGHTS", None): ONSET}


def test_an_overflow_everywhere_accuses_nobody():
    local = lab.Local(iterations=6, optimizer=lab.sgd(learning_rate=1e30))
    found = first_rounds(findings_by(watched(local=local, rounds=3), DETECTORS))
    assert ("NAN_WEIGHTS", None) in found
    assert {node for _, node in found} == {None}


def test_an_average_of_nans_is_found_in_its_round_without_a_global_model():
    """What Flower lets through in silence (its issue 7645): updates of NaN, averaged to NaN."""
    store, model = MemoryStore(), nn.Linear(4, 2)
    with Monitor(None, sinks=[store], detectors=(), strict=True) as monitor:
        for number in range(3):
            monitor.host.round_begin(number)
            bad = math.nan if number == 2 else 1.0
            update = [torch.randn_like(p) * bad for p in model.parameters()]
            for node in ("a", "b", "c"):
                monitor.host.client_begin(node, model)
                monitor.host.client_end(node)
            monitor.updates(number, {node: [t + i for t in update] for i, node in enumerate(("a", "b", "c"))})
            monitor.host.round_end(number)
        run = monitor.run.id
    found = first_rounds(findings_by(store.history(run), DETECTORS))
    assert found["NAN_WEIGHTS", None] == 2
    assert {("NAN_UPDATE", node) for node in ("a", "b", "c")} <= set(found)


def test_steps_that_a_grad_scaler_left_out_are_no_finding():
    store = MemoryStore()
    values = {"steps": 20.0, "steps.skipped": 2.0, "gradient.nonfinite": 300.0, "weight.nonfinite": 0.0}
    store.write([Metric(Where("r", 0, "c1"), 1.0, name, v, "s", i) for i, (name, v) in enumerate(values.items())])
    assert findings_by(store.history("r"), DETECTORS) == []


# -- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["centralized", "clustered"])
def test_nothing_to_average(topology):
    found = first_rounds(findings_by(watched(lab.zero_weight(), rounds=3, topology=topology), DETECTORS))
    assert found == {("ZERO_TOTAL_WEIGHT", None): 0}


class LessThanNothing(WrongSampleCount, frozen=True):
    def update(self, update, past, stream):
        update.samples = -update.samples


@pytest.mark.parametrize("privacy", [0, 3])
@pytest.mark.parametrize(
    ("fault", "issue"),
    [(LessThanNothing(**ILL), "WRONG_SAMPLE_COUNT"), (lab.shape_mismatch(**ILL), "SHAPE_OR_DTYPE_MISMATCH")],
)
def test_why_an_update_was_refused_is_known_at_every_privacy_level(fault, issue, privacy):
    store = MemoryStore()
    small = {"dataset": lab.synthetic(samples=120), "model": "mlp", "clients": 4, "rounds": 4}
    with Monitor(None, host="lab", sinks=[store], privacy=privacy, detectors=(), strict=True) as monitor:
        lab.run(lab.Experiment(**small, faults=[fault]), monitor, engine="sequential")
    assert first_rounds(findings_by(store.history(monitor.run.id), [misfits])) == {(issue, "c3"): ONSET}


def test_a_pair_of_which_nothing_tells_who_copied_is_reported_as_a_pair():
    store = MemoryStore()
    metrics = [("update.norm", "c1", 2.0), ("update.norm", "c2", 2.0), ("update.norm", "c3", 2.5)]
    metrics += [("update.duplicates", "c1", 1.0), ("update.duplicates", "c2", 1.0)]
    store.write([Metric(Where("r", 0, node), 1.0, name, v, "s", i) for i, (name, node, v) in enumerate(metrics)])
    findings = findings_by(store.history("r"), DETECTORS)
    assert [f.where.node for f in findings] == ["c1", "c2"]
    assert [(s.node, s.score) for s in findings[0].suspects] == [("c1", 0.5), ("c2", 0.5)]


def test_an_edge_whose_members_share_their_model_has_no_duplicates():
    store = MemoryStore()
    groups = Event(Where("r", 0), 1.0, "info", "groups", "", {"edge-0": ["c1", "c2"], "edge-1": ["c3"]}, "s", 0)
    metrics = [("update.norm", "c1", 2.0), ("update.norm", "c2", 2.0), ("update.norm", "c3", 2.5)]
    metrics += [("update.duplicates", "c1", 1.0), ("update.duplicates", "c2", 1.0)]
    told = [Metric(Where("r", 0, node), 1.0, name, v, "s", i) for i, (name, node, v) in enumerate(metrics, 1)]
    store.write([groups, *told])
    assert findings_by(store.history("r"), DETECTORS) == []


def test_telemetry_tells_who_sent_something_else_than_it_trained():
    history = watched(lab.scaling(factor=3.0, **ILL))
    assert [clients_with_altered_updates(history, number) for number in (ONSET - 1, ONSET)] == [set(), {"c3"}]
