# SPDX-License-Identifier: Apache-2.0
"""The healthy matrix: its settings and twins are what they are said to be, and its table counts what it says."""

import json
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fedvitals.cli.main import main
from fedvitals.errors import ConfigError
from fedvitals_studies.faultbank import bundle, remote_run
from fedvitals_studies.faultbank.cases import read_bank
from fedvitals_studies.faultbank.healthy import summarise_matrix
from fedvitals_studies.faultbank.intervals import poisson_rate
from fedvitals_studies.faultbank.matrix import ENOUGH, called
from fedvitals_studies.faultbank.pool import place
from fedvitals_studies.faultbank.report import OURS
from fedvitals_studies.faultbank.run import About
from fedvitals_studies.faultbank.score import Alarm, Outcome, Planted
from fedvitals_studies.faultbank.stand_ins import bring_stand_ins
from support.paths import ROOT

pytestmark = pytest.mark.thorough  # thousands of experiments to read, and seconds of training

PAGE = (ROOT / "docs" / "faultbank.md").read_text(encoding="utf-8")
HEALTHY, TUNE = "7d0a315ee04fed930df5760125ff96cd", "efe65c23fc3e603a1cdd4d8ffe7eb292"
TINY = """
name = "tiny"
seed = 1

[matrix]
twins = 1

[[matrix.faults]]
kind = "scaling"
factor = 10.0

[matrix.base]
dataset = {kind = "synthetic", samples = 400, features = 8, classes = 4}
model = {kind = "mlp", hidden = [8]}
clients = 4
local = {iterations = 4}

[[matrix.settings]]
name = "plain"
group = "plain"
rounds = 6
seeds = 2
onset = 2

[[matrix.settings]]
name = "secret"
group = "other"
rounds = 6
seeds = 1
onset = 2
undecidable = {scaling = "nobody sees it"}

[matrix.settings.experiment]
secure_aggregation = {}
"""


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["faultbank", *map(str, arguments)])
    return end.value.code, *capsys.readouterr()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("bank") / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def banks():
    return {name: read_bank(name) for name in ("healthy", "healthy-tune", "healthy-quick")}


def test_the_matrix_is_the_one_whose_digest_was_published(banks):
    assert banks["healthy"].digest == HEALTHY
    assert banks["healthy-tune"].digest == TUNE
    assert HEALTHY in PAGE
    assert TUNE in PAGE


def test_judging_and_tuning_have_the_same_settings_and_other_seeds(banks):
    judging, tuning = banks["healthy"], banks["healthy-tune"]
    assert [setting.name for setting in judging.settings] == [setting.name for setting in tuning.settings]
    assert len(judging.settings) >= 60
    assert not {c.experiment.seed for c in judging.cases} & {c.experiment.seed for c in tuning.cases}


@pytest.mark.parametrize(("name", "rounds", "twins"), [("healthy", 300, 3), ("healthy-tune", 150, 2)])
def test_every_setting_has_rounds_enough_and_twins_that_can_be_judged(banks, name, rounds, twins):
    bank = banks[name]
    assert len({case.name for case in bank.cases}) == len(bank.cases)
    for setting in bank.settings:
        own = [case for case in bank.cases if case.setting == setting.name]
        assert sum(case.experiment.rounds for case in own if not case.faulty) >= rounds
        kinds = [type(case.experiment.faults[0]).__name__ for case in own if case.faulty]
        assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
            ("Scaling", "LabelNoise", "NotFinite"), twins
        )
    for case in bank.faulty:
        if case.faulty:
            (fault,) = case.experiment.faults
            (culprit,) = fault.nodes
            alike = {"faults": (), "rounds": case.twin.experiment.rounds}
            assert msgspec.structs.replace(case.experiment, **alike) == case.twin.experiment
            assert sum(at >= fault.since for at in called(case.experiment)[culprit]) >= ENOUGH


def test_a_matrix_says_what_is_wrong_with_it(tiny, tmp_path):
    path = tmp_path / "like.toml"
    path.write_text(f'name = "like"\nlike = "{tiny}"\nonly = ["none"]\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"There is no setting 'none'\. Known: plain, secret"):
        read_bank(path)
    path.write_text(TINY.replace("iterations = 4", "iterations = 0"), encoding="utf-8")
    with pytest.raises(ConfigError, match="The setting 'plain' is no experiment"):
        read_bank(path)


def test_nobody_tells_of_a_transformation_only_where_the_setting_says_so(banks):
    untold = {case.setting for case in banks["healthy"].cases if case.untold}
    assert untold == {s.name for s in banks["healthy"].settings if s.untold}
    assert untold
    case = next(case for case in banks["healthy"].cases if case.untold)
    assert place(ROOT, case) != place(ROOT, replace(case, untold=False))


def test_runs_that_share_a_control_are_one_task(tiny, tmp_path):
    bank = read_bank(tiny)
    tasks = remote_run.pairs_of(bank, tmp_path, "cpu")
    assert sorted(sorted(case.name for case in task.cases) for task in tasks) == [
        ["tiny/plain/00", "tiny/plain/00/scaling"],
        ["tiny/plain/01"],
        ["tiny/secret/00", "tiny/secret/00/scaling"],
    ]


def outcome_of(case, alarms):
    experiment = case.experiment
    looked_at = experiment.clients * experiment.rounds
    unjudged = looked_at if experiment.secure_aggregation is not None else 0
    faults = [Planted("scaling", "byzantine", "client", "clients", list(f.nodes), f.since) for f in experiment.faults]
    return Outcome(
        case.name, "tiny", case.domain, "synthetic", "mlp", "centralized", "iid", experiment.clients, 1.0,
        experiment.rounds, faults, False, [], None, called(experiment), {}, 1.0, {OURS: alarms},
        client_rounds=looked_at, not_judged=unjudged,
    )  # fmt: skip


def alarm_at(at, issue, node, severity="warning"):
    return Alarm(at, issue, node, None, 0.9, severity, message=f"{issue} {node}")


def test_the_table_counts_alarms_criticals_recall_and_what_was_not_judged(tiny):
    bank = read_bank(tiny)
    cases = {case.name: case for case in bank.cases}
    (culprit,) = cases["tiny/plain/00/scaling"].experiment.faults[0].nodes
    alarms = {
        "tiny/plain/00": [alarm_at(1, "LABEL_NOISE", "c0"), alarm_at(2, "LABEL_NOISE", "c0", "critical")],
        "tiny/plain/00/scaling": [alarm_at(3, "BYZANTINE", culprit, "critical")],
    }
    outcomes = [outcome_of(case, alarms.get(name, [])) for name, case in cases.items()]
    abouts = {name: About(name, "tiny", "", "", loss=[2.0, None, 1.0]) for name in cases}
    matrix = summarise_matrix(bank, outcomes, abouts)
    plain, secret = matrix.lines
    assert (plain.runs, plain.rounds, plain.raised, plain.critical) == (2, 12, 1, 1)
    assert plain.alarms.value == pytest.approx(100 / 12)
    assert plain.recall["scaling"].value == plain.located["scaling"].value == 1.0
    assert secret.undecidable == {"scaling": "nobody sees it"}
    assert secret.recall_all.value is None
    assert secret.not_judged.value == 1.0
    assert secret.secure
    assert (plain.score, plain.score_name) == ((2.0, 1.0), "loss")
    assert [bar.verdict for bar in matrix.bars] == ["missed", "met", "missed", "not measured", "met"]
    (alarm,) = matrix.alarms
    assert (alarm["setting"], alarm["fault"], alarm["issue"], alarm["node"]) == ("plain", None, "LABEL_NOISE", "c0")
    assert (alarm["round"], alarm["severity"], alarm["message"]) == (1, "critical", "LABEL_NOISE c0")
    assert [missed["case"] for missed in matrix.missed] == ["tiny/secret/00/scaling"]


def test_the_limits_of_a_poisson_rate_are_exact():
    found = poisson_rate(5, 1000)
    assert (found.value, found.count) == (0.5, 1000)
    assert (found.low, found.high) == (pytest.approx(0.16235, abs=1e-4), pytest.approx(1.16683, abs=1e-4))
    none = poisson_rate(0, 100)
    assert (none.low, none.high) == (0.0, pytest.approx(-math.log(0.025), abs=1e-4))


def test_a_matrix_trains_examines_and_writes_its_page_and_lists(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    code, told, _ = call(capsys, "--bank", tiny, "--out", out, "--workers", 1, "--json")
    assert code == 0
    told = json.loads(told)["result"]
    assert [line["name"] for line in told["settings"]] == ["plain", "secret"]
    for name in ("index.html", "README.md", "summary.json", "alarms.jsonl", "missed.jsonl"):
        assert (out / name).exists()
    missed = [json.loads(line) for line in (out / "missed.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(each["fault"] == "scaling" for each in missed)


def test_recordings_come_home_and_are_examined_there(tiny, tmp_path, capsys):
    away, out = tmp_path / "away", tmp_path / "out"
    arguments = ["--bank", str(tiny), "--device", "cpu", "--workers", "1", "--work", str(away), "--out", str(out)]
    assert remote_run.main(arguments) == 0
    bank = read_bank(tiny)
    bundle.merge(bank, [out], tmp_path / "home")
    assert len(list((tmp_path / "home" / bundle.RUNS).glob("*.npz"))) == len(bank.cases)
    for file in (tmp_path / "home" / bundle.OUTCOMES).glob("*.outcome"):
        file.unlink()
    code, _, told = call(capsys, "--bank", tiny, "--out", tmp_path / "home", "--workers", 1)
    assert code == 0
    assert "examining" in told
    assert "training" not in told


def test_a_pack_has_the_data_and_the_accountant_that_a_borrowed_machine_lacks(banks, tmp_path):
    bring_stand_ins(banks["healthy"], tmp_path)
    assert (tmp_path / "sklearn" / "datasets" / "data" / "digits.csv.gz").exists()
    with np.load(tmp_path / "sklearn" / "datasets" / "load_diabetes.npz") as file:
        assert file["data"].shape == (442, 10)
    text = (tmp_path / "opacus" / "accountants" / "analysis" / "rdp.py").read_text(encoding="utf-8")
    assert "import special" not in text
