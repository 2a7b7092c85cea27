# SPDX-License-Identifier: Apache-2.0
"""What could not be judged is counted and said: in objects, stores, verbs, pages. An all-clear says what it is of."""

import json

import pytest

import fedvitals as fv
from fedvitals import lab
from fedvitals.catalog import CATALOG
from fedvitals.diagnosis.abstentions import NOT_JUDGED, Examined, abstentions, examination, unjudged_clients
from fedvitals.diagnosis.evidence.faulty_clients import verdicts
from fedvitals.diagnosis.evidence.scores import FEWEST
from fedvitals.diagnosis.gaps import gaps, statement
from fedvitals.records import Event, Where
from fedvitals.store import open_reader
from fedvitals.store.in_memory import MemoryStore
from fedvitals.testing import tiny_run
from fedvitals.views.findings import FindingsAsked, findings_page
from fedvitals.views.gaps import examination_of, gaps_of
from fedvitals.views.verdict import verdict_of
from support.histories import SMALL, history_of, lab_history
from support.models import mlp
from support.verbs import run as run_verb

CLIENTS = [f"c{i}" for i in range(6)]
MASKED = f"because {NOT_JUDGED['masked']}"


def measured(names, nodes=CLIENTS, rounds=1):
    return {(name, node): [1.0] * rounds for name in names for node in nodes}


# -- who is not judged ------------------------------------------------------------------------------------------------


def test_who_was_seen_and_measured_among_enough_others_is_judged():
    assert abstentions(history_of(measured(["update.norm", "steps", "gradient.norm"])), 0) == []


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (measured(["steps", "gradient.norm", "fit.loss_before"]), "unseen"),
        (measured(["update.norm", "gradient.norm"], CLIENTS[: FEWEST - 1]), "few_clients"),
        (measured(["update.norm", "steps"]), "unmeasured"),
        (measured(["update.norm"]) | {("weight.drift", n): [0.5] for n in CLIENTS}, "transformed"),
    ],
)
def test_each_reason_is_told(values, rule):
    history = history_of(values)
    (abstention,) = abstentions(history, 0)
    assert (abstention.rule, abstention.reason) == (rule, NOT_JUDGED[rule])
    assert set(abstention.nodes) == unjudged_clients(history, 0) == {node for _, node in values}


def test_each_reason_has_its_metric():
    assert {f"diagnosis.not_judged.{rule}" for rule in NOT_JUDGED} == {n for n in CATALOG if "not_judged." in n}


def test_a_client_whose_update_did_not_come_is_not_judged_and_the_others_are():
    values = measured(["steps", "gradient.norm"]) | measured(["update.norm"], CLIENTS[1:])
    (abstention,) = abstentions(history_of(values), 0)
    assert (abstention.rule, abstention.nodes) == ("unseen", ("c0",))


def test_a_client_with_a_tenth_of_the_usual_samples_is_not_judged_unless_its_update_is_large():
    counts = {("update.samples", node): [9.0 if node == "c0" else 100.0] for node in CLIENTS}
    values = measured(["update.norm", "gradient.norm"]) | counts
    (abstention,) = abstentions(history_of(values), 0)
    assert (abstention.rule, abstention.nodes) == ("few_samples", ("c0",))
    assert abstentions(history_of(values | {("update.norm", "c0"): [2.1]}), 0) == []
    assert abstentions(history_of(values | {("update.samples", "c0"): [10.0]}), 0) == []


def test_one_model_that_trains_alone_is_compared_with_nobody():
    assert abstentions(history_of(measured(["steps", "gradient.norm"], ["model"])), 0) == []


def test_a_client_that_failed_is_reported_and_not_counted_as_unjudged():
    history = lab_history(rounds=2, faults=[lab.Crash(nodes=["c1"], since=1)])
    assert abstentions(history, 1) == []


def test_secure_aggregation_is_named_where_the_host_tells_of_it():
    store = MemoryStore()
    for record in (
        Event(Where("r"), 0.0, "info", "updates.transformed", "", {"secure_aggregation": {}}, "e", 0),
        *(fv.Metric(Where("r", 0, node), 0.0, "steps", 1.0, "m", i) for i, node in enumerate(CLIENTS)),
    ):
        store.write([record])
    (abstention,) = abstentions(store.history("r"), 0)
    assert abstention.rule == "masked"


# -- the statement ----------------------------------------------------------------------------------------------------


def test_what_was_looked_at_is_said():
    examined = examination(history_of(measured(["update.norm", "steps", "gradient.norm"], rounds=4)))
    assert str(examined) == "6 clients in rounds 0 to 3, 24 client-rounds; all judged"
    assert examined.sufficient
    assert statement(35, (), examined, silent=True) == f"No findings by 35 detectors, which looked at {examined}."


def test_a_small_part_that_was_not_judged_is_said_and_is_no_gap():
    examined = Examined(10, 0, 9, 100, {"few_clients": 6})
    assert examined.sufficient
    assert gaps([], 0, examined=examined) == ()
    part = "6 of 100 client-rounds (6 %) were not fully judged"
    assert str(examined).endswith(f"{part}, because {NOT_JUDGED['few_clients']}")


@pytest.mark.parametrize(
    "examined",
    [
        Examined(10, 0, 9, 100, {"few_clients": 11}),
        Examined(10, 0, 9, 100, {"few_clients": 6}, newest_judged=False),
        Examined(0, None, None, 0),
    ],
)
def test_much_that_was_not_judged_is_a_gap(examined):
    assert not examined.sufficient
    assert gaps([], 0, examined=examined) == examined.gaps != ()


def test_sinks_that_lost_records_and_clients_outside_of_rounds_are_gaps():
    assert gaps([], 0, sinks={"prometheus": 3}) == ("the sink 'prometheus' has lost 3 records",)
    assert gaps([], 0, outside=["c1"]) == ("c1 trained outside of any round, where nobody is compared",)


def test_a_client_outside_of_any_round_is_said_live_and_later(tmp_path, capsys):
    with fv.Monitor(tmp_path / "runs.db", "outside", machine=False) as monitor:
        with monitor.client("c9", mlp()):
            pass
        for number in range(4):
            with monitor.round(number, mlp()):
                tiny_clients(monitor)
        live = monitor.findings()
    assert any(reason.startswith("c9 trained outside of any round") for reason in live.gaps)
    with open_reader(tmp_path / "runs.db") as reader:
        assert gaps_of(reader, monitor.run.id) == live.gaps
        assert verdict_of(reader, monitor.run.id).state == "unjudged"
    code, out, _ = run_verb(capsys, "findings", "outside", "--store", tmp_path / "runs.db")
    assert code == 1
    assert "c9 trained outside of any round" in out


def tiny_clients(monitor):
    for node in CLIENTS:
        with monitor.client(node, mlp()):
            pass


# -- live, stored, shown ----------------------------------------------------------------------------------------------


def federate(path, name, **changes):
    with fv.Monitor(path, name, machine=False) as monitor:
        lab.run(lab.Experiment(**{**SMALL, "rounds": 4, **changes}), monitor, engine="sequential")
        return monitor.run.id, monitor.findings()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("abstentions") / "runs.db"
    runs = {
        "plain": federate(path, "plain"),
        "secure": federate(path, "secure", secure_aggregation=lab.SecureAggregation()),
    }
    return path, runs


@pytest.mark.parametrize(("name", "share"), [("plain", 0.0), ("secure", 1.0)])
def test_the_share_is_stored_and_the_same_live_stored_and_examined_again(store, name, share):
    path, runs = store
    run, live = runs[name]
    with open_reader(path) as reader:
        history = reader.history(run)
        assert history.series("diagnosis.not_judged", None) == ([0, 1, 2, 3], [share] * 4)
        assert history.series("diagnosis.client_rounds", None)[1] == [6.0] * 4
        assert examination_of(reader, run).examined == live.examined == examination(history)
        assert gaps_of(reader, run) == live.gaps
    assert live.examined.share == share


def test_secure_aggregation_is_never_healthy(store, capsys):
    path, runs = store
    run, live = runs["secure"]
    assert f"none of the 24 client-rounds was fully judged, {MASKED}" in str(live)
    with open_reader(path) as reader:
        told = verdict_of(reader, run)
        assert told.state == "unjudged"
        assert told.headline.count(NOT_JUDGED["masked"]) == 1
        assert set(verdicts(reader.history(run), 3).values()) == {"not judged"}
        page = findings_page(reader, run, FindingsAsked())
        assert (page.not_judged, page.verdict.state) == (1.0, "unjudged")
        assert MASKED in page.examined
    for verb, code in (("findings", 1), ("check", 1), ("show", 0)):
        done, out, _ = run_verb(capsys, verb, "secure", "--store", path)
        assert done == code
        assert out.count(MASKED) == 1, out
        assert "healthy" not in out.lower()
        told = json.loads(run_verb(capsys, verb, "secure", "--json", "--store", path)[1])["result"]
        assert told["examined"]["not_judged_share"] == 1.0
        assert told["examined"]["not_judged"]["masked"] == {"client_rounds": 24, "reason": NOT_JUDGED["masked"]}
    absent = out[out.index("Not measured") :]
    assert "update.norm" in absent
    assert "which secure aggregation hides" in absent
    assert "update.norm: needs a model" not in absent


def test_an_all_clear_names_what_was_looked_at(store, capsys):
    path, _ = store
    words = "6 clients in rounds 0 to 3, 24 client-rounds; all judged"
    for verb in ("findings", "check", "show"):
        code, out, _ = run_verb(capsys, verb, "plain", "--store", path)
        assert code == 0, out
        assert words in out, out
    with open_reader(path) as reader:
        told = verdict_of(reader, store[1]["plain"][0])
    assert told.state == "healthy"
    assert told.headline == "Healthy. 4 rounds, 6 clients: no finding; all judged."


def test_runs_without_the_count_are_judged_as_before(tmp_path):
    monitor = tiny_run(tmp_path / "runs.db", detectors=[lambda history, number: ()], machine=False)
    assert monitor.findings().examined is None
    with open_reader(tmp_path / "runs.db") as reader:
        assert examination_of(reader, monitor.run.id).examined is None
        assert gaps_of(reader, monitor.run.id) == ()
