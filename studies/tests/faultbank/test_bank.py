# SPDX-License-Identifier: Apache-2.0
"""The fault bank from its file to its page: the same cases each time, nothing trained twice, lies that are heard."""

import json
import math
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fedvitals.cli.main import main
from fedvitals.diagnosis.finding import finding
from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.errors import ConfigError
from fedvitals_studies.faultbank import examine as faultbank_examine
from fedvitals_studies.faultbank import outcome as faultbank_outcome
from fedvitals_studies.faultbank import pool
from fedvitals_studies.faultbank.bank import How, take, without_absent
from fedvitals_studies.faultbank.cases import read_bank
from fedvitals_studies.faultbank.lying import lying
from fedvitals_studies.faultbank.outcome import alarm_of, outcome_of, planted, stated, suspects_of
from fedvitals_studies.faultbank.recording import ABSENT, KEPT, Recording
from fedvitals_studies.faultbank.report import summarise
from fedvitals_studies.faultbank.run import About
from fedvitals_studies.faultbank.score import Alarm, Planted
from fedvitals_studies.verbs import faultbank as verbs_faultbank
from support.conditions import holds_for_each
from support.paths import ROOT

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

PAGE = (ROOT / "docs" / "faultbank.md").read_text(encoding="utf-8")
WRITTEN, DRAWN = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
# As strong as they can be, or the plain form: no other would be the same fault.
WHOLE = {"CorruptedMessage 1.0", "DropOut 1.0", "Duplicate 0.0", "LabelFlip 1.0", "LostMessage 1.0", "SignFlip 1.0"}
HELD_OUT = "37e89738cd38138f2e9e17651b166c80"
LARGE = "53b533b6b0ab44a4c506c6d3d95f5ab0"


def in_file(folder, text):
    path = folder / "bank.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bank(tmp_path_factory):
    return read_bank(in_file(tmp_path_factory.mktemp("bank"), WRITTEN))


@pytest.fixture(scope="module")
def runs(bank, tmp_path_factory):
    """The page's own example, trained."""
    folder = tmp_path_factory.mktemp("runs")
    told = []
    pool.watch_all(bank.cases, folder, None, 1, lambda *each: told.append(each))
    assert sorted(told) == [(case.name, None) for case in bank.cases]
    return folder


# -- cases ------------------------------------------------------------------------------------------------------------


def test_the_held_out_set_is_the_one_whose_digest_was_published():
    assert read_bank("held-out").digest == HELD_OUT
    assert HELD_OUT in PAGE


def test_the_large_set_is_more_of_held_out_with_other_seeds():
    held_out, large = read_bank("held-out"), read_bank("held-out-large")
    assert large.digest == LARGE
    assert LARGE in PAGE
    assert len(large.cases) >= 1000
    for what in (lambda c: c.domain, lambda c: repr((c.experiment.dataset, c.experiment.model)),
                 lambda c: type(c.experiment.faults[0])):  # fmt: skip
        assert {what(case) for case in large.faulty} == {what(case) for case in held_out.faulty}
    assert not {c.experiment.seed for c in large.faulty} & {c.experiment.seed for c in held_out.faulty}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["tune", "held-out", "held-out-large", "quick"])
def test_a_bank_is_the_same_each_time_and_every_faulty_case_has_its_twin(name):
    one, other = read_bank(name), read_bank(name)
    assert one.cases == other.cases
    assert one.digest == other.digest
    faulty, clean = one.cases[::2], one.cases[1::2]
    assert len({case.name for case in one.cases}) == len(one.cases)
    for ill, well in zip(faulty, clean, strict=True):
        assert ill.faulty
        assert not well.faulty
        assert msgspec.structs.replace(ill.experiment, faults=()) == well.experiment


@pytest.mark.parametrize("name", ["held-out", "held-out-three"])
def test_tune_and_held_out_have_nothing_in_common(name):
    tune, held_out = read_bank("tune"), read_bank(name)
    for what in (lambda e: e.seed, lambda e: (e.dataset, e.model)):
        assert not {repr(what(c.experiment)) for c in tune.faulty} & {repr(what(c.experiment)) for c in held_out.faulty}
    strengths = [
        {(fault := case.experiment.faults[0]).__class__.__name__ + f" {getattr(fault, case.strength)}"
         for case in bank.faulty if case.strength} for bank in (tune, held_out)
    ]  # fmt: skip
    assert strengths[0] & strengths[1] <= WHOLE
    assert {"LabelFlip 1.0", "SignFlip 1.0"} <= strengths[1]


def test_cases_that_are_drawn_from_a_file(tmp_path):
    bank = read_bank(in_file(tmp_path, DRAWN))
    assert [case.name for case in bank.faulty[:2]] == ["drawn/sign_flip-0/00", "drawn/sign_flip-0/01"]
    assert len(bank.faulty) == 6
    assert {case.experiment.faults[0].strength for case in bank.faulty[:4]} == {1.0, 0.5}
    assert read_bank(in_file(tmp_path, DRAWN.replace("seed = 3", "seed = 4"))).digest != bank.digest


CREEPING = """
name = "creeping"
seed = 3

[settings]
clients = [6]
partitions = ["iid"]
participations = [1.0]
topologies = ["centralized"]
rounds = [8]
rounds_partial = [8]

[[domains]]
name = "digits-mlp"
dataset = "digits"
model = {kind = "mlp", hidden = [16]}
local = [{iterations = 8}]

[[faults]]
kind = "backdoor"
cases = 1
vary = [{share = 0.8, target = 3, ramp = 2, every = 2}]
strength = "share"
lasts = 5
also = [{kind = "scaling", factor = 4.0, every = 2}]
"""


def test_drawn_faults_may_grow_stop_and_come_together(tmp_path):
    (case,) = read_bank(in_file(tmp_path, CREEPING)).faulty
    door, longer = case.experiment.faults
    assert (door.share, door.ramp, door.every, door.until) == (0.8, 2, 2, door.since + 4)
    assert (longer.nodes, longer.since, longer.until, longer.every) == (door.nodes, door.since, door.until, 2)
    plain = read_bank(in_file(tmp_path, CREEPING.replace("lasts = 5", "").replace(", ramp = 2, every = 2", "")))
    (before,) = plain.faulty
    assert (before.experiment.seed, before.experiment.faults[0].nodes) == (case.experiment.seed, door.nodes)


def test_an_outcome_tells_how_far_a_backdoor_came(tmp_path):
    bank = read_bank(in_file(tmp_path, CREEPING))
    told = []
    pool.watch_all(bank.cases, tmp_path, None, 1, lambda *each: told.append(each))
    assert {error for _, error in told} == {None}
    (recording, about), twin = (pool.load(tmp_path, case) for case in bank.cases)
    found = outcome_of(bank.cases[0], recording, about, twin)
    assert len(about.attack) == 8
    assert found.attack == pytest.approx(np.mean(about.attack[-3:]))
    assert found.damage is not None
    door, longer = found.faults
    assert (door.kind, door.every, door.ramp, door.strength, longer.kind) == ("backdoor", 2, 2, 0.8, "scaling")
    assert outcome_of(bank.cases[1], *twin).attack is None
    summary = summarise([found, outcome_of(bank.cases[1], *twin)])
    (row,) = summary.attacks
    assert row.name == "backdoor and scaling"
    assert row.figures["attack"].value == pytest.approx(found.attack)
    assert row.figures["damage"].value == pytest.approx(found.damage / 100)


def test_a_case_of_ones_own_without_a_fault_is_a_control_and_needs_no_twin(tmp_path):
    bank = read_bank(in_file(tmp_path, re.sub(r"faults = .*", "", WRITTEN)))
    assert [case.name for case in bank.cases] == ["mine/one noisy annotator"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "x"', "has no cases"),
        ('name = "x"\ncases = 3', "is no fault bank"),
        ('name = "x"\nlike = "quick"\n[[faults]]\nkind = "crash"\ncases = 1', "is like quick: it has no"),
        ('name = "x"\nlike = "slow"', "slow"),
        ('name = "x"\n[[faults]]\nkind = "crash"\ncases = 1', r"need \[settings\]"),
        (WRITTEN.replace("clients = 6", "cleints = 6"), "one noisy annotator.*cleints"),
        (WRITTEN.replace('kind = "label_noise"', 'kind = "lable_noise"'), "one noisy annotator.*lable_noise"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        read_bank(in_file(tmp_path, text))


def test_an_unknown_bank_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="held-out"):
        read_bank("held-in")


# -- training and examining -------------------------------------------------------------------------------------------


def test_what_is_there_is_not_trained_again_and_what_is_missing_is(bank, runs, tmp_path):
    told = []
    pool.watch_all(bank.cases, runs, None, 1, lambda *each: told.append(each))
    assert told == []
    for file in runs.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    ill = bank.cases[0]
    pool.place(tmp_path, ill).with_name(f"{pool.place(tmp_path, ill).name}.json").unlink()
    pool.watch_all(bank.cases, tmp_path, None, 1, lambda *each: told.append(each))
    assert told == [(ill.name, None)]
    before, after = (pool.load(folder, ill) for folder in (runs, tmp_path))
    assert before[1].accuracy == after[1].accuracy
    np.testing.assert_array_equal(before[0].metrics["update.norm"], after[0].metrics["update.norm"])


def test_a_case_that_fails_is_told_and_the_others_go_on(bank, tmp_path, monkeypatch):
    def fail(case, data, device):
        raise RuntimeError(f"no {case.name}")

    monkeypatch.setattr(pool, "watch", fail)
    told = dict.fromkeys([case.name for case in bank.cases])
    pool.watch_all(bank.cases, tmp_path, None, 1, told.__setitem__)
    assert holds_for_each("no mine/" in text for text in told.values())


def test_an_outcome_says_what_was_planted_and_what_everybody_said(bank, runs):
    ill, well = bank.cases
    recording, about = pool.load(runs, ill)
    twin = pool.load(runs, well)
    found = outcome_of(ill, recording, about, twin)
    assert (found.dataset, found.model, found.topology, found.partition) == ("digits", "mlp", "centralized", "iid")
    assert (found.clients, found.rounds, found.participation, found.lying) == (6, 8, 1.0, False)
    (fault,) = found.faults
    assert fault == Planted("label_noise", "label_noise", "client", "clients", ["c2"], 2, None, None, 0.9)
    assert found.damage == pytest.approx(100 * (np.mean(twin[1].accuracy[-3:]) - np.mean(about.accuracy[-3:])))
    assert found.present == {f"c{i}": list(range(8)) for i in range(6)}
    assert set(found.methods) == {
        "fedvitals", "fixed thresholds", "sagemaker-like", "cohort z-score", "Multi-Krum", "AlignIns",
        "FedDebug, count told", "differential activations",
    }  # fmt: skip
    assert {alarm.round for alarm in found.methods["FedDebug, count told"]} == {3, 7}
    assert holds_for_each(set(scores) == set(found.present) for scores in found.scores.values())
    assert found.seconds_rounds > 0
    clean = outcome_of(well, *twin)
    assert clean.clean
    assert clean.damage is None
    assert not clean.methods["FedDebug, count told"]  # told that there is nobody


def test_an_examination_is_kept_until_its_makers_change(bank, runs, tmp_path, monkeypatch):
    told = []

    def examine():
        told.clear()
        return faultbank_examine.examine_all(bank.cases, runs, tmp_path, 1, lambda *each: told.append(each))

    first = examine()
    assert sorted(told) == [(case.name, None) for case in bank.cases]
    assert [outcome.case for outcome in first] == [
        "mine/one noisy annotator", "mine/one noisy annotator/lying", "mine/one noisy annotator/clean",
    ]  # fmt: skip
    assert examine() == first
    assert told == []
    monkeypatch.setattr(faultbank_examine, "sources", lambda *_: "changed")
    assert len(examine()) == 3
    assert len(told) == 2


def test_a_detector_that_fails_is_told_with_its_case(bank, runs, tmp_path, monkeypatch):
    def broken(history, number):
        raise ValueError("a detector's own")

    monkeypatch.setattr(faultbank_outcome, "DETECTORS", (broken,))
    told = {}
    assert faultbank_examine.examine_all(bank.cases, runs, tmp_path, 1, told.__setitem__) == []
    assert holds_for_each("a detector's own" in text for text in told.values())
    assert len(told) == 2


def test_the_share_of_samples_that_a_flip_affects_is_read_off_the_clean_twin(bank, runs):
    clean = pool.load(runs, bank.cases[1])[0]
    (told,) = [e.data["histogram"] for e in clean.events("labels") if e.where.node == "c2"]
    flip = {"kind": "label_flip", "nodes": ["c2"], "since": 0, "until": None, "issue": "label_flip", "family": "client"}
    about = About("x", "mine", "digits", "", [{**flip, "source": 3, "target": 5, "rate": 0.5}])
    (fault,) = planted(replace(bank.cases[0], strength="rate"), about, clean)
    assert fault.affected == pytest.approx(0.5 * told["3"] / sum(told.values()))
    assert fault.strength == 0.5
    assert planted(bank.cases[0], about, None)[0].affected is None


def test_stated_probabilities_are_held_against_the_round_in_which_they_were_stated():
    faults = [
        Planted("label_noise", "label_noise", "client", "clients", ["c1"], 4),
        Planted("straggler", "straggler", "system", "clients", ["c2"], 0),
        Planted("exploding_initialisation", "exploding_gradient", "gradient", "run", ["c0", "c1", "c2", "c3"], 0),
    ]
    said = {"c0": 0.1, "c1": 0.6, "c2": 0.3, "c3": 0.2}
    assert stated(said, faults, 3) == [(0.1, False), (0.6, False), (0.2, False)]
    assert stated(said, faults, 4) == [(0.1, False), (0.6, True), (0.2, False)]


def test_what_counts_of_a_finding_is_in_its_alarm():
    more = {"views": ["server", "telemetry"], "causes": [["label_noise", 0.7], ["label_flip", 0.2]]}
    said = finding("LABEL_NOISE", 4, "words", confidence=0.8, node="c1", group="edge-1", more=more)
    causes = (("label_noise", 0.7), ("label_flip", 0.2))
    severity = ISSUES_BY_CODE["LABEL_NOISE"].severity
    expected = Alarm(4, "LABEL_NOISE", "c1", "edge-1", 0.8, severity, "server and telemetry", causes)
    assert alarm_of(said) == expected
    plain = alarm_of(finding("DIVERGENCE", 4, "words", confidence=0.8))
    assert (plain.node, plain.view, plain.causes) == (None, None, ())


def test_without_a_ranking_of_its_own_alarms_rank():
    alarms = [Alarm(1, "X", "c1", None, 0.5, "warning"), Alarm(2, "X", "c1", None, 0.5, "warning")]
    alarms += [Alarm(2, "X", "c2", None, 0.9, "note"), Alarm(2, "X", None, None, 0.9, "critical")]
    assert suspects_of(alarms, ["c0", "c1", "c2"]) == {"c0": 0.0, "c1": 1.0, "c2": 0.0}


# -- lies -------------------------------------------------------------------------------------------------------------


def table(rows):
    return np.array(rows, dtype=np.float32)


def test_a_liar_tells_what_is_usual_and_its_update_stays_what_it_is():
    recording = Recording(
        [0, 1],
        ["c0", "c1", "c2", "c3"],
        {
            "loss": table([[1, 9, 2, 3], [1, ABSENT, 2, math.nan]]),
            "samples": table([[10, 500, 12, 14], [10, 500, 12, 14]]),
            "update.samples": table([[10, 50, 12, 14], [10, 50, 12, ABSENT]]),
            "update.norm": table([[1, 99, 1, 1], [1, 99, 1, 1]]),
            "fit.confusion": table([[ABSENT, 0.5, ABSENT, ABSENT], [0, 1, 0.5, 0.25]]),
        },
        {"loss": table([2.0, 1.0])},
        {
            "gradient": np.stack([table([[1, 7, 3, 5], [1, ABSENT, 3, 5]])] * 6, axis=-1)[:, :, None],
            "update": np.full((2, 4, 1, len(KEPT["update"])), 4, dtype=np.float32),
        },
        {"gradient": ("w",), "update": ("w",)},
    )
    heard = lying(recording, {"c1": 0})
    np.testing.assert_array_equal(heard.metrics["loss"], table([[1, 2, 2, 3], [1, ABSENT, 2, math.nan]]))
    assert heard.metrics["samples"][:, 1].tolist() == [50, 50]
    assert heard.metrics["update.norm"] is recording.metrics["update.norm"]
    assert heard.latest("fit.confusion", 0) == {}  # nobody to hide behind
    assert heard.latest("fit.confusion", 1)["c1"] == 0.25
    assert heard.across("gradient", ("rms",), 0)[1][1, 0, 0] == 3
    assert heard.across("gradient", ("rms",), 1)[0] == ["c0", "c2", "c3"]
    np.testing.assert_array_equal(heard.families["update"], recording.families["update"])
    np.testing.assert_array_equal(recording.metrics["loss"][0], [1, 9, 2, 3])  # the original is as it was


def test_what_a_liar_holds_is_not_told_and_the_others_words_are_untouched(bank, runs):
    recording, _ = pool.load(runs, bank.cases[0])
    heard = lying(recording, {"c2": 0})
    assert {event.where.node for event in heard.events("labels")} == {"c0", "c1", "c3", "c4", "c5"}
    others = [place for place, name in enumerate(recording.names) if name != "c2"]
    for name, values in recording.metrics.items():
        np.testing.assert_array_equal(heard.metrics[name][:, others], values[:, others])
    for name, block in recording.families.items():
        np.testing.assert_array_equal(heard.families[name][:, others], block[:, others])
    loud = recording.latest("fit.loss_before", 7)
    assert heard.latest("fit.loss_before", 7)["c2"] != loud["c2"]


# -- the command line -------------------------------------------------------------------------------------------------


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["faultbank", *map(str, arguments)])
    return end.value.code, *capsys.readouterr()


def test_list_says_what_is_in_a_bank_and_runs_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "--list")
    assert code == 0
    assert HELD_OUT in out
    assert "463" in out
    code, out, _ = call(capsys, "--quick", "--list", "--json")
    assert json.loads(out)["result"]["faulty runs"] == 24
    assert not list(tmp_path.iterdir())


def test_an_own_bank_from_its_file_to_its_page(capsys, tmp_path, runs):
    out = tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    for file in runs.iterdir():
        (out / "runs" / file.name).write_bytes(file.read_bytes())
    arguments = ("--bank", in_file(tmp_path, WRITTEN), "--out", out, "--workers", 1)
    code, text, told = call(capsys, *arguments, "--json")
    facts = json.loads(text)["result"]
    assert code == 0
    assert facts["counts"]["runs"] == 2
    assert {row["method"] for row in facts["methods"]} >= {"fedvitals", "Multi-Krum"}
    assert "training" not in told
    assert "examining: 2 of 2" in told
    page = (out / "README.md").read_text(encoding="utf-8")
    assert facts["digest"] in page
    code, text, _ = call(capsys, *arguments, "--bar")
    missed = any(bar["verdict"] == "missed" for bar in facts["bars"])
    assert code == int(missed)
    assert ("missed" in text) == missed


def test_data_sets_that_are_not_there_are_named_and_their_cases_counted(capsys, tmp_path):
    cases = read_bank("held-out").cases
    left, absent = without_absent(cases, tmp_path)
    assert {a.dataset for a in absent} == {"fashion_mnist", "gtsrb"}
    assert sum(a.cases for a in absent) + len(left) == len(cases)
    only = WRITTEN.replace('dataset = "digits"', 'dataset = "cifar10"')
    code, _, told = call(capsys, "--bank", in_file(tmp_path, only), "--data", tmp_path, "--out", tmp_path / "out")
    assert code == 2
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in told


def test_quick_and_a_bank_exclude_each_other(capsys):
    code, _, told = call(capsys, "--quick", "--bank", "tune")
    assert code == 2
    assert "not both" in told


@pytest.mark.slow
def test_the_quick_bank(capsys, tmp_path):
    code, out, told = call(capsys, "--quick", "--out", tmp_path, "--workers", 2, "--json")
    assert code == 0, told
    facts = json.loads(out)["result"]
    assert facts["counts"]["faulty runs"] == facts["counts"]["clean runs"] == 24
    ours = {row["method"]: row for row in facts["methods"]}["fedvitals"]
    assert ours["f1"] > 0.6
    assert ours["alarms"] <= 1.5


BROUGHT = """
import fedvitals as fv

def accuse_c2(history, round_index):
    if round_index >= 2:
        yield fv.Finding(fv.Where("", round_index, "c2"), 0.0, "LABEL_NOISE", "warning", 0.9, "It is always c2.")
"""


def test_detector_that_a_user_brings_is_judged_beside_ours_and_again_when_it_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "my_accuser.py").write_text(BROUGHT, encoding="utf-8")
    bank = read_bank(in_file(tmp_path, WRITTEN))
    how = How(detectors=("my_accuser:accuse_c2",))
    taken = take(bank, tmp_path / "out", None, how, lambda *_: lambda *_: None)
    rows = {row.name: row.figures for row in taken.summary.methods}
    assert rows["my_accuser:accuse_c2"]["recall"].value == 1.0  # c2 is the culprit
    assert rows["my_accuser:accuse_c2"]["alarms"].value > 0  # and is accused in the clean twin, too
    assert "fedvitals" in rows
    verbs_faultbank._print(taken)
    assert "my_accuser:accuse_c2 " in capsys.readouterr().out  # not cut: two detectors of a module would look the same
    with pytest.raises(ConfigError, match="There is no detector my_accuser:accuse_c9"):
        take(bank, tmp_path / "out", None, How(detectors=("my_accuser:accuse_c9",)), lambda *_: lambda *_: None)
    plain, brought = (faultbank_examine.sources.__wrapped__(names) for names in ((), how.detectors))
    (tmp_path / "my_accuser.py").write_text(BROUGHT + "# changed\n", encoding="utf-8")
    assert len({plain, brought, faultbank_examine.sources.__wrapped__(how.detectors)}) == 3
