# SPDX-License-Identifier: Apache-2.0
"""The verdict in words is what the findings say: other findings, another sentence."""

import dataclasses

import pytest

from fedvitals.diagnosis.cases import cases
from fedvitals.diagnosis.finding import finding
from fedvitals.diagnosis.issues.table import ISSUES
from fedvitals.records import Action, Finding, Metric, Run, Suspect, Where
from fedvitals.store import open_reader, open_store
from fedvitals.views.case_sentences import OF_CLIENTS, OF_THE_RUN
from fedvitals.views.cases import case_key, case_of, cases_of
from fedvitals.views.verdict import Facts, judge, verdict_of
from support.conditions import holds_for_each

FACTS = Facts(rounds=40, clients=20, detectors=34, accuracy=0.87)
HOSTILE = "<img src=x onerror=alert(1)>/~%2F é"


def label_noise(issue="LABEL_NOISE", number=39, confidence=0.96, node="c7", since=5, **more):
    return finding(
        issue, number, more.pop("message", "so it is"), confidence=confidence, node=node, since=since, **more
    )


def verdict(*findings, facts=FACTS, rounds=40):
    return judge(cases(findings, {None: range(rounds)}), facts)


def test_the_sentence_says_who_what_since_when_and_how_sure():
    told = verdict(label_noise())
    assert told.headline == "c7 seems to have wrong labels, since round 5 (96 %)"
    assert (told.state, told.since, told.confidence, told.node, told.issue) == ("ill", 5, 0.96, "c7", "LABEL_NOISE")
    assert told.key == "LABEL_NOISE~c7~~"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"issue": "STRAGGLER"}, "c7 is far slower than the others, since round 5 (96 %)"),
        ({"node": "c12"}, "c12 seems to have wrong labels, since round 5 (96 %)"),
        ({"since": 9}, "c7 seems to have wrong labels, since round 9 (96 %)"),
        ({"confidence": 0.71}, "c7 seems to have wrong labels, since round 5 (71 %)"),
        ({"confidence": 0.999}, "c7 seems to have wrong labels, since round 5 (> 99 %)"),
        ({"confidence": 1.0}, "c7 seems to have wrong labels, since round 5 (> 99 %)"),
        (
            {"issue": "NAN_UPDATE", "confidence": 1.0},
            "c7 sends updates that are NaN or infinite, since round 5 (100 %)",
        ),
        ({"issue": "FROZEN_LAYER", "layer": "0.weight"}, "c7 does not train layer 0.weight, since round 5 (96 %)"),
        (
            {"issue": "EXPLODING_GRADIENT", "node": None, "layer": "3.bias"},
            "Gradients explode, in layer 3.bias, since round 5 (96 %)",
        ),
        ({"issue": "DIVERGENCE", "node": None}, "The loss runs away, since round 5 (96 %)"),
        (
            {"node": None, "group": "edge-2"},
            "Nearly all of edge-2 seem to have wrong labels, since round 5 (96 %)",
        ),
        (
            {
                "issue": "GROUP_LEFT_BEHIND",
                "node": None,
                "suspects": [Suspect(node, 1.0, "badly served") for node in ("c9", "c3", "c11")],
            },
            "The global model does not serve c3, c9 and 1 more, since round 5 (96 %)",
        ),
    ],
)
def test_another_finding_gives_another_sentence(change, words):
    assert verdict(label_noise(**change)).headline == words


@pytest.mark.parametrize(
    ("issue", "inferred", "measured"),
    [
        ("LABEL_NOISE", "c7 seems to have wrong labels", "c7 has wrong labels"),
        ("LABEL_FLIP", "c7 seems to label one class as another", "c7 labels one class as another"),
        ("INPUT_NOISE", "c7 seems to have noisy inputs", "c7 has noisy inputs"),
        ("INPUT_SCALE", "c7 seems to have inputs on another scale", "c7 has inputs on another scale"),
        (
            "WRONG_LEARNING_RATE",
            "c7 seems to train with a learning rate of its own",
            "c7 trains with a learning rate of its own",
        ),
    ],
)
@pytest.mark.parametrize("views", [["data"], ["exact"], ["telemetry"], ["server", "flip"], None, "data", [3]], ids=str)
def test_what_was_measured_is_stated_and_what_was_inferred_seems_so(issue, inferred, measured, views):
    told = verdict(label_noise(issue, more={"views": views}))
    expected = measured if views in (["data"], ["exact"]) else inferred
    assert told.headline == f"{expected}, since round 5 (96 %)"


def test_of_several_clients_a_sentence_states_only_what_was_measured_on_all():
    of_data = {"more": {"views": ["data"]}}
    told = verdict(label_noise(**of_data), label_noise(node="c3", **of_data))
    assert told.headline == "c3 and c7 have wrong labels, since round 5 (96 %)"
    told = verdict(label_noise(**of_data), label_noise(node="c3"))
    assert told.headline == "c3 and c7 seem to have wrong labels, since round 5 (96 %)"


def test_several_culprits_of_one_issue_are_one_sentence():
    told = verdict(*(label_noise(node=f"c{i}", since=i, confidence=0.6 + i / 100) for i in (12, 3, 7, 5)))
    assert told.headline == "c3, c5 and 2 more seem to have wrong labels, since round 3 (up to 72 %)"
    assert told.key == "LABEL_NOISE~c12~~"  # of the surest
    assert "other" not in told.detail


def test_the_worst_decides_and_the_others_are_counted():
    told = verdict(
        label_noise(),
        label_noise("NAN_UPDATE", node="c2", confidence=1.0, since=30),
        label_noise("MISSING_CLASSES", node="c4", severity="note"),
        label_noise("STRAGGLER", node="c9", number=10),
    )
    assert told.headline == "c2 sends updates that are NaN or infinite, since round 30 (100 %)"
    assert told.detail == "Accuracy 87 %. 1 other finding, 1 resolved."


LOST = (
    label_noise("NAN_GRADIENT", node="c5", confidence=1.0, since=6, layer="conv1.weight"),
    label_noise("NAN_WEIGHTS", node=None, confidence=1.0, since=6),
    label_noise("DIVERGENCE", node=None, confidence=1.0, since=6, severity="critical"),
)
CRASHED = label_noise("CRASH", node="c2", confidence=1.0, since=4)


@pytest.mark.parametrize("severity", ["warning", "critical"])
def test_the_headline_says_damage_first_then_who_causes_it_then_others(severity):
    facts = dataclasses.replace(FACTS, accuracy=0.12, accuracies=((4, 0.4), (5, 0.52), (6, 0.1), (39, 0.12)))
    told = verdict(dataclasses.replace(CRASHED, severity=severity), *LOST, facts=facts)
    assert told.headline == "The model was lost in round 6: NaN from c5. c2 also crashes since round 4."
    assert (told.state, told.node, told.since) == ("ill", "c5", 6)
    assert told.detail == "Accuracy fell from 52 % to 12 %. 2 consequences."


def test_a_model_stays_lost_when_its_culprit_has_left():
    gone = dataclasses.replace(LOST[0], where=dataclasses.replace(LOST[0].where, round=6))
    assert verdict(gone, *LOST[1:]).headline == "The model was lost in round 6: NaN from c5."
    both = label_noise("NAN_UPDATE", node="c9", confidence=1.0, since=8)
    assert verdict(*LOST, both).headline == "The model was lost in round 6: NaN from c5 and c9."


def test_a_model_that_diverges_is_not_called_lost():
    manipulated = label_noise("BYZANTINE", node="c3", confidence=0.95, since=4)
    manipulated.evidence["causes"] = [["sign_flip", 0.9]]
    told = verdict(manipulated, label_noise("DIVERGENCE", node=None, since=7, severity="critical"), CRASHED)
    words = "manipulated updates (sign flipped?) from c3 since round 4 (95 %)"
    assert told.headline == f"The model diverges since round 7: {words}. c2 also crashes since round 4."
    assert verdict(manipulated).headline == "c3 sends manipulated updates (sign flipped?), since round 4 (95 %)"


def test_of_equally_severe_troubles_what_harms_the_learning_comes_first():
    crashed = dataclasses.replace(CRASHED, severity="critical")
    told = verdict(crashed, label_noise("NAN_UPDATE", node="c5", confidence=1.0, since=6))
    assert told.headline.startswith("c5 sends updates that are NaN")


def test_the_list_of_findings_begins_with_the_headlines_case():
    unusual = label_noise("GRADIENT_SCALE", node=None, since=0, confidence=0.99)
    dead = label_noise("DEAD_UNITS", node=None, layer="0.weight", since=1, confidence=0.9)
    found = [unusual, dataclasses.replace(CRASHED, severity="warning"), label_noise(), dead]
    listed = cases(found, {None: range(40)})
    assert [case.issue for case in listed] == ["LABEL_NOISE", "DEAD_UNITS", "CRASH", "GRADIENT_SCALE"]
    for count in range(1, 4):
        assert verdict(*found[:count]).issue == cases(found[:count], {None: range(40)})[0].issue


@pytest.mark.parametrize(
    ("suspects", "failed", "words"),
    [
        (["RuntimeError"] * 8, 8, "Rounds produce no new model (8 clients fail: RuntimeError)"),
        (["RuntimeError", "MemoryError"], 2, "Rounds produce no new model (2 clients fail)"),
        (["not there"], 1, "Rounds produce no new model (1 client fails: not there)"),
        ([], 0, "Rounds produce no new model"),
        ([], None, "Rounds produce no new model"),
    ],
)
def test_rounds_without_a_new_model_name_the_cause(suspects, failed, words):
    accused = [Suspect(f"c{number}", 0.1, reason) for number, reason in enumerate(suspects)]
    more = {} if failed is None else {"failed": failed}
    empty = label_noise("NOTHING_AGGREGATED", node=None, since=4, confidence=1.0, suspects=accused, more=more)
    assert verdict(empty).headline == f"{words}, since round 4 (100 %)"


def test_a_long_message_is_cut_after_a_sentence_or_a_word():
    first = "Gradients explode, and changing a weight by its own size would change the loss by forty times that of one."
    message = f"{first} The gradient scale (GSC) is 30.25, and it goes on for {'many ' * 10} words."
    assert len(message) > 200
    assert verdict(label_noise(message=message)).why == first
    without_end = verdict(label_noise(message="several words " * 30)).why
    assert without_end.endswith(("several…", "words…"))
    assert len(verdict(label_noise(message="x" * 300)).why) == 200


def test_what_was_seen_does_not_begin_with_the_headline_again():
    drift = verdict(label_noise("CLIENT_DRIFT", node=None, message="Clients pull apart: each ends with its own task."))
    assert (drift.headline, drift.why) == ("Clients pull apart, since round 5 (96 %)", "Each ends with its own task.")


def test_a_finding_of_a_users_own_speaks_in_its_own_words():
    own = Finding(Where("", 39, "c7"), 0.0, "MY_RULE", "warning", 0.8, "c7 is\nodd.", {"since": 20})
    assert verdict(own).headline == "c7 is odd, since round 20 (80 %)"
    long = dataclasses.replace(own, message="word " * 200)
    assert len(verdict(long).headline) < 300


def test_healthy_is_said_as_plainly():
    told = verdict()
    assert told.state == "healthy"
    assert told.headline == "Healthy. 40 rounds, 20 clients: no finding."
    assert "0.4 false alarms are to be expected" in told.detail
    strict = dataclasses.replace(FACTS, false_alarms=0.1, rounds=100)
    assert "0.1 false alarms are to be expected" in verdict(facts=strict).detail


def test_what_could_not_be_seen_is_said_with_healthy():
    assert "Wrong labels cannot be seen" in verdict(facts=dataclasses.replace(FACTS, accuracy=0.2)).detail
    assert "fewer than 4 clients" in verdict(facts=dataclasses.replace(FACTS, clients=3)).detail


def test_notes_and_what_is_over_never_make_a_run_ill():
    note = verdict(label_noise(severity="note", confidence=0.43))
    assert note.state == "healthy"
    assert "c7" not in note.headline + note.detail  # nobody is named for a note, unasked
    over = verdict(label_noise(number=9))
    assert over.state == "watch"
    assert over.headline == ("Nothing serious now. Seen in rounds 5 to 9: c7 seems to have wrong labels (96 %)")
    assert verdict(label_noise(number=9, severity="note")).state == "healthy"


def test_who_is_hardly_suspected_any_more_does_not_make_a_run_ill():
    told = verdict(label_noise(number=20), label_noise(number=39, severity="note", confidence=0.24))
    assert told.state == "watch"
    assert "24 %" in told.headline


def test_muted_cases_do_not_decide_and_acknowledged_ones_say_so():
    key = "LABEL_NOISE~c7~~"
    muted = verdict(label_noise(), facts=dataclasses.replace(FACTS, muted=frozenset({key})))
    assert muted.state == "healthy"
    assert "(1 muted)" in muted.headline
    seen = verdict(label_noise(), facts=dataclasses.replace(FACTS, acknowledged=frozenset({key})))
    assert seen.state == "ill"
    assert seen.headline.endswith("since round 5 (96 %, acknowledged)")


@pytest.mark.parametrize(
    ("change", "state", "words"),
    [
        ({"rounds": 0}, "warming", "Waiting for round 0."),
        ({"rounds": 0, "gaps": ("no client was measured",)}, "warming", "Waiting for round 0."),
        ({"rounds": 2}, "warming", "Too early to judge: 2 rounds so far"),
        ({"rounds": 2, "finished": True}, "warming", "Too short to judge: 2 rounds."),
        ({"detectors": 0}, "unjudged", "Not judged: no detector looked at this run."),
    ],
)
def test_no_verdict_yet_is_a_state_of_its_own(change, state, words):
    told = verdict(facts=dataclasses.replace(FACTS, **change))
    assert told.state == state
    assert words in told.headline


def test_an_exact_finding_makes_a_run_ill_in_its_first_round():
    told = verdict(label_noise("NAN_UPDATE", 0, 1.0, since=0), facts=dataclasses.replace(FACTS, rounds=1), rounds=1)
    assert told.state == "ill"


@pytest.mark.parametrize(
    ("accuracy", "words"),
    [(0.37, "Accuracy fell from 66 % to 37 %."), (0.63, "Accuracy 63 %."), (0.9, "Accuracy 90 %.")],
)
def test_the_detail_tells_what_the_model_has_lost_since(accuracy, words):
    facts = dataclasses.replace(FACTS, accuracy=accuracy, accuracies=((4, 0.66), (5, 0.6), (39, accuracy)))
    assert verdict(label_noise(), facts=facts).detail == words


def test_the_detail_tells_shares_and_what_was_done_and_invents_nothing():
    facts = dataclasses.replace(FACTS, samples={"c7": 50.0, "c1": 150.0, "c2": 800.0})
    assert verdict(label_noise(), facts=facts).detail == "Accuracy 87 %. c7 holds 5 % of the data."
    why = "The loss is better than the trend before it."
    done = Action(Where("", 9, "c7"), 1.0, "LABEL_NOISE c7", "quarantine", "c7", {"why": why}, "applied")
    told = verdict(label_noise(), facts=dataclasses.replace(facts, actions=[done]))
    assert "Quarantine of c7 in force since round 9: The loss is better than the trend before it." in told.detail
    of_another = dataclasses.replace(done, finding="LABEL_NOISE c8")
    assert "Quarantine" not in verdict(label_noise(), facts=dataclasses.replace(facts, actions=[of_another])).detail


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.code)
@pytest.mark.parametrize("place", [{"node": "c7"}, {"node": None}, {"node": None, "group": "ring-1"}], ids=str)
def test_every_issue_can_be_said_of_a_client_a_group_and_the_run(issue, place):
    told = verdict(label_noise(issue.code, severity="warning", **place))
    assert "{" not in told.headline
    assert told.headline.endswith("since round 5 (96 %)")
    if place.get("node"):
        assert "c7" in told.headline


def test_the_words_are_of_known_issues():
    known = {issue.code for issue in ISSUES}
    assert known >= OF_CLIENTS.keys() | OF_THE_RUN.keys()


def test_keys_are_one_part_of_a_path_and_tell_cases_apart():
    hostile = cases(
        [
            label_noise(node=HOSTILE, layer="a~b/c"),
            label_noise("STRAGGLER", node=HOSTILE, layer="a"),
            label_noise(node=HOSTILE + "~a"),
        ]
    )
    keys = [case_key(case) for case in hostile]
    assert len(set(keys)) == 3
    assert holds_for_each(key.count("~") == 3 and not set(key) & set("/<> ?#") for key in keys)


def test_from_a_store_as_from_memory(tmp_path):
    path = tmp_path / "runs.db"
    where = dataclasses.replace(label_noise().where, run="r")
    records = [Run("r", "demo", config={"fedvitals": {"detectors": 34, "false_alarms": 2.0}}, started=1.0)]
    records += [
        Metric(Where("r", number, node), float(number), "steps", 5.0)
        for number in range(12)
        for node in ("c1", "c7", HOSTILE)
        if node != "c7" or number % 2
    ]
    records += [Metric(Where("r", 11), 11.0, "accuracy", 0.5), Metric(Where("r", 11, "c1"), 11.0, "samples", 9.0)]
    records += [
        dataclasses.replace(label_noise(number=3, since=3), where=dataclasses.replace(where, round=3)),
        dataclasses.replace(label_noise(), where=Where("r", 11, HOSTILE)),
    ]
    numbered = [dataclasses.replace(record, source="test", sequence=i) for i, record in enumerate(records)]
    with open_store(path) as store:
        store.write(numbered)
    with open_reader(path) as reader:
        told = verdict_of(reader, "r")
        assert told.headline == f"{HOSTILE} seems to have wrong labels, since round 5 (96 %)"
        assert told.detail.startswith("Accuracy 50 %.")
        first = {case.node: case for case in cases_of(reader, "r")}
        assert not first["c7"].still_there  # it took part since, and nothing was found
        assert case_of(reader, "r", case_key(first[HOSTILE])).node == HOSTILE
