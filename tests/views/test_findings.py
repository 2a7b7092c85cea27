# SPDX-License-Identifier: Apache-2.0
"""Findings as cases, what detectors may see, and the verbs that show them."""

import contextlib
import json

import numpy as np
import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals.cli.main import main
from fedvitals.diagnosis import history_cutoff
from fedvitals.diagnosis.cases import cases
from fedvitals.diagnosis.compare import compare_findings
from fedvitals.diagnosis.examine import DETECTORS, choose_detectors, examine
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import CutoffRound, HistoryCutoff
from fedvitals.errors import ConfigError
from fedvitals.records import Event, Finding, LayerStats, LayerTable, Metric, Run, Suspect, Where
from fedvitals.records import Layer as LayerOf
from fedvitals.store import MemoryStore, open_reader
from fedvitals.store.read import queries
from support.waiting import PATIENCE


def seen(rounds, node="c1", issue="LABEL_NOISE", confidence=0.8, **more):
    return [finding(issue, number, "it is ill", confidence=confidence, node=node, **more) for number in rounds]


# -- cases ------------------------------------------------------------------------------------------------------------


def test_repeats_are_one_case_with_a_history():
    told = [finding("LABEL_NOISE", r, f"round {r}", confidence=r / 10, node="c1", since=3) for r in (4, 5, 6)]
    (case,) = cases(reversed(told))
    assert (case.issue, case.node, case.since, case.first, case.last) == ("LABEL_NOISE", "c1", 3, 4, 6)
    assert (case.rounds, case.confidences, case.confidence) == ((4, 5, 6), (0.4, 0.5, 0.6), 0.6)
    assert case.newest.message == "round 6"
    assert case.still_there
    assert case.returned == 0
    assert "since round 3, seen in 3 rounds, still there" in str(case)


def test_issue_node_layer_and_group_tell_cases_apart():
    told = [
        *seen([1], "c1"),
        *seen([1], "c2"),
        *seen([1], "c1", "FROZEN_LAYER", layer="0.weight"),
        *seen([1], "c1", "FROZEN_LAYER", layer="2.weight"),
        *seen([1], None, "GROUP_LEFT_BEHIND", group="edge-1"),
        *seen([1], None, "GROUP_LEFT_BEHIND", group="edge-2"),
        *seen([1], None, "DIVERGENCE"),
    ]
    found = cases([*told, *told])
    assert [(case.node or case.group, len(case.keys)) for case in found].count(("c1", 3)) == 1  # one trouble, one case
    assert len(found) == 5


def test_a_client_that_changes_its_cluster_keeps_its_case():
    (case,) = cases([*seen([1, 2], group="cluster-0"), *seen([3], group="cluster-1")])
    assert case.place == "c1, in cluster-1"


def test_worst_first_by_severity_then_sureness_then_onset():
    told = [
        *seen([2], "c1", "MISSING_CLASSES", 1.0),
        *seen([5], "c2", "LABEL_NOISE", 0.7),
        *seen([4], "c3", "LABEL_NOISE", 0.7),
        *seen([6], "c4", "LABEL_NOISE", 0.9),
        *seen([9], "c5", "NAN_UPDATE", 0.5),
    ]
    assert [case.node for case in cases(told)] == ["c5", "c4", "c3", "c2", "c1"]


def test_the_worst_severity_stays_with_the_case():
    (case,) = cases([*seen([1], severity="critical"), *seen([2], severity="note")])
    assert case.severity == "critical"


def test_a_gap_counts_only_rounds_in_which_the_node_took_part():
    """Seen in rounds 1 and 20. Present in between: it was gone and has returned. Absent: nothing can be said."""
    always = {None: list(range(30)), "c1": list(range(30))}
    (case,) = cases(seen([1, 20]), always)
    assert (case.returned, case.still_there) == (1, False)
    assert "returned once, last in round 20" in case.timeline
    rarely = {None: list(range(30)), "c1": [0, 1, 12, 20]}
    (case,) = cases(seen([1, 20]), rarely)
    assert (case.returned, case.still_there) == (0, True)


@pytest.mark.parametrize(("gap", "returned"), [(5, 0), (6, 1)])
def test_the_edge_of_being_quiet(gap, returned):
    (case,) = cases(seen([0, gap + 1]))
    assert case.returned == returned


def test_issues_of_a_users_own_are_cases_too():
    (case,) = cases([Finding(Where("r", 1, "c1"), 0.0, "MINE", "warning", 0.5, "odd")])
    assert (case.issue_entry.code, case.issue_entry.family, case.since) == ("MINE", "user", 1)


# -- what detectors see -----------------------------------------------------------------------------------------------


def history_of(rounds, joins=None, nodes=("c1", "c2")):
    """A run in memory; c9 joins in the last round, or before that of the number given."""
    store, table = MemoryStore(), LayerTable("parameter", (LayerOf("w", (2,), "float32"),))
    records = [Run("r", "r", tables=(table,))]
    for number in range(rounds):
        for node in (*nodes, "c9") if number == (joins or rounds) - 1 else nodes:
            where = Where("r", number, node)
            records += [
                Metric(where, float(number), "update.norm", float(number)),
                Event(where, float(number), "info", "hello", node),
                LayerStats(where, float(number), "gradient", np.full((1, 9), number + 1.0), table.digest),
            ]
    store.write([_numbered(record, i) for i, record in enumerate(records)])
    return store.history("r")


def _numbered(record, sequence):
    from fedvitals.measurements import stamped

    return stamped(record, "test", sequence)


def answers(history, upto):
    """Everything that a history can be asked about rounds 0 to `upto` and beyond."""
    rounds, nodes, matrix = history.matrix("gradient", "count", "w")
    return {
        "rounds": history.rounds(),
        "nodes": history.nodes(),
        "layers": history.layers("gradient"),
        "latest": [dict(history.latest("update.norm", number)) for number in range(upto + 3)],
        "series": [history.series("update.norm", node) for node in ("c1", "c9", None)],
        "matrix": (rounds, nodes, matrix.tolist()),
        "across": [
            (nodes, values.tolist())
            for number in range(upto + 3)
            for nodes, values in [history.across("gradient", ("count",), number)]
        ],
        "events": [event.message for event in history.events()],
        "since": [event.message for event in history.events("hello", 1)],
    }


@pytest.mark.parametrize("finished", [True, False])
def test_a_stored_run_looks_as_it_did_when_it_trained(finished):
    """Up to each round, the whole run shows what the run so far showed: who comes later is not there yet."""
    horizon, now = CutoffRound(), CutoffRound()
    past = HistoryCutoff(history_of(6), horizon, finished=finished)
    for number in range(4):
        live = HistoryCutoff(history_of(number + 1, joins=6), now)
        horizon.move_to(number)
        now.move_to(number)
        for _ in range(2):  # the second time out of what was kept
            assert answers(past, number) == answers(live, number)
        then = answers(past, number)
        assert then["rounds"] == list(range(number + 1))
        assert then["nodes"] == ["c1", "c2"]
        assert then["matrix"][1] == ["c1", "c2"]
        assert then["latest"][number + 1 :] == [{}, {}]
        assert then["series"][1] == ([], [])


def test_detectors_of_a_stored_run_cannot_see_what_came_later():
    def clairvoyant(history, number):
        later = [r for r in (*history.rounds(), *history.series("update.norm", "c1")[0]) if r > number]
        if later or "c9" in history.nodes() or history.latest("update.norm", number + 1):
            yield finding("DIVERGENCE", number, "I see the future", confidence=1.0)

    assert [f.where.round for f in examine(history_of(5), detectors=[clairvoyant])] == [4]  # c9 is there by then


def test_no_further_back_than_live(monkeypatch):
    """A training may be longer than memory is large: a stored run is examined as if it were live."""

    monkeypatch.setattr(history_cutoff, "LOOK_BACK", 3)
    horizon = CutoffRound()
    past = HistoryCutoff(history_of(8), horizon)
    horizon.move_to(5)
    assert past.rounds() == [3, 4, 5]
    assert past.series("update.norm", "c1")[0] == [3, 4, 5]
    assert past.matrix("gradient", "count", "w")[0] == [3, 4, 5]


def test_a_detector_that_fails_is_told_and_the_others_go_on():
    def broken(history, number):
        raise KeyError("oops")

    def fine(history, number):
        return seen([number])

    told = []
    found = examine(history_of(2), detectors=[broken, fine], failed=lambda error, who: told.append(who))
    assert len(found) == 2
    assert told == ["the detector 'broken'"] * 2
    with pytest.raises(KeyError):
        examine(history_of(2), detectors=[broken])


def test_which_detectors_are_meant():
    def mine(history, number):
        return ()

    assert choose_detectors("standard") == DETECTORS
    assert choose_detectors(()) == ()
    assert choose_detectors([mine]) == (mine,)
    assert choose_detectors(["standard", mine]) == (*DETECTORS, mine)
    with pytest.raises(ConfigError, match=r"Unknown set of detectors 'standrad'.*Did you mean 'standard'"):
        choose_detectors("standrad")
    with pytest.raises(ConfigError, match="takes a list of functions"):
        choose_detectors(mine)
    assert fv.Monitor(None).run.config["fedvitals"]["detectors"] == len(DETECTORS)
    assert fv.Monitor(None, detectors=()).run.config["fedvitals"]["detectors"] == 0


# -- live and later ---------------------------------------------------------------------------------------------------


def test_what_differs_between_two_examinations():
    before = [*seen([1, 2, 3]), Finding(Where("r", 1), 0.0, "MINE", "note", 0.5, "own")]
    after = [*seen([1]), *seen([2], confidence=0.7), *seen([4])]
    found = compare_findings(before, after)
    assert (found.same, found.own) == (1, 1)
    assert [f.where.round for f in found.only_stored] == [3]
    assert [f.where.round for f in found.only_now] == [4]
    assert [f.confidence for f in found.changed] == [0.7]
    assert found
    assert not compare_findings(before[:3], before[:3])


def test_what_json_does_to_evidence_is_no_difference():
    one = finding("LABEL_NOISE", 1, "m", confidence=0.5, more={"pair": (1, 2), "far": float("inf"), "by": {3: "x"}})
    stored = finding("LABEL_NOISE", 1, "m", confidence=0.5, more={"pair": [1, 2], "far": "Infinity", "by": {"3": "x"}})
    assert not compare_findings([stored], [one])
    other = finding("LABEL_NOISE", 1, "m", confidence=0.5, more={"pair": (1, 3), "far": float("inf"), "by": {3: "x"}})
    assert compare_findings([stored], [other]).changed == (other,)


# -- the verbs --------------------------------------------------------------------------------------------------------


def looks_ill(history, number):
    """Client c1 from round 2 on, with a note about c0 once, and a suspect."""
    for node, norm in history.latest("steps", number).items():
        if node == "c1" and number >= 2:
            rests = [Number("update.norm", norm, 0.5, 6.1), Number("loss", float("nan"))]
            who = [Suspect("c2", 0.4, "like it")]
            more = {"view": "server", "pair": [1, 2]}
            yield finding(
                "LABEL_NOISE", number, f"{node} [bold]is ill", confidence=0.5 + number / 10, node=node, since=1,
                numbers=rests, suspects=who, more=more,
            )  # fmt: skip
    if number == 0:
        yield finding("MISSING_CLASSES", number, "c0 has few classes", confidence=0.9, node="c0")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("findings") / "runs.db"
    for name, detectors in (("ill", [looks_ill]), ("unjudged", ()), ("well", [lambda history, number: ()])):
        with fv.Monitor(path, name, detectors=detectors, strict=True) as monitor:
            for number in range(5):
                with monitor.round(number):
                    for node in ("c0", "c1", "c2"):
                        one_step(monitor, node)
    return path


def one_step(monitor, node, scale=1.0):
    model = nn.Linear(3, 2)
    with monitor.client(node, model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        (scale * model(torch.randn(4, 3))).square().mean().backward()
        optimizer.step()


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return done.value.code, captured.out, captured.err


def test_the_list_is_short_and_judges(store, capsys):
    code, out, _ = run(capsys, "findings", "ill", "--store", store)
    assert code == 1
    assert "1 finding, 1 still there" in out
    assert "c1: LABEL_NOISE, 90 % sure, since round 1, seen in 3 rounds, still there" in out
    assert "c1 [bold]is ill" in out  # a record's text is no markup
    assert "MISSING_CLASSES" not in out
    assert "1 note is not shown: --notes" in out
    assert "likely causes" not in out
    _, out, _ = run(capsys, "findings", "ill", "--notes", "--store", store)
    assert out.index("LABEL_NOISE") < out.index("MISSING_CLASSES")
    assert "not shown" not in out


def test_a_node_in_full(store, capsys):
    code, out, _ = run(capsys, "findings", "ill", "--node", "c1", "--store", store)
    assert code == 1
    for words in (
        "what      c1 [bold]is ill",
        "where     c1",
        "when      since round 1",
        "how sure  90 %",
        "update norm",
        "other clients",
        "6.1",
        "view      server",
        "suspect   c2 (40 %) like it",
        "likely causes",
        "1. Labels were shuffled",
        "what to do",
        "proved wrong by: A sample of its labels",
    ):
        assert words in out, words
    assert "MISSING_CLASSES" not in out


@pytest.mark.parametrize("kept", [True, False])
def test_a_crash_shows_its_words_and_the_end_of_its_traceback(kept, tmp_path, capsys):
    """Where privacy allows; a line of it moves no cursor and is no markup."""
    path = tmp_path / "runs.db"
    with fv.Monitor(path, "crashed", tracebacks=kept) as monitor:
        for number in range(2):
            with monitor.round(number), contextlib.suppress(ValueError), monitor.client("c0", nn.Linear(3, 2)):
                raise ValueError(f"sample {number} is [red]no image\x1b[2J")
    code, out, _ = run(capsys, "findings", "crashed", "--all", "--store", path)
    assert code == 1
    assert "error     ValueError: sample 1 is [red]no image?[2J" in out
    assert ('raise ValueError(f"sample {number}' in out) == kept
    assert ("none was kept" in out) != kept
    assert "\x1b[2J" not in out
    (case,) = json.loads(run(capsys, "findings", "crashed", "--json", "--store", path)[1])["result"]["cases"]
    assert (case["error"]["event"], case["error"]["round"]) == ("client.failed", 1)
    assert case["error"]["message"].startswith("ValueError: sample 1")
    assert bool(case["error"]["traceback"]) == kept


def test_a_note_is_no_trouble_and_a_suspect_is_concerned(store, capsys):
    code, out, _ = run(capsys, "findings", "ill", "--node", "c0", "--store", store)
    assert code == 0
    assert "MISSING_CLASSES" in out
    assert run(capsys, "findings", "ill", "--node", "c2", "--store", store)[0] == 1


def test_one_round_as_it_stood_then(store, capsys):
    code, out, _ = run(capsys, "findings", "ill", "--round", "2", "--store", store)
    assert code == 1
    assert "70 % sure, since round 1, seen in 1 round, still there" in out
    assert "MISSING_CLASSES" not in out
    assert run(capsys, "findings", "ill", "--round", "1", "--store", store)[0] == 0


def test_all_is_every_card(store, capsys):
    _, out, _ = run(capsys, "findings", "ill", "--all", "--store", store)
    assert out.count("likely causes") == 1
    _, out, _ = run(capsys, "findings", "ill", "--all", "--notes", "--store", store)
    assert out.count("likely causes") == 2


def test_json_has_the_whole_case(store, capsys):
    (alone,) = json.loads(run(capsys, "findings", "ill", "--json", "--store", store)[1])["result"]["cases"]
    assert alone["issue"] == "LABEL_NOISE"
    code, out, _ = run(capsys, "findings", "ill", "--json", "--notes", "--store", store)
    assert code == 1
    told = json.loads(out)
    assert told["verb"] == "findings"
    first, second = told["result"]["cases"]
    assert (first["issue"], first["node"], first["since"], first["rounds"]) == ("LABEL_NOISE", "c1", 1, [2, 3, 4])
    assert first["confidences"] == pytest.approx([0.7, 0.8, 0.9])
    assert first["suspects"] == [{"node": "c2", "score": 0.4, "reason": "like it"}]
    assert first["causes"][0].startswith("Labels were shuffled")
    assert first["evidence"]["numbers"][1]["value"] == "NaN"
    assert (second["severity"], second["still_there"]) == ("note", False)


def test_runs_without_findings(store, capsys):
    code, out, _ = run(capsys, "findings", "well", "--store", store)
    assert code == 0
    assert out.startswith("No findings by 1 detector.\n")
    code, out, _ = run(capsys, "findings", "unjudged", "--store", store)
    assert code == 1
    assert "Not judged: no detector was installed." in out


def test_wrong_use_is_two_with_an_answer(store, capsys, tmp_path, monkeypatch):
    for arguments, words in (
        (("ill", "--node", "c11"), "Unknown node 'c11'"),
        (("ill", "--round", "9"), "has no round 9. It has rounds 0 to 4."),
        (("il",), "Unknown run 'il'"),
    ):
        code, _, err = run(capsys, "findings", *arguments, "--store", store)
        assert code == 2
        assert words in err
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "findings")[0] == 2


def test_show_has_the_cases(store, capsys):
    code, out, _ = run(capsys, "show", "ill", "--store", store)
    assert code == 0
    assert "Health: 1 finding, 1 still there." in out
    assert "c1: LABEL_NOISE, 90 % sure" in out
    assert "No findings by 1 detector." in run(capsys, "show", "well", "--store", store)[1]
    assert "not judged" in run(capsys, "show", "unjudged", "--store", store)[1]
    told = json.loads(run(capsys, "show", "ill", "--json", "--store", store)[1])["result"]
    assert [case["issue"] for case in told["cases"]] == ["LABEL_NOISE"]
    assert told["notes"] == 1


def test_runs_counts_troubles_not_rounds(store):
    with open_reader(store) as reader:
        found = {summary.name: summary.findings for summary in queries.list_runs(reader)}
        rounds = queries.attendance(reader, queries.find_run(reader, "ill"))
    assert found == {"ill": 2, "unjudged": 0, "well": 0}
    assert rounds == {node: [0, 1, 2, 3, 4] for node in (None, "c0", "c1", "c2")}


def test_the_monitor_prints_cases():
    with fv.Monitor(None, detectors=[looks_ill], strict=True) as monitor:
        for number in range(5):
            with monitor.round(number):
                for node in ("c0", "c1", "c2"):
                    if node != "c1" or number != 3:
                        one_step(monitor, node)
        found = monitor.findings(notes=True)
    assert len(found) == 3
    ill = "warning: c1 [bold]is ill (LABEL_NOISE, 90 %; since round 1, seen in 2 rounds, still there)"
    assert str(found).splitlines() == [
        ill,
        "note: c0 has few classes (MISSING_CLASSES, 90 %; since round 0, seen in 1 round, last in round 0)",
    ]
    assert len(monitor.findings()) == 2
    assert str(monitor.findings()).splitlines() == [ill, "1 note is not shown: findings(notes=True)."]
    assert {finding.where.run for finding in found} == {monitor.run.id}


def test_a_client_with_nan_comes_first_and_its_count_is_shown(tmp_path, capsys):
    """Norms are over finite values, so that by them it would look like the others."""
    torch.manual_seed(0)
    with fv.Monitor(tmp_path / "nan.db", "nan", detectors=()) as monitor:
        for number in range(6):
            with monitor.round(number):
                for node in range(6):
                    one_step(monitor, f"c{node}", float("nan") if (node, number) == (3, 4) else 1.0)
    _, out, _ = run(capsys, "show", "nan", "--store", tmp_path / "nan.db")
    table = out[out.index("Clients, those") :].splitlines()
    assert table[2].split()[:6] == ["c3", "∞", "16", "values", "NaN", "or"]


def test_what_is_found_while_the_run_closes_is_not_lost_to_the_detectors_themselves():
    """They take nothing any more when they close, least of all what they say then."""
    from fedvitals.diagnosis.live_detectors import LiveDetectors
    from fedvitals.testing import MemorySink
    from fedvitals.transport.privacy import policy_for
    from fedvitals.transport.sink_writer import SinkWriter

    kept, found = MemorySink(), []
    own = LiveDetectors("r", MemoryStore(), [looks_ill], found.append, lambda error, who: None)
    sink_writer = SinkWriter([kept, own], policy=policy_for("lab", None, 10, None), spill=None, strict=False)
    own._found = sink_writer.emit
    sink_writer._queues[1]._refused = "closed"  # as it is from the beginning of its end
    own.write([Metric(Where("r", 0), 0.0, "time.round", 1.0, "test", 1)])
    assert sink_writer.lost == 0
    assert sink_writer._queues[0].flush(PATIENCE)
    assert [finding.issue for finding in kept.of(Finding)] == ["MISSING_CLASSES"]
    sink_writer.close()
