# SPDX-License-Identifier: Apache-2.0
"""The reproduction's claims and driver, on invented results; the figures and the page are in test_page.py."""

import dataclasses
import json
import sys
import tomllib
import types

import numpy as np
import pytest

from fedvitals.cli.main import main
from fedvitals.errors import ConfigError
from fedvitals_studies.reproduce.claims import FILE, REHEARSED, WORDS, read, verdicts
from fedvitals_studies.reproduce.conditions import (
    BEGINNING_OF,
    BY_NAME,
    CONDITIONS,
    FACTORIAL,
    TOPOLOGIES,
    chosen,
    quick,
)
from fedvitals_studies.reproduce.results import KNOWN_GTSRB, Results, checked, file_of, load, objections, save
from fedvitals_studies.reproduce.study import measure_all, plan
from support import invented_results as invented
from support.conditions import holds_for_each

CENTRALIZED = BY_NAME["extended-centralized-baseline"]


def real(wanted, repeat=0, **changed):
    """An invented result that claims to be of the real data set."""
    result = invented.measure(wanted, repeat)
    return {**result, "dataset": "gtsrb", "digest": KNOWN_GTSRB[0], **changed}


# -- the conditions ----------------------------------------------------------------------------------------------------


def test_conditions_are_those_of_the_paper():
    initial = [c for c in CONDITIONS if c.study == "initial"]
    extended = [c for c in CONDITIONS if c.study == "extended"]
    assert {(c.topology, c.clip) for c in initial} == {(t, clip) for t in TOPOLOGIES for clip in (None, 1.0)}
    assert {c.rounds for c in initial} == {25}
    assert {c.scenario for c in initial} == {"baseline"}
    assert len(extended) == 6
    assert {c.rounds for c in extended} == {50}
    assert holds_for_each(c.clipped == (c.scenario == "baseline") for c in extended)
    assert {c.clients for c in initial + extended} == {100}
    assert len(BY_NAME) == len(CONDITIONS) + len(FACTORIAL)


def test_what_is_taken_from_a_longer_run_differs_only_in_rounds():
    for short, long in BEGINNING_OF.items():
        same = dataclasses.replace(BY_NAME[long], name=short, study="initial", rounds=BY_NAME[short].rounds)
        assert same == BY_NAME[short]
        assert CONDITIONS.index(BY_NAME[long]) < CONDITIONS.index(BY_NAME[short])


def test_conditions_are_chosen_by_name_study_and_pattern():
    assert chosen(CONDITIONS, ()) == CONDITIONS
    assert [c.name for c in chosen(CONDITIONS, ["extended-centralized-vanishing"])] == [
        "extended-centralized-vanishing"
    ]
    assert len(chosen(CONDITIONS, ["initial", "extended"])) == 14
    assert len(chosen(CONDITIONS, ["beyond-*-rings"])) == 7
    with pytest.raises(ConfigError, match="Did you mean 'extended'"):
        chosen(CONDITIONS, ["extendd"])


# -- the claims --------------------------------------------------------------------------------------------------------


def test_every_claim_and_every_figure_of_the_paper_has_a_criterion():
    claims, choices = read()
    assert {claim.id.split(".")[0] for claim in claims} == set("12345")
    assert {number for claim in claims for number in claim.figures} == set(range(6, 30))
    assert holds_for_each(claim.why and claim.checks for claim in claims)
    sensitivity = {c.name for c in CONDITIONS if c.study == "sensitivity" and c.scenario == "baseline" and c.clipped}
    assert sensitivity <= {choice.condition for choice in choices}


def changed_claims(tmp_path, old, new):
    text = FILE.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "claims.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["final", "initial-centralized', '["finl", "initial-centralized', "Did you mean 'final'"),
        ("initial-centralized-unclipped / aggregated", "initial-centralised-unclipped / aggregated", "Did you mean"),
        ("unclipped / aggregated.accuracy", "unclipped / aggregated.acuracy", "Did you mean 'aggregated.accuracy'"),
        ("partly = 0.70", "partly = 0.90", "must be easier"),
        ('is = "at least"', 'is = "above"', "Unknown comparison 'above'"),
        ('["final", "initial-centralized-unclipped / aggregated.accuracy"]', '"__import__(1)"', "is no call"),
        ("clipped / aggregated.accuracy", "clipped", "names no series"),
        ('= "server.accuracy"}', '= "server.acuracy"}', "Did you mean 'server.accuracy'"),
        ('id = "1.2"', 'id = "1.1"', "two claims of the same id"),
        ("reproduced = 0.80", "reproducd = 0.80", "lacks 'reproduced'"),
        ('"sensitivity-slope"', '"sensitivity-slop"', "Did you mean 'sensitivity-slope'"),
    ],
)
def test_a_criterion_that_cannot_be_meant_is_refused(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        read(changed_claims(tmp_path, old, new))


def with_accuracy(*finals, dataset="gtsrb"):
    """One repeat per number: the centralized baseline, with this accuracy in every round."""
    made = []
    for repeat, final in enumerate(finals):
        result = real(CENTRALIZED, repeat, dataset=dataset)
        result["series"] = {**result["series"], "aggregated.accuracy": [final] * CENTRALIZED.rounds}
        made.append(result)
    return {verdict.claim.id: verdict for verdict in verdicts(Results(made))}["3.1"]


@pytest.mark.parametrize(
    ("finals", "verdict"),
    [
        ((0.96,), "reproduced"),
        ((0.96, 0.97), "reproduced"),
        ((0.96, 0.94), "partly"),  # not in every repeat
        ((0.93,), "partly"),
        ((0.5,), "partly"),  # smooth still, which is the other half of the claim
    ],
)
def test_a_claim_is_reproduced_only_if_every_check_is_in_every_repeat(finals, verdict):
    found = with_accuracy(*finals)
    assert found.verdict == verdict
    assert found.measured[0].numbers == finals
    assert found.repeats == len(finals)


def test_what_was_not_run_is_said_not_judged():
    found = {verdict.claim.id: verdict for verdict in verdicts(Results([real(CENTRALIZED)]))}
    assert found["3.1"].verdict != "not run"
    assert found["1.1"].word == "not run"
    assert found["1.1"].measured[0].lacking == "initial-centralized-unclipped has not been run"
    alone = [real(BY_NAME["initial-hierarchical-unclipped"])]
    assert {v.claim.id: v for v in verdicts(Results(alone))}["1.4"].measured[0].lacking == "it needs two repeats"


def test_a_series_without_a_number_in_it_was_not_measured():
    result = real(CENTRALIZED)
    result["series"] = {**result["series"], "aggregated.accuracy": [None] * 50}
    found = {verdict.claim.id: verdict for verdict in verdicts(Results([result]))}["3.1"]
    assert (found.verdict, found.repeats) == ("not run", 0)
    assert found.measured[0].lacking == "extended-centralized-baseline has no aggregated.accuracy"
    assert not Results([{**result, "series": {"gradient.mean": {}}}]).has(CENTRALIZED.name, "gradient.mean")


def test_what_is_not_a_number_reproduces_nothing():
    check = read()[0][0].checks[0]
    assert check.judge(float("nan")) == "not"
    assert check.judge(float("inf")) == "reproduced"


@pytest.mark.thorough
def test_invented_results_shaped_as_the_paper_tells_it_pass_the_claims_that_it_makes():
    found = {verdict.claim.id: verdict.verdict for verdict in verdicts(Results(invented.all_results(3)))}
    assert {claim for claim, verdict in found.items() if verdict == "not testable"} == {"5.3", "5.7"}
    assert set(found.values()) <= {"reproduced", "partly", "not", "not testable"}
    for claim in ("1.1", "1.2", "1.3", "1.6", "1.7", "1.8", "2.1", "2.4", "3.1", "3.2", "3.4", "4.1", "4.2", "4.5"):
        assert found[claim] == "reproduced", claim
    # As science.md foresees: each reading of the average gradient fits one sentence and not the other.
    assert (found["5.5"], found["5.6"]) == ("reproduced", "not")
    assert found["5.8"] == "reproduced"


# -- what may be called a reproduction ---------------------------------------------------------------------------------


def test_the_known_digest_is_that_of_the_whole_data_set():
    data_gtsrb = pytest.importorskip("fedvitals.lab.data.gtsrb")
    assert data_gtsrb.DIGEST in KNOWN_GTSRB


def test_gtsrb_with_the_papers_numbers_is_a_reproduction():
    assert objections([real(CENTRALIZED)]) == []
    assert with_accuracy(0.97).word == "reproduced"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dataset": "digits"}, "the data set is digits"),
        ({"dataset": "synthetic"}, "the data set is synthetic"),
        ({"digest": "beef"}, "is not that of the whole GTSRB"),
        ({"clients": 99}, "99 clients, not 100"),
        ({"rounds": 49}, "49 rounds, not 50"),
        ({"iterations": 10}, "10 local iterations, not 20"),
        ({"condition": "mine"}, "no condition of the study"),
    ],
)
def test_anything_else_is_refused_the_word(changed, words):
    (reason,) = objections([real(CENTRALIZED, **changed)])
    assert words in reason


@pytest.mark.parametrize("accuracy", [0.97, 0.92, 0.2])
def test_a_rehearsal_never_says_reproduced(accuracy):
    found = with_accuracy(accuracy, dataset="digits")
    assert found.word.startswith("would ")


def test_of_a_whole_rehearsal_nothing_is_called_reproduced():
    everything = verdicts(Results(invented.all_results(2)))
    assert {verdict.word for verdict in everything} <= set(REHEARSED.values())
    assert set(REHEARSED.values()) & set(WORDS.values()) == {"not run", "not testable"}


# -- the driver --------------------------------------------------------------------------------------------------------


def small(*names):
    return tuple(dataclasses.replace(BY_NAME[name], clients=4, rounds=6, dataset="synthetic") for name in names)


class Counting:
    """Measures, and remembers what."""

    def __init__(self, fails=()):
        self.asked, self.fails = [], fails

    def __call__(self, condition, repeat, *, data, progress):
        self.asked.append((condition.name, repeat))
        if condition.name in self.fails:
            raise RuntimeError("out of memory")
        return invented.measure(condition, repeat, data=data, progress=progress)


def test_what_is_there_is_not_measured_again(tmp_path):
    conditions = small("initial-rings-clipped", "extended-centralized-vanishing")
    first, second = Counting(), Counting()
    assert measure_all(tmp_path, conditions, repeats=1, measure=first) == []
    assert first.asked == [("initial-rings-clipped", 0), ("extended-centralized-vanishing", 0)]
    measure_all(tmp_path, conditions, repeats=2, measure=second)
    assert second.asked == [("initial-rings-clipped", 1), ("extended-centralized-vanishing", 1)]
    found = Results.read(tmp_path, conditions)
    assert found.repeats("initial-rings-clipped") == (0, 1)
    gsc = found.array("extended-centralized-vanishing", "scale.gsc")
    assert gsc.tolist() == [0] * 6
    assert np.isnan(found.array("extended-centralized-vanishing", "nonlinearity.nlc")).all()


def test_the_first_repeat_of_all_comes_before_the_second_of_any(tmp_path):
    todo = plan(tmp_path, CONDITIONS[:3], 2).todo
    assert [job.repeat for job in todo] == [0, 0, 0, 1, 1, 1]


def test_the_time_is_estimated_from_what_was_measured(tmp_path):
    conditions = small("initial-rings-unclipped", "initial-centralized-unclipped", "beyond-resnet-baseline")
    before = plan(tmp_path, conditions, 1)
    assert before.guessed
    assert before.seconds > 0
    save(tmp_path, {**invented.measure(conditions[0], 0), "seconds": 480.0}, conditions[0])
    after = plan(tmp_path, conditions[:2], 1)
    assert not after.guessed
    assert after.seconds == pytest.approx(480)  # the same work as the one measured


def test_the_beginning_of_a_longer_run_is_taken_from_it(tmp_path):
    long, short = (
        invented.synthetic(BY_NAME[name]) for name in ("extended-hierarchical-baseline", "initial-hierarchical-clipped")
    )
    measure = Counting()
    assert plan(tmp_path, (long, short), 1).seconds == pytest.approx(plan(tmp_path, (long,), 1).seconds)
    measure_all(tmp_path, (long, short), repeats=1, measure=measure)
    assert measure.asked == [(long.name, 0)]
    found = Results.read(tmp_path, (long, short))
    assert found.of(short.name)[0]["beginning_of"] == long.name
    assert (found.array(short.name, "server.accuracy") == found.array(long.name, "server.accuracy")[:25]).all()
    assert found.array(short.name, "iteration.loss").shape == (5, 25 * 20)


def test_one_condition_that_fails_does_not_stop_the_others(tmp_path):
    conditions = small("initial-rings-clipped", "initial-clustered-clipped")
    failed = measure_all(tmp_path, conditions, repeats=1, measure=Counting(fails={"initial-rings-clipped"}))
    assert len(failed) == 1
    assert "initial-rings-clipped, repeat 1: RuntimeError: out of memory (test_study.py" in failed[0]
    assert Results.read(tmp_path, conditions).conditions == ("initial-clustered-clipped",)


def test_what_cannot_be_meant_stops_all(tmp_path):
    def measure(condition, repeat, *, data, progress):
        raise ConfigError("There is no GTSRB.")

    with pytest.raises(ConfigError, match="no GTSRB"):
        measure_all(tmp_path, CONDITIONS, repeats=1, measure=measure)


def test_what_fails_three_times_in_a_row_ends_it(tmp_path):
    measure = Counting(fails=set(BY_NAME))
    with pytest.raises(RuntimeError, match="out of memory"):
        measure_all(tmp_path, CONDITIONS, repeats=1, measure=measure)
    assert len(measure.asked) == 3


def test_stopped_by_hand_what_was_measured_is_kept(tmp_path):
    conditions = small("initial-rings-clipped", "initial-clustered-clipped")

    def measure(condition, repeat, *, data, progress):
        if condition is conditions[1]:
            raise KeyboardInterrupt
        return invented.measure(condition, repeat)

    with pytest.raises(KeyboardInterrupt):
        measure_all(tmp_path, conditions, repeats=1, measure=measure)
    assert [str(job) for job in plan(tmp_path, conditions, 1).todo] == ["initial-clustered-clipped, repeat 1"]


def test_results_of_another_size_are_refused_and_left_alone(tmp_path):
    (condition,) = small("initial-rings-clipped")
    path = save(tmp_path, invented.measure(condition, 0), condition)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"measured with rounds = 6, now 25; clients = 4, now 100; .*another --out"):
        plan(tmp_path, [BY_NAME["initial-rings-clipped"]], 1)
    assert path.read_bytes() == before
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, condition, 0)
    assert load(tmp_path, condition, 1) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("digest"), "lacks digest"),
        (lambda r: r["series"].pop("server.loss"), "lacks the series 'server.loss'"),
        (lambda r: r["series"]["scale.gsc"].pop(), "has 5 values of 'scale.gsc'; expected 6"),
        (lambda r: r["series"]["gradient.mean"]["2"].pop(), "has 5 values of 'gradient.mean/2'; expected 6"),
        (lambda r: r["series"].update({"scale.gcs": [1.0] * 6}), "Did you mean 'scale.gsc'"),
        (lambda r: r.update(clients=5), "says clients = 5; expected 4"),
    ],
)
def test_a_result_that_is_not_whole_is_refused(change, message):
    (condition,) = small("initial-rings-clipped")
    result = invented.measure(condition, 0)
    change(result)
    with pytest.raises(ConfigError, match=message):
        checked(result, condition, 0)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def lab(monkeypatch):
    """In place of the training, invented results; the rest is the real command."""
    measure = Counting()
    module = types.ModuleType("fedvitals_studies.reproduce.measure")
    module.measure = measure
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return measure


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as done:
        main(["reproduce", "gsc", *map(str, arguments)])
    captured = capsys.readouterr()
    return done.value.code, captured.out, captured.err


@pytest.mark.thorough
def test_the_command_runs_resumes_and_says_that_it_is_a_rehearsal(lab, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fedvitals_studies.reproduce.study.has_gtsrb", lambda _: False)
    only = ("--only", "extended-centralized-*")
    code, out, err = command(capsys, "--quick", "--out", tmp_path, *only)
    assert code == 0
    assert "A rehearsal, not a reproduction: the data set is digits, not GTSRB; 10 clients" in out.replace("\n", " ")
    assert "3 runs to do, 0 done; about" in err
    assert "a guess until the first is done" in err
    assert len(lab.asked) == 3
    code, out, err = command(capsys, "--quick", "--out", tmp_path, *only, "--json")
    assert (code, len(lab.asked)) == (0, 3)
    assert "All 3 runs are there" in err
    result = json.loads(out)["result"]
    assert result["reproduction"] is False
    assert sum(result["counts"].values()) == len(read()[0])
    assert "reproduced" not in result["counts"]


def test_the_command_draws_without_running(lab, tmp_path, capsys):
    code, out, _ = command(capsys, "--page-only", "--out", tmp_path, "--json")
    assert (code, lab.asked) == (0, [])
    assert json.loads(out)["result"]["standing"] == "Nothing has been run yet"
    assert (tmp_path / "index.html").exists()


def test_the_command_ends_with_1_if_a_condition_failed(lab, tmp_path, capsys):
    lab.fails = {"initial-rings-clipped"}
    code, out, _ = command(capsys, "--out", tmp_path, "--only", "initial-rings-clipped", "--repeats", 1)
    assert code == 1
    assert "failed initial-rings-clipped, repeat 1: RuntimeError" in out
    code, _, err = command(capsys, "--only", "initial-ring-clipped")
    assert code == 2
    assert "Did you mean 'initial-rings-clipped'" in err


def test_the_criteria_are_shipped_beside_the_code():
    assert tomllib.loads(FILE.read_text(encoding="utf-8"))["claim"]
    assert FILE.parent.name == "reproduce"


@pytest.mark.slow
def test_the_rehearsal_runs_every_condition(tmp_path, capsys):
    import importlib.util

    if importlib.util.find_spec("fedvitals_studies.reproduce.measure") is None:
        pytest.skip("the lab's measuring is not there")
    code, out, _ = command(capsys, "--quick", "--out", tmp_path, "--json")
    assert code == 0
    result = json.loads(out)["result"]
    assert result["conditions"] == {"done": 14, "of": 14}
    assert result["reproduction"] is False
    assert holds_for_each(file_of(tmp_path, condition.name, 0).exists() for condition in quick("digits"))
