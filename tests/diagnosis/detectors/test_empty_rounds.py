# SPDX-License-Identifier: Apache-2.0
"""Rounds without a new model are said to be so, with the reason; where all clients fail, there is one case."""

import copy

import pytest
import torch

import fedvitals as fv
from fedvitals import lab
from fedvitals.diagnosis.examine import RULES, examine
from fedvitals.records import Event, Metric, Where
from fedvitals.store import MemoryStore
from support.lab.examined import NETWORK, findings_by, watched
from support.models import CLASSES, mlp

ALL = [f"c{i}" for i in range(8)]


def issues_by_round(history):
    """Each trouble, worst severity aside, with its first words."""
    words = {}
    for finding in findings_by(history, RULES):
        if finding.severity != "note":
            words.setdefault((finding.issue, finding.where.node), (finding.where.round, finding.message))
    return words


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lab.crash, "RuntimeError"),
        (lab.lost_message, "update lost on the way"),
        (lab.drop_out, "not there"),
    ],
)
def test_where_all_clients_fail_there_is_one_case(fault, why):
    history = watched(fault(nodes=ALL, since=2), rounds=6, network=NETWORK)
    text = f"Nothing was aggregated in round 2, because all 8 clients failed: {why}. The model stays as it was."
    assert issues_by_round(history) == {("NOTHING_AGGREGATED", None): (2, text)}
    findings = [f for f in findings_by(history, RULES) if f.severity != "note"]
    assert [f.severity for f in findings] == ["warning", "warning", "critical", "critical"]
    assert {f.evidence["since"] for f in findings} == {2}
    assert sorted(suspect.node for suspect in findings[0].suspects) == ALL
    assert {suspect.reason for suspect in findings[0].suspects} == {why}


def test_where_one_client_is_left_the_others_have_their_own_cases():
    found = issues_by_round(watched(lab.crash(nodes=ALL[1:], since=2), rounds=3))
    assert set(found) == {("CRASH", node) for node in ALL[1:]}


def test_a_failed_secure_aggregation_is_not_called_zero_weight():
    fault = lab.drop_out(nodes=ALL[:5], since=2)
    found = issues_by_round(watched(fault, rounds=4, network=NETWORK, secure_aggregation=lab.SecureAggregation()))
    assert ("ZERO_TOTAL_WEIGHT", None) not in found
    number, text = found["NOTHING_AGGREGATED", None]
    assert number == 2
    assert text.startswith(
        "Nothing was aggregated in round 2, because secure aggregation failed: Of 8 clients asked, 3"
    )


def history_of(*records):
    store = MemoryStore()
    store.write([type(r)(*(getattr(r, f) for f in r.__slots__[:-2]), "s", i) for i, r in enumerate(records)])
    return store.history("r")


def failure(node, number=0, **data):
    return Event(Where("r", number, node), 1.0, "error", "client.failed", "", {"exception": "OSError", **data})


def cohort(number=0, phase="train", **lists):
    return Event(Where("r", number), 2.0, "info", "cohort", "", {"phase": phase, **lists})


def issues(*records):
    findings = examine(history_of(*records), detectors=RULES)
    return {(f.issue, f.where.node): (f.severity, f.message) for f in findings}


def test_a_client_cannot_make_a_round_empty_by_its_word():
    """It says that it failed, and the server has its update."""
    liar = [failure("c1"), Metric(Where("r", 0, "c1"), 1.0, "update.samples", 20.0)]
    assert set(issues(failure("c2"), *liar)) == {("CRASH", "c1"), ("CRASH", "c2")}


def test_where_privacy_hides_who_answered_the_failures_are_not_all():
    assert set(issues(failure("c1"), failure("c2"))) == {("CRASH", "c1"), ("CRASH", "c2")}


def test_a_run_that_never_got_a_model_is_critical_at_once():
    records = [failure("c1", code=2), failure("c2", code=2), cohort(asked=["c1", "c2"], failed=["c1", "c2"])]
    ((key, (severity, text)),) = issues(*records).items()
    assert (key, severity) == (("NOTHING_AGGREGATED", None), "critical")
    assert "all 2 clients failed: OSError" in text


def test_an_evaluation_in_which_all_fail_is_one_case():
    names = ["c1", "c2", "c3"]
    records = [failure(node, phase="evaluate") for node in names]
    records += [cohort(asked=names, answered=names), cohort(phase="evaluate", asked=names, failed=names)]
    assert {key: text for key, (_, text) in issues(*records).items()} == {
        ("CRASH", None): "All 3 clients that were asked to evaluate failed: OSError."
    }


def test_a_strategy_that_waits_is_a_note_and_one_that_gives_up_is_not():
    empty = Event(Where("r", 0), 3.0, "error", "aggregation.failed", "", {"answered": 2})
    waits = issues(cohort(asked=["c1", "c2"], answered=["c1", "c2"]), empty)
    severity, text = waits["NOTHING_AGGREGATED", None]
    assert severity == "note"
    assert "the server made no model of 2 answers (none failed)" in text
    gives_up = issues(failure("c3"), cohort(asked=["c1", "c2", "c3"], answered=["c1", "c2"], failed=["c3"]), empty)
    severity, text = gives_up["NOTHING_AGGREGATED", None]
    assert severity == "critical"  # of the first round
    assert "no model of 2 answers (1 failed: OSError)" in text


def test_a_failure_of_an_earlier_round_is_none_of_this():
    old = failure("c1", 1, round=0)
    assert ("NOTHING_AGGREGATED", None) not in issues(
        old, failure("c2", 1, round=0), cohort(1, asked=["c1", "c2"], answered=["c1", "c2"])
    )


LOOPS = {
    "no step": "because no client's weights change in training",
    "another model's optimiser": "because no client's weights change in training",
    "average not loaded": "although its clients train",
    "as it should be": None,
}


@pytest.mark.parametrize(("mistake", "why"), LOOPS.items())
def test_a_model_that_never_changes_is_said_to_be_so_from_the_fifth_round_on(mistake, why):
    torch.manual_seed(0)
    x, shared = torch.randn(60, 12), mlp()
    y = (x @ torch.randn(12, CLASSES)).argmax(1)
    memory = MemoryStore(everything=True)
    with fv.Monitor(None, sinks=[memory], machine=False, strict=True) as monitor:
        for number in range(6):
            locals_ = []
            with monitor.round(number, shared):
                for index in range(4):
                    local = copy.deepcopy(shared)
                    trained = shared if mistake == "another model's optimiser" else local
                    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
                    with monitor.client(f"c{index}", local):
                        optimizer.zero_grad()
                        torch.nn.functional.cross_entropy(local(x[index::4]), y[index::4]).backward()
                        if mistake != "no step":
                            optimizer.step()
                    locals_.append(local.state_dict())
                if mistake != "average not loaded":
                    shared.load_state_dict({k: torch.stack([s[k] for s in locals_]).mean(0) for k in locals_[0]})
    found = [f for f in findings_by(memory.history(monitor.run.id), RULES) if f.issue == "NOTHING_AGGREGATED"]
    assert [f.where.round for f in found] == ([] if why is None else [4, 5])
    assert {f.message for f in found} <= {f"The global model has not changed since round 0, {why}."}
