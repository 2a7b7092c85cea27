# SPDX-License-Identifier: Apache-2.0
"""Every finding gets a picture of what it rests on: its suspect over the cohort, from what was really measured."""

import dataclasses

import numpy as np
import pytest

from fedvitals import lab
from fedvitals.diagnosis.cases import cases
from fedvitals.diagnosis.evidence.vital_signs import SIGNS
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.issues.table import ISSUES
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Event, Suspect, Where
from fedvitals.store import open_reader, open_store
from fedvitals.views.cases import cases_of
from fedvitals.views.evidence import evidence_of
from fedvitals.views.evidence_signs import COMPARED, LAST_RESORT, TELLING
from fedvitals_studies.faultbank.run import bank_preset


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A reader of a small federation that was really trained, and its run."""
    path = tmp_path_factory.mktemp("evidence") / "runs.db"
    experiment = lab.Experiment(dataset="digits", clients=6, rounds=4, seed=11, local=lab.Local(iterations=5))
    with Monitor(path, probes=bank_preset()) as monitor:  # which measures in every round, whatever it costs
        lab.run(experiment, monitor)
    run = monitor.run.id
    events = [
        Event(Where(run, number, "c1"), 1.0, "warning", "update.lost", "lost", source="test", sequence=number)
        for number in (1, 3)
    ]
    with open_store(path) as store:
        store.write(events)
    with open_reader(path) as reader:
        yield reader, run


def one_case(issue, *numbers, node="c1", rounds=(2, 3), **more):
    found = [finding(issue, n, "made up", confidence=0.9, since=1, node=node, numbers=numbers, **more) for n in rounds]
    return cases(found, {None: range(4)})[0]


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.code)
@pytest.mark.parametrize("node", ["c1", None], ids=["a client", "the run"])
def test_every_issue_has_a_picture(measured, issue, node):
    reader, run = measured
    shown = evidence_of(reader, run, one_case(issue.code, node=node))
    assert shown.plots, "no picture at all"
    for plot in shown.plots:
        values = [v for line in plot.lines for v in line.values if v is not None]
        assert values or plot.band, plot.id
        assert plot.title
        assert plot.scale in ("linear", "log", "log0")
        assert not node or all(line.of == node for line in plot.lines)
    assert (shown.seen, shown.confidences, shown.since) == ([2, 3], [0.9, 0.9], 1)


def test_every_issue_says_what_tells_most_of_it():
    assert set(TELLING) == {issue.code for issue in ISSUES}
    assert {issue.family for issue in ISSUES} <= set(LAST_RESORT)


def test_every_sign_that_clients_are_compared_by_is_known():
    assert set(COMPARED) == set(SIGNS)


@pytest.mark.parametrize("name", SIGNS)
def test_every_such_sign_leads_to_what_was_measured(measured, name):
    reader, run = measured
    shown = evidence_of(reader, run, one_case("LABEL_NOISE", Number(name, 1.0, 0.0, 5.0)))
    first = shown.plots[0]
    assert first.why == "evidence of the finding"
    assert first.lines
    assert first.band is not None
    assert first.band.clients[-1] == 5  # the peers, without the suspect itself


def test_the_line_is_the_suspects_own_course(measured):
    reader, run = measured
    shown = evidence_of(reader, run, one_case("LABEL_NOISE", Number("loss_before", 1.0, 0.0, 5.0)))
    (line,) = shown.plots[0].lines
    rounds, values = reader.history(run).series("fit.loss_before", "c1")
    assert (line.of, line.rounds) == ("c1", rounds)
    assert line.values == pytest.approx(values, rel=1e-6)
    others = [node for node in reader.history(run).nodes() if node not in ("c1", "server")]
    newest = [value for node in others if (value := _last(reader, run, node)) is not None]
    assert shown.plots[0].band.min[-1] == pytest.approx(min(newest), rel=1e-6)
    assert shown.plots[0].band.max[-1] == pytest.approx(max(newest), rel=1e-6)


def _last(reader, run, node):
    found = reader.history(run).series("fit.loss_before", node)[1]
    return found[-1] if found else None


def test_the_furthest_sign_comes_first(measured):
    reader, run = measured
    numbers = (Number("norm", 1.0, 0.0, 2.0), Number("gradient", 1.0, 0.0, -9.0), Number("cosine", 1.0, 0.0, 5.0))
    shown = evidence_of(reader, run, one_case("BYZANTINE", *numbers))
    assert [plot.id for plot in shown.plots] == ["gradient.norm", "update.peers/cosine/only", "update.norm"]


def test_a_limit_is_drawn_where_it_is_one_of_the_sign_itself(measured):
    reader, run = measured
    told = Number("gradient.norm_max", 3.0, 2.5, of="limit")
    assert evidence_of(reader, run, one_case("EXPLODING_GRADIENT", told)).plots[0].threshold.value == 2.5
    of_peers = dataclasses.replace(told, of="peers")
    assert evidence_of(reader, run, one_case("EXPLODING_GRADIENT", of_peers)).plots[0].threshold is None


def test_a_layer_is_shown_where_it_is(measured):
    reader, run = measured
    layer = reader.history(run).layers("gradient")[-2]
    case = one_case("VANISHING_GRADIENT", Number(f"pressure of {layer}", 0.0, 1.0), node=None, layer=layer)
    first = evidence_of(reader, run, case).plots[0]
    assert (first.layer, first.id) == (layer, f"gradient/rms/{layer}")
    assert layer in first.title
    every = reader.history(run).layers("gradient")
    assert [line.of for line in first.lines] == [layer, every[0], every[-1]]  # and where the others stand
    nodes = [node for node in reader.history(run).nodes() if node.startswith("c")]
    _, told, values = reader.history(run).matrix("gradient", "rms", layer)
    middle = np.median(values[-1, [told.index(node) for node in nodes]])
    assert first.lines[0].values[-1] == pytest.approx(middle, rel=1e-6)


def test_a_layer_that_is_not_there_is_no_error(measured):
    reader, run = measured
    case = one_case("VANISHING_GRADIENT", Number("pressure of gone", 0.0, 1.0), node=None, layer="gone")
    assert next(plot.id for plot in evidence_of(reader, run, case).plots) == "gradient.norm"


def test_events_are_counted_round_by_round(measured):
    reader, run = measured
    shown = evidence_of(reader, run, one_case("COMMUNICATION_FAILURE", Number("update.lost", 0.5, 0.0)))
    first = shown.plots[0]
    assert (first.lines[0].rounds, first.lines[0].values) == ([0, 1, 2, 3], [0.0, 1.0, 0.0, 1.0])
    assert first.unit == "events"


def test_of_a_group_the_suspects_are_shown(measured):
    reader, run = measured
    suspects = [Suspect(f"c{i}", 1 - i / 10, "badly served") for i in range(6)]
    told = Number("fit.loss_before", 2.0, 1.0, 4.0)
    shown = evidence_of(reader, run, one_case("GROUP_LEFT_BEHIND", told, node=None, suspects=suspects))
    assert [line.of for line in shown.plots[0].lines] == ["c0", "c1", "c2", "c3"]


def test_strange_evidence_of_a_users_own_detector_is_no_error(measured):
    reader, run = measured
    made = finding("CRASH", 3, "made up", confidence=1.0, node="c1")
    for numbers in (None, 5, ["x"], [{"name": None, "value": "much"}], [{"name": "<b>", "score": "far"}], [{}]):
        odd = dataclasses.replace(made, issue="MINE", evidence={"numbers": numbers, "evidence": {"a": "b"}, "limit": 3})
        assert evidence_of(reader, run, cases([odd])[0]).plots


@pytest.mark.thorough
def test_the_sum_of_evidence_is_shown_with_its_limit(tmp_path):
    path = tmp_path / "runs.db"
    experiment = lab.Experiment(dataset="digits", clients=4, rounds=2, seed=1, local=lab.Local(iterations=2))
    with Monitor(path) as monitor:
        lab.run(experiment, monitor)
    made = []
    for number, total in enumerate((4.0, 7.5)):
        more = {"evidence": {"server": total}, "limit": {"server": 3.5}}
        told = finding("LABEL_NOISE", number, "made up", confidence=0.9, node="c1", more=more)
        where = dataclasses.replace(told.where, run=monitor.run.id)
        made.append(dataclasses.replace(told, where=where, source="test", sequence=number))
    with open_store(path) as store:
        store.write(made)
    with open_reader(path) as reader:
        (case,) = [case for case in cases_of(reader, monitor.run.id) if case.newest.message == "made up"]
        last = evidence_of(reader, monitor.run.id, case).plots[-1]
    assert (last.id, last.threshold.value) == ("evidence", 3.5)
    assert last.lines[0].values == [4.0, 7.5]
